"""Lets kernels take the CPU for a GPU of some architecture: what they choose, without the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from moe_graphs.kernels import gpu_architectures
from moe_graphs.kernels.gemm import launch

MULTIPROCESSORS = 132


@contextlib.contextmanager
def pretended_gpu(number: int) -> Iterator[None]:
    """`number` is ten times the compute capability."""
    told = mock.patch.object(gpu_architectures, "capability_of", return_value=divmod(number, 10))
    size = mock.patch.object(launch, "sm_count", return_value=MULTIPROCESSORS)
    with told, size:
        gpu_architectures.architecture_of.cache_clear()
        try:
            yield
        finally:
            gpu_architectures.architecture_of.cache_clear()
