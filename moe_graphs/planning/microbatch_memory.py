"""What the forward and backward of one microbatch hold and receive, seen from the operations.

Runs on fake tensors, which have shapes and no memory, as on real ones.

Shapes: B sequences, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_graphs.layers import LanguageModel
from moe_graphs.parallel import ModelStage, vocabulary_cross_entropy, vocabulary_group


class Moment(NamedTuple):
    """Where a microbatch is.

    Attributes:
        part: number of the embedding, layer, or norm and head that computes.
        backward: False in the forward.
        graded: in the backward, whether this part has gradients; False before the first one.
    """

    part: int
    backward: bool = False
    graded: bool = False


@dataclass(frozen=True)
class MicrobatchMemory:
    """Bytes on a rank, parameters, buffers and gradients of parameters not among them, nor what a
    stage of a pipeline receives.

    Attributes:
        activations: kept from forward to backward, logits among them.
        weight_copies: kept as well: weights cast by autocast, as many as there are uses.
        temporaries: what there is beside both when most is in use.
        logits: of ``activations``, and as much of ``temporaries`` is their gradient.
        moments: the most at once, by where the microbatch is.
        received: bytes that arrive from the other ranks of a process group, by its name.
    """

    activations: int
    weight_copies: int
    temporaries: int
    logits: int
    moments: Mapping[Moment, int] = field(hash=False)
    received: Mapping[str, int] = field(hash=False)

    @property
    def kept(self) -> int:
        return self.activations + self.weight_copies

    @property
    def peak(self) -> int:
        return max(self.moments.values())


def microbatch_memory(
    model: LanguageModel | ModelStage, entered: Tensor, autocast: torch.dtype | None = None
) -> MicrobatchMemory:
    """Runs forwards and backwards; gradients of parameters go as soon as they are there, as FSDP2's
    go into its reduce-scatters.

    Args:
        entered: a microbatch, fake if the model is: tokens ``[B, S]``, also what is to be
            predicted; of a stage that is not the first, hidden states ``[B, S, D]``.
        autocast: the dtype to compute in, or None for that of the parameters.
    """
    with _cast(entered.device.type, autocast):
        kept, copies, logits = _kept(model, entered)
        live = _watched(model, entered)
    alone = max(live.peaks.values())
    temporaries = max(0, alone - kept - copies)
    return MicrobatchMemory(kept, copies, temporaries, logits, live.peaks, live.received)


def parts_of(model: nn.Module) -> list[str]:
    """What ``parallelize`` groups, in the order of the forward: the norm at the end goes with the
    head."""
    return list(dict.fromkeys(part_of(name) for name, _ in model.named_parameters()))


def part_of(name: str) -> str:
    """Of the parameter of that name."""
    first, *rest = name.split(".")
    return f"layers.{rest[0]}" if first == "layers" else first.replace("norm", "head")


def _forward(
    model: LanguageModel | ModelStage, entered: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What the backward begins with; the logits, if there are; and what leaves a stage, which a
    pipeline holds until the end of the backward."""
    if isinstance(model, ModelStage):
        left = model(entered, torch.ones(1, device=entered.device))
        if model.head is None:
            return left, None, left
        tokens = entered.new_zeros(entered.shape[:2], dtype=torch.int64)
        return _loss(model, left, tokens), left, left
    output = model(entered)
    # The logits are not held while the backward runs.
    return _loss(model, output.logits_BSV, entered) + output.aux_loss, output.logits_BSV, None


