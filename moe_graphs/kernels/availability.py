"""Whether the Triton kernels serve a tensor. Where they do not, the plain torch path does."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

# Found out at import, since torch.compile does not trace a search for a package.
_INSTALLED = importlib.util.find_spec("triton") is not None
_as_on_gpus = False


def has_kernel(x: Tensor) -> bool:
    """Whether a Triton kernel that computes in fp32 serves this tensor (real or fake)."""
    narrow = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return (x.is_cuda or _as_on_gpus) and narrow and has_triton()


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Serve fake tensors of the CPU like those of a GPU, in the whole process.

    Without a GPU, this shows which tensors the kernels keep for their backward.
    """
    global _as_on_gpus
    before, _as_on_gpus = _as_on_gpus, True
    try:
        yield
    finally:
        _as_on_gpus = before


def has_triton() -> bool:
    """Whether Triton is installed; says once what it costs if it is not."""
    if not _INSTALLED and not torch.compiler.is_compiling():
        _warn()
    return _INSTALLED


@functools.cache
def _warn() -> None:
    warnings.warn(
        "moe_graphs: Triton is not installed, so CUDA tensors take the plain torch path, which is "
        "slower: pip install triton",
        stacklevel=2,
    )
