"""Weights of a model that was sharded on the meta device, drawn or read tensor by tensor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from moe_graphs.checkpoints.loading import fill_parts, read_files
from moe_graphs.layers import LanguageModel
from moe_graphs.parallel.own_part import OwnParts, Region

_aten = torch.ops.aten
_OVERWRITES = (
    _aten.normal_.default, _aten.uniform_.default, _aten.fill_.Scalar, _aten.zero_.default,
)  # fmt: skip


@torch.no_grad()
def init_weights_sharded(
    model: LanguageModel, device: torch.device | str, *, seed: int, std: float = 0.02
) -> None:
    """Give a model that was built on the meta device its memory and its first weights.

    Call it after ``parallelize``, on every rank, where torchtitan has
    ``model.to_empty(device=...)`` and ``model.init_weights()``. With a pipeline, pass the model
    that ``pipeline_stages`` has divided, after its stages have been parallelized.

    In every layout the weights are those of ``torch.manual_seed(seed); model.init_weights(std)`` on
    one process with the same kind of device: every rank draws all tensors in this order and keeps
    its own shards. Besides the shards, one whole tensor (for experts, one expert's) is in memory at
    a time, and nothing is sent. Buffers are as after ``init_weights``, too.

    The function seeds torch's generators and leaves them in the same state on all ranks: seed them
    afterwards for dropout.

    Raises:
        ValueError: ``init_weights`` leaves a weight out, or computes with numbers that were there.
    """
    model.to_empty(device=device)
    torch.manual_seed(seed)
    whole = _on_meta(model)
    with _TensorByTensor(whole, OwnParts(model), torch.device(device)) as draws:
        whole.init_weights(std)
    # Such a weight would be memory that nobody has written.
    if missing := [name for name, _ in whole.named_parameters() if name not in draws.drawn]:
        raise ValueError(f"{missing[0]}: init_weights draws no numbers for it: draw them there")
    model.reset_buffers()


@torch.no_grad()
def load_pretrained_sharded(
    model: LanguageModel, directory: str | os.PathLike[str], device: torch.device | str
) -> None:
    """Give a model from ``from_pretrained(directory, device="meta")`` its memory and weights.

    Call it after ``parallelize``, on every rank. Tensors are read one at a time. A rank reads its
    own rows of the tensors that it has shards of; tensors in FP8 or in another order than ours
    (latent attention) are read whole.

    Raises:
        ValueError: as in ``LanguageModel.from_pretrained``.
    """
    files = read_files(Path(directory), model.config.max_sequence_length)
    model.to_empty(device=device)
    model.reset_buffers()
    fill_parts(_on_meta(model), files, OwnParts(model).within)


def _on_meta(model: LanguageModel) -> LanguageModel:
    """Whole model on the meta device, for names, shapes and the order of draws.

    FSDP2 has replaced the model's class by one of its own, so the class before that is looked up.
    """
    kinds: list[Any] = [kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)]
    return kinds[0](model.config, device="meta", dtype=next(model.parameters()).dtype)


class _TensorByTensor(TorchDispatchMode):
    """Mode in which draws into a model on the meta device happen on ``device``.

    This rank's shards of the drawn values are kept.
    """

    def __init__(self, whole: nn.Module, own: OwnParts, device: torch.device) -> None:
        super().__init__()
        self._own, self._device = own, device
        self.drawn: set[str] = set()
        found = whole.state_dict(keep_vars=True)
        self._known = {_key(tensor): (name, tensor) for name, tensor in found.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = args and isinstance(args[0], Tensor) and func._schema.is_mutable
        found = self._known.get(_key(args[0])) if changes else None
        if found is None:
            return func(*args, **(kwargs or {}))
        target, (name, whole) = args[0], found
        if func not in _OVERWRITES:
            raise ValueError(
                f"{name}: {func} in init_weights, of which only normal_, uniform_, fill_ and zero_ "
                f"are known to need no number that was there before"
            )
        self.drawn.add(name)
        value = torch.empty(target.shape, dtype=target.dtype, device=self._device)
        func(value, *args[1:], **(kwargs or {}))
        region = _region_of(target, whole)
        value = value.view([part.stop - part.start for part in region])
        for piece, part in self._own.within(name, region):
            piece.copy_(value[part])
        return target


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _region_of(view: Tensor, whole: Tensor) -> Region:
    """Region of a view that is the whole tensor or some rows of its first dimension."""
    inner = whole.shape[1:]
    first, rows = view.storage_offset() // whole.stride(0), view.numel() // inner.numel()
    assert view.is_contiguous()
    assert rows * inner.numel() == view.numel()
    return (slice(first, first + rows), *(slice(0, size) for size in inner))