def _loss(model: nn.Module, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    rows = logits_BSV.flatten(0, 1), targets_BS.flatten()
    return vocabulary_cross_entropy(*rows, vocabulary_group(model))


def _kept(model: LanguageModel | ModelStage, entered: Tensor) -> tuple[int, int, int]:
    """Bytes of activations, of copies of weights, of logits."""
    owned = {_key(tensor) for tensor in (*model.parameters(), *model.buffers(), entered)}
    found: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in owned:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
        return tensor

    live = _LiveStorages({_key(parameter) for parameter in model.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), live:
        _, logits, left = _forward(model, entered)
        if left is not None:
            pack(left)
    copies = sum(s.nbytes() for key, s in found.items() if key in live.casts)
    total = sum(storage.nbytes() for storage in found.values())
    return total - copies, copies, 0 if logits is None else logits.untyped_storage().nbytes()


def _watched(model: LanguageModel | ModelStage, entered: Tensor) -> _LiveStorages:
    live = _LiveStorages()
    numbers = {part: number for number, part in enumerate(parts_of(model))}

    def drop(number: int, parameter: Tensor) -> None:
        parameter.grad = None
        live.begin(Moment(number, backward=True, graded=True))

    def enter(number: int, *_: Any) -> None:
        live.begin(Moment(number))

    hooks: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            dropped = functools.partial(drop, numbers[part_of(name)])
            hooks.append(parameter.register_post_accumulate_grad_hook(dropped))
    layers = [(f"layers.{number}", layer) for number, layer in model.layers.named_children()]
    for name, part in [("embedding", model.embedding), *layers, ("norm", model.norm)]:
        if part is not None:
            entering = functools.partial(enter, numbers[part_of(name)])
            hooks.append(part.register_forward_pre_hook(entering))
    gradient = _arriving(model, entered)
    try:
        with live:
            begun, *left = _forward(model, entered)
            del left[0]
            live.begin(Moment(len(numbers) - 1, backward=True))
            begun.backward(gradient)
    finally:
        entered.grad = None
        for hook in hooks:
            hook.remove()
    return live


def _arriving(model: LanguageModel | ModelStage, entered: Tensor) -> Tensor | None:
    """The gradient of what leaves a stage."""
    if isinstance(model, LanguageModel) or model.head is not None:
        return None
    size = (*entered.shape[:2], model.config.hidden_size)
    return torch.empty(size, dtype=model.hidden_dtype, device=entered.device)


class _LiveStorages(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still there.

    Attributes:
        peaks: the most there were at once, by moment.
        casts: storages that are casts of ``weights``, by key.
        received: as of ``MicrobatchMemory``.
    """

    def __init__(self, weights: Iterable[int] = ()) -> None:
        super().__init__()
        self.weights = frozenset(weights)
        self.casts: set[int] = set()
        self.received: Counter[str] = Counter()
        self.bytes, self.moment = 0, Moment(0)
        self.peaks: dict[Moment, int] = {}
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._note_received(func, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in before:
                self._note(leaf.untyped_storage())
                if func is torch.ops.aten._to_copy.default and before <= self.weights:
                    self.casts.add(_key(leaf))
        return result

    def begin(self, moment: Moment) -> None:
        self.moment = moment
        self._note_peak()

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, functools.partial(self._gone, key, size))
        self.bytes += size
        self._note_peak()

    def _note_peak(self) -> None:
        self.peaks[self.moment] = max(self.peaks.get(self.moment, 0), self.bytes)

    def _note_received(self, func: Any, args: Any) -> None:
        """By ring, where it is a question."""
        name = func.name().removeprefix("c10d::")
        if name not in _SHARE_RECEIVED:
            raise ValueError(f"plan: nobody has said how many bytes arrive in c10d's {name}")
        arriving = sum(leaf.nbytes for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor))
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        share = _SHARE_RECEIVED[name] * (group.size() - 1)
        self.received[group.group_name] += share * arriving // group.size()

    def _gone(self, key: int, size: int, _: Any) -> None:
        del self._known[key]
        self.casts.discard(key)  # its number may be another storage's from now on
        self.bytes -= size


# Of what is in the first argument when the collective has ended.
_SHARE_RECEIVED = {"allreduce_": 2, "_allgather_base_": 1, "alltoall_base_": 1}


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def _cast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    if dtype is None:
        yield
        return
    # As the trainer's: every use of a weight is cast anew.
    with torch.autocast(device_type, dtype, cache_enabled=False):
        yield


class DropoutOfGPUs(TorchFunctionMode):
    """Keeps a byte for a number, as CUDA's does; the CPU's keeps a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def without_memory(model: nn.Module, device: torch.device | str) -> None:
    """Meta tensors become fake ones of ``device``; inside of a ``FakeTensorMode``."""
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
