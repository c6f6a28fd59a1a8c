"""Tensors that stand for another one: a DTensor's memory is that of its local shard."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

_PLAIN = (Tensor, nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """The tensor whose memory it is: what a wrapper (DTensor) stands for on this rank, or itself.

    The very object, of wrappers that stand for one tensor; those for several stay as they are.
    """
    while type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        inner = [part for part in parts if isinstance(part, Tensor)]
        if len(inner) != 1:
            break
        (tensor,) = inner
    return tensor


def stands_for_another(tensor: Tensor) -> bool:
    return local(tensor) is not tensor


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) has changed its class. Without importing that."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_wrapper(kind: type) -> bool:
    """Of a class that dispatch sees: its operations come once more, on what it stands for."""
    return is_traceable_wrapper_subclass_type(kind)


def has_no_values(kinds: tuple[type, ...], kwargs: dict) -> bool:
    """Of an operation: it only finds out shapes, as DTensor does."""
    on_meta = "device" in kwargs and kwargs["device"] == torch.device("meta")
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return on_meta or is_fake or any(kind.__name__ == "FakeTensor" for kind in kinds)
