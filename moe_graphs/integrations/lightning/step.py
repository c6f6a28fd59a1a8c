"""The function that the graph of a batch is captured from: Lightning's pieces, in its order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe_graphs.engine.guards.bytecode_names import unwatched
from moe_graphs.engine.tensors import unwrap
from moe_graphs.errors import CaptureError
from moe_graphs.integrations.lightning.index import BatchIndex
from moe_graphs.integrations.lightning.strategies import Forward
from moe_graphs.integrations.lightning.update import Update


class Call:
    """The argument of a whole step. It knows, too, how Lightning runs the batch.

    The engine makes another one of these from the graph's memory for everything that has to do
    with a capture, and that one has no ``eagerly``.

    Attributes:
        given: the batch; scale: what the loss is multiplied by, or None.
        from_lightning: what ``eagerly`` has returned, if it was run.
    """

    def __init__(
        self, given: Any, scale: Tensor | None, eagerly: Callable[[], Any] | None = None
    ) -> None:
        self.given, self.scale, self.eagerly = given, scale, eagerly
        self.from_lightning: list[Any] = []


def _named_parts(call: Call) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.GetAttrKey(name), getattr(call, name)) for name in ("given", "scale")], None


pytree.register_pytree_node(
    Call,
    lambda call: ([call.given, call.scale], None),
    lambda parts, _: Call(*parts),
    flatten_with_keys_fn=_named_parts,
)


@dataclass(frozen=True)
class Logged:
    """A call of ``self.log`` within ``training_step``, made again after every replay."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, eq=False)
class BatchStep:
    """``training_step``, then the gradients are dropped, then the backward, then the update.

    Attributes:
        forward: ``training_step``, as the strategy calls it.
        takes_index: whether it takes ``batch_idx``.
        dropped: the parameters whose gradients are; none within the batches of one update.
        divisor: of the loss, ``accumulate_grad_batches``.
        update: None if Lightning does it, or no update follows this batch.
    """

    module: Any
    plugin: Any
    forward: Forward
    takes_index: bool
    dropped: tuple[nn.Parameter, ...]
    divisor: int
    update: Update | None

    def __call__(self, call: Call) -> tuple[Any, list[tuple[Logged, Any]]] | None:
        """Returns what ``training_step`` returns and logs; None if Lightning ran the batch.

        Raises:
            CaptureError: for what a replay would get wrong.
        """
        if call.eagerly is not None:
            call.from_lightning.append(call.eagerly())
            return None
        index = (BatchIndex(),) if self.takes_index else ()
        found = pytree.tree_flatten(call.given)
        with noting_logs(self.module) as logged, self.plugin.train_step_context():
            output = self.forward(call.given, *index)
        if output is None:
            raise CaptureError("training_step returned None, for which Lightning skips the batch")
        output = dict(output) if isinstance(output, Mapping) else output
        loss = (output["loss"] if isinstance(output, dict) else output) / self.divisor
        for parameter in self.dropped:
            parameter.grad = None
        self.module.backward(loss if call.scale is None else loss * call.scale)
        if self.update is not None:
            self.update()
        _check_batch(*found, call.given)
        _check(output, logged, self.module)
        return output, logged


@contextlib.contextmanager
def noting_logs(module: Any) -> Iterator[list[tuple[Logged, Any]]]:
    """``self.log`` notes what it is given, as it is then: its values become outputs of the graph.

    Lightning's own ``log``, called past the module, raises meanwhile: it would log the capture.
    """
    noted_logs: list[tuple[Logged, Any]] = []

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        value = value.detach().clone() if isinstance(value, Tensor) else value
        noted_logs.append((Logged(name, args, options), value))

    with _attributes(module, log=log, _current_fx_name=None):
        yield noted_logs


@contextlib.contextmanager
def unwatched_logs(module: Any) -> Iterator[None]:
    """Lightning's bookkeeping is none of what ``training_step`` reads, and changes all the time."""
    original = module.log

    def log(*args: Any, **options: Any) -> None:
        with unwatched():
            original(*args, **options)

    with _attributes(module, log=log):
        yield


@contextlib.contextmanager
def _attributes(module: Any, **values: Any) -> Iterator[None]:
    attributes = vars(module)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)


def _check_batch(leaves: list[Any], structure: pytree.TreeSpec, batch: Any) -> None:
    """A copy with containers of the engine's own; the engine looks after its tensors."""
    now, structure_now = pytree.tree_flatten(batch)
    if structure != structure_now or not all(map(is_, now, leaves)):
        raise CaptureError(
            "training_step changes the batch, which hooks would not see after a replay: change a "
            "copy of it, or do so in on_after_batch_transfer"
        )


def _check(output: Any, logged: list[tuple[Logged, Any]], module: Any) -> None:
    """Python's values are those of the capture, and not all of them can be guarded (a clock)."""
    device = module.device
    for call, value in logged:
        if not _is_on(value, device):
            raise CaptureError(
                f"self.log({call.name!r}) was given {_described(value)}, which a graph would not "
                f"renew: log a tensor on {device}, or log in on_train_batch_end"
            )
    kept = [*module.parameters(), *module.buffers()]
    kept += [parameter.grad for parameter in kept if parameter.grad is not None]
    memory = {unwrap(tensor).untyped_storage().data_ptr() for tensor in kept}
    for path, leaf in pytree.tree_flatten_with_path(output)[0]:
        name = f"output{pytree.keystr(path)}"
        if not (_is_on(leaf, device) or type(leaf) in (str, int, bool, type(None))):
            raise CaptureError(
                f"training_step returns {_described(leaf)} ({name}), which a graph would not "
                f"renew: return tensors on {device}"
            )
        if isinstance(leaf, Tensor) and unwrap(leaf).untyped_storage().data_ptr() in memory:
            raise CaptureError(
                f"training_step returns a parameter, buffer or gradient ({name}), and a replay "
                f"returns copies: return a clone, or read it in on_train_batch_end"
            )


def _is_on(value: Any, device: Any) -> bool:
    return isinstance(value, Tensor) and value.device == device


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor on {value.device}"
    return "batch_idx" if type(value) is BatchIndex else f"a {type(value).__name__}"
