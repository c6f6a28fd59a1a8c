"""What the forward and backward of one microbatch hold, seen from the storages they make.

Runs on fake tensors, which have shapes and no memory, as on real ones.

Shapes: B sequences, S sequence.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_graphs import kernels
from moe_graphs.layers import LanguageModel


@dataclass(frozen=True)
class MicrobatchMemory:
    """Bytes on a rank, parameters, buffers and gradients of parameters not among them.

    Attributes:
        activations: kept from forward to backward, logits among them.
        weight_copies: kept as well: weights cast by autocast, as many as there are uses.
        temporaries: what there is beside both when most is in use.
        logits: of ``activations``, and as much of ``temporaries`` is their gradient.
        peak: the most at once, with what is ``around``.
    """

    activations: int
    weight_copies: int
    temporaries: int
    logits: int
    peak: int


def nothing_around(name: str, backward: bool) -> int:
    return 0


def microbatch_memory(
    model: LanguageModel,
    tokens_BS: Tensor,
    autocast: torch.dtype | None = None,
    around: Callable[[str, bool], int] = nothing_around,
) -> MicrobatchMemory:
    """Runs forwards and backwards; gradients of parameters go as soon as they are there, as FSDP2's
    go into its reduce-scatters.

    Args:
        tokens_BS: a microbatch, fake if the model is; also what is to be predicted.
        autocast: the dtype to compute in, or None for that of the parameters.
        around: bytes that no operation of the model makes, while the parameter of a name is in use
            forward, or (True) has got its gradient.
    """
    with _cast(tokens_BS.device.type, autocast):
        owned = {_key(tensor) for tensor in (*model.parameters(), *model.buffers(), tokens_BS)}
        kept, copies, logits = _kept(model, tokens_BS, owned)
        alone = _peak(model, tokens_BS, nothing_around)
        peak = alone if around is nothing_around else _peak(model, tokens_BS, around)
    return MicrobatchMemory(kept, copies, max(0, alone - kept - copies), logits, peak)


def _loss(model: LanguageModel, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    output = model(tokens_BS)
    logits = output.logits_BSV
    loss = kernels.cross_entropy(logits.flatten(0, 1), tokens_BS.flatten())
    return loss + output.aux_loss, logits


def _kept(model: LanguageModel, tokens_BS: Tensor, owned: set[int]) -> tuple[int, int, int]:
    """Bytes of activations, of copies of weights, of logits."""
    found: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in owned:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
        return tensor

    live = _LiveStorages({_key(parameter) for parameter in model.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), live:
        _, logits = _loss(model, tokens_BS)
    copies = sum(s.nbytes() for key, s in found.items() if key in live.casts)
    total = sum(storage.nbytes() for storage in found.values())
    return total - copies, copies, logits.untyped_storage().nbytes()


def _peak(model: LanguageModel, tokens_BS: Tensor, around: Callable[[str, bool], int]) -> int:
    live = _LiveStorages()

    def drop(name: str, parameter: Tensor) -> None:
        parameter.grad = None
        live.put_beside(around(name, True))

    def enter(name: str, *_: Any) -> None:
        live.put_beside(around(name, False))

    hooks: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            dropped = functools.partial(drop, name)
            hooks.append(parameter.register_post_accumulate_grad_hook(dropped))
    layers = [(f"layers.{index}", layer) for index, layer in enumerate(model.layers)]
    for name, part in [("embedding", model.embedding), *layers, ("norm", model.norm)]:
        hooks.append(part.register_forward_pre_hook(functools.partial(enter, name)))
    try:
        with live:
            # The logits are not held here while the backward runs.
            _loss(model, tokens_BS)[0].backward()
    finally:
        for hook in hooks:
            hook.remove()
    return live.peak


class _LiveStorages(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still there.

    Attributes:
        peak: the most there were at once.
        casts: storages that are casts of ``weights``, by key.
    """

    def __init__(self, weights: Iterable[int] = ()) -> None:
        super().__init__()
        self.weights = frozenset(weights)
        self.casts: set[int] = set()
        self.bytes, self.beside, self.peak = 0, 0, 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in before:
                self._note(leaf.untyped_storage())
                if func is torch.ops.aten._to_copy.default and before <= self.weights:
                    self.casts.add(_key(leaf))
        return result

    def put_beside(self, count: int) -> None:
        """Bytes that no operation of the model has made, from now on."""
        self.beside = count
        self.peak = max(self.peak, self.bytes + count)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, functools.partial(self._gone, key, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes + self.beside)

    def _gone(self, key: int, size: int, _: Any) -> None:
        del self._known[key]
        self.casts.discard(key)  # its number may be another storage's from now on
        self.bytes -= size


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
