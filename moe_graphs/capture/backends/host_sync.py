"""Finds what cannot be in a graph, by name and source line, before a graph is tried."""

from __future__ import annotations

import contextlib
import pathlib
import traceback
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_graphs.capture.errors import CaptureError

# Reads of tensor values that never reach the dispatcher on the CPU.
_HOST_READS = (
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
    torch.Tensor.__array__,
)


def source_line(summary: traceback.StackSummary) -> str:
    """The innermost frame that belongs neither to torch nor to the engine: where the user is."""
    torch_folder = str(pathlib.Path(torch.__file__).parent)
    engine_folder = str(pathlib.Path(__file__).parents[1])
    not_the_user = (torch_folder, engine_folder, contextlib.__file__, "<")
    for frame in reversed(summary):
        if not frame.filename.startswith(not_the_user):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown source line"


def refuse(operation: str) -> None:
    raise CaptureError(
        f"{operation} reads values on the host, which a graph cannot replay, at "
        f"{source_line(traceback.extract_stack())}"
    )


class _RefuseHostReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _HOST_READS:
            refuse(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _RefuseHostSyncs(TorchDispatchMode):
    """Refuses ops whose result or shape depends on values of a tensor on ``device``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._synchronises(func, args):
            refuse(str(func.overloadpacket))
        # An op's own implementation may look at values (a custom op on the CPU): it is one op.
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
        self.after(func, args, kwargs, out)
        return out

    def after(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """For a recorder."""

    def _synchronises(self, func: Any, args: tuple) -> bool:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if tensors and all(t.device.type != self.device.type for t in tensors):
            return False
        if func.overloadpacket is torch.ops.aten.index:
            masks = (torch.bool, torch.uint8)
            return any(i is not None and i.dtype in masks for i in args[1])
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        return any(tag in func.tags for tag in tags)


class HostSyncCheck:
    """Context in which a read of device values on the host raises ``CaptureError``."""

    def __init__(self, device: torch.device, mode: _RefuseHostSyncs | None = None) -> None:
        self._modes = (_RefuseHostReads(), mode or _RefuseHostSyncs(device))

    def __enter__(self) -> HostSyncCheck:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exception)
