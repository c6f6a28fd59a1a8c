"""Memory and traffic of one microbatch's forward and backward, read off their operations.

The forward and backward can run on real tensors or on fake ones, which have shapes and no memory.

Shapes: B sequences, S sequence, D model.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from moe_graphs.parallel.model_stage import ModelStage


class Moment(NamedTuple):
    """Progress of a microbatch.

    Attributes:
        part: number of the part that computes: embedding, a layer, or norm and head.
        backward: whether the backward runs.
        graded: whether this part has gradients already; False in the forward.
    """

    part: int
    backward: bool = False
    graded: bool = False


@dataclass(frozen=True)
class MicrobatchMemory:
    """Bytes of a microbatch on a rank.

    Parameters, buffers, gradients of parameters and the messages that a stage of a pipeline
    receives do not count.

    Attributes:
        activations: bytes kept from forward to backward.
        weight_copies: bytes of weights cast by autocast, which are kept as well, once per use.
        temporaries: bytes besides activations and copies at the peak.
        per_layer: activations by part: "embedding", "head", and "dense layer" and "MoE layer", of
            which it is one layer's (the largest).
        moments: peak bytes at each moment.
        received: bytes that arrive from other ranks, by the name of the process group.
    """

    activations: int
    weight_copies: int
    temporaries: int
    per_layer: Mapping[str, int] = field(hash=False)
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
    """Measure a microbatch's memory by running its forward and backward.

    Gradients of parameters are freed as soon as they are computed, as FSDP2 frees them after its
    reduce-scatters.

    Args:
        entered: a microbatch, fake if the model is: tokens ``[B, S]``, which are the targets, too;
            for a stage that is not the first, hidden states ``[B, S, D]``.
        autocast: dtype to compute in; None for the dtype of the parameters.
    """
    with _cast(entered.device.type, autocast):
        kept, copies, per_layer = _kept(model, entered)
        live = _watched(model, entered)
    alone = max(live.peaks.values())
    temporaries = max(0, alone - kept - copies)
    return MicrobatchMemory(kept, copies, temporaries, per_layer, live.peaks, live.received)


def parts_of(model: nn.Module) -> list[str]:
    """Names of the parts that ``parallelize`` groups, in the order of the forward.

    The last norm belongs to the part "head".
    """
    return list(dict.fromkeys(part_of(name) for name, _ in model.named_parameters()))


def part_of(name: str) -> str:
    """Name of the part that has the parameter ``name``."""
    first, *rest = name.split(".")
    return f"layers.{rest[0]}" if first == "layers" else first.replace("norm", "head")


def _forward(model: LanguageModel | ModelStage, entered: Tensor) -> tuple[Tensor, Tensor | None]:
    """Run the forward of a model or of a stage; with targets, so logits are never whole.

    Returns:
        The tensor that the backward begins with; and the hidden states that a pipeline holds until
        the end of the backward, or None for a model and for the last stage.
    """
    if isinstance(model, ModelStage):
        tokens = entered.new_zeros(entered.shape[:2], dtype=torch.int64)
        left = model(entered, torch.ones(1, device=entered.device), tokens)
        return left, left if model.head is None else None
    output = model(entered, entered)
    return output.loss + output.aux_loss, None


def _kept(model: LanguageModel | ModelStage, entered: Tensor) -> tuple[int, int, dict[str, int]]:
    """Bytes of activations, of copies of weights, and of activations by part."""
    owned = {_key(tensor) for tensor in (*model.parameters(), *model.buffers(), entered)}
    found: dict[int, tuple[Any, str]] = {}
    at = [parts_of(model)[0]]

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in owned:
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, (storage, at[0]))
        return tensor

    live = LiveStorages({_key(parameter) for parameter in model.parameters()})
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with _telling_parts(model, lambda part: at.__setitem__(0, part)), saving, live:
        _, left = _forward(model, entered)
        if left is not None:
            pack(left)
    copies, by_part = 0, Counter[str]()
    for key, (storage, part) in found.items():
        if key in live.casts:
            copies += storage.nbytes()
        else:
            by_part[part] += storage.nbytes()
    return by_part.total(), copies, _of_one_layer(model, by_part)


def _of_one_layer(model: LanguageModel | ModelStage, by_part: Mapping[str, int]) -> dict[str, int]:
    """Bytes by part, with the largest of each kind of layer in place of all layers."""
    found: dict[str, int] = {}
    for part, size in by_part.items():
        kind, _, number = part.partition(".")
        if number:
            kind = "MoE layer" if model.config.is_moe_layer(int(number)) else "dense layer"
        found[kind] = max(found.get(kind, 0), size)
    return found


@contextlib.contextmanager
def _telling_parts(
    model: LanguageModel | ModelStage, entering: Callable[[str], None]
) -> Iterator[None]:
    """Context in which ``entering`` gets the name of each part whose forward begins."""

    def tell(part: str, *_: Any) -> None:
        entering(part)

    layers = [(f"layers.{number}", layer) for number, layer in model.layers.named_children()]
    parts = [("embedding", model.embedding), *layers, ("norm", model.norm)]
    hooks = [
        part.register_forward_pre_hook(functools.partial(tell, part_of(name)))
        for name, part in parts
        if part is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _watched(model: LanguageModel | ModelStage, entered: Tensor) -> LiveStorages:
    live = LiveStorages()
    numbers = {part: number for number, part in enumerate(parts_of(model))}

    def drop(number: int, parameter: Tensor) -> None:
        parameter.grad = None
        live.begin(Moment(number, backward=True, graded=True))

    def enter(part: str) -> None:
        live.begin(Moment(numbers[part]))

    hooks: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            dropped = functools.partial(drop, numbers[part_of(name)])
            hooks.append(parameter.register_post_accumulate_grad_hook(dropped))
    gradient = _arriving(model, entered)
    try:
        with live, _telling_parts(model, enter):
            begun, _held = _forward(model, entered)
            live.begin(Moment(len(numbers) - 1, backward=True))
            begun.backward(gradient)
    finally:
        entered.grad = None
        for hook in hooks:
            hook.remove()
    return live


def _arriving(model: LanguageModel | ModelStage, entered: Tensor) -> Tensor | None:
    """Gradient of a stage's output; None for the last stage and for models."""
    if isinstance(model, LanguageModel) or model.head is not None:
        return None
    size = (*entered.shape[:2], model.config.hidden_size)
    return torch.empty(size, dtype=model.hidden_dtype, device=entered.device)


class LiveStorages(TorchDispatchMode):
    """Mode that counts the bytes of living storages that operations have made.

    Attributes:
        peaks: peak bytes at each moment.
        casts: keys of storages that are casts of ``weights``.
        received: as in ``MicrobatchMemory``.
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
        """Add the bytes that a collective brings to this rank; an all-reduce is taken as a ring."""
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
        self.casts.discard(key)  # another storage may get this key from now on
        self.bytes -= size


# By collective: how often the other ranks' share of the result (its first argument) arrives.
_SHARE_RECEIVED = {"allreduce_": 2, "_allgather_base_": 1, "alltoall_base_": 1}


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def _cast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    if dtype is None:
        yield
        return
    # Like the trainer's autocast, without a cache: every use casts the weight anew.
    with torch.autocast(device_type, dtype, cache_enabled=False):
        yield


class DropoutOfGPUs(TorchFunctionMode):
    """Mode in which dropout keeps a mask of one byte per element, as on CUDA.

    On the CPU dropout keeps a mask in the dtype of its input.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def without_memory(model: nn.Module, device: torch.device | str) -> None:
    """Make a model's meta tensors fake tensors on ``device``; needs a ``FakeTensorMode``."""
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
