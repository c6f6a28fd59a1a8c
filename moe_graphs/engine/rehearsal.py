"""Runs a call once and finds what cannot be in a graph, by name and source line."""

from __future__ import annotations

import contextlib
import pathlib
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_graphs.engine.signature import tensor_leaves
from moe_graphs.errors import CaptureError

# Reads of tensor values that never reach the dispatcher on the CPU.
_HOST_READS = (
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
    torch.Tensor.__array__,
)
_VALUE_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@contextlib.contextmanager
def capturable_only(
    device: torch.device, known: Iterable[torch.Tensor] | None = None
) -> Iterator[None]:
    """Raises ``CaptureError`` for reads of values on the host, and for tensors from outside.

    Args:
        known: inputs, parameters and buffers. An op that reads other memory, which no op of this
            block made, would have its address baked into the graph: refused, if given.
    """
    with _RefuseHostReads(), _RefuseOps(device, known):
        yield


def source_line(summary: traceback.StackSummary) -> str:
    """The innermost frame that belongs neither to torch nor to the engine: where the user is."""
    torch_folder = str(pathlib.Path(torch.__file__).parent)
    engine_folder = str(pathlib.Path(__file__).parent)
    not_the_user = (torch_folder, engine_folder, contextlib.__file__, "<")
    for frame in reversed(summary):
        if not frame.filename.startswith(not_the_user):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown source line"


def _refuse(operation: str, problem: str) -> None:
    line = source_line(traceback.extract_stack())
    raise CaptureError(f"{operation} {problem}, at {line}")


class _RefuseHostReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _HOST_READS:
            _refuse(
                f"Tensor.{func.__name__}", "reads values on the host, which a graph cannot replay"
            )
        return func(*args, **(kwargs or {}))


class _RefuseOps(TorchDispatchMode):
    def __init__(self, device: torch.device, known: Iterable[torch.Tensor] | None) -> None:
        super().__init__()
        self._device = device
        self._known = None if known is None else {_address(tensor) for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tensor_leaves((args, kwargs)) if t.device.type == self._device.type]
        if (tensors or not tensor_leaves(args)) and _depends_on_values(func, args):
            _refuse(
                str(func.overloadpacket), "reads values on the host, which a graph cannot replay"
            )
        if self._known is not None:
            self._check_forward(func, tensors)
        # An op's own implementation may look at values (a custom op on the CPU): it is one op.
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
        if self._known is not None:
            self._known.update(_address(tensor) for tensor in tensor_leaves(out))
        return out

    def _check_forward(self, func: Any, tensors: list[torch.Tensor]) -> None:
        operation = str(func.overloadpacket)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            _refuse(
                operation,
                "runs under saved-tensor hooks (activation checkpointing, offloading), which a "
                "replay does not run: checkpoint around the scope instead, which runs it eagerly, "
                "or leave this part out of the scopes",
            )
        if func is torch.ops.aten.lift_fresh.default:
            return
        for tensor in tensors:
            if tensor.numel() and _address(tensor) not in self._known:
                _refuse(
                    operation,
                    f"reads a tensor {tuple(tensor.shape)} that is neither an input nor a "
                    f"parameter or buffer of the model, and a graph would keep reading its "
                    f"address: register it as a buffer, pass it as an argument, or name it in "
                    f"FullIteration(state=...)",
                )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _depends_on_values(func: Any, args: tuple) -> bool:
    if func.overloadpacket is torch.ops.aten.index:
        masks = (torch.bool, torch.uint8)
        return any(i is not None and i.dtype in masks for i in args[1])
    return any(tag in func.tags for tag in _VALUE_TAGS)
