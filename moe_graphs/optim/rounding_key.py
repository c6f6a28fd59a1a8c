"""Keys of stochastic rounding: random numbers of its own for every parameter."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

_BITS = (1 << 64) - 1


def rounding_key(seed: int, number: int, parameter: Tensor) -> int:
    """Key of the Philox generator for the rounding of a parameter.

    Ranks with the same shard of a DTensor have the same key, so that copies stay equal. Ranks with
    different shards have different keys.

    Args:
        number: number of the parameter among all parameters of the optimizer.

    Returns:
        63 bits. The first and the last bit are 1, so that Triton compiles one kernel for all keys.
    """
    return _mixed(seed, number, _part_of(parameter))


@functools.cache
def _mixed(*parts: int) -> int:
    key = 0
    for part in parts:
        key = key + part + 0x9E3779B97F4A7C15 & _BITS  # SplitMix64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _BITS
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _BITS
        key ^= key >> 31
    return key >> 1 | 1 << 62 | 1


def _part_of(tensor: Any) -> int:
    """Number of this rank's shard of a DTensor, in the order of its mesh; 0 for other tensors."""
    if not hasattr(tensor, "placements"):
        return 0
    mesh, part = tensor.device_mesh, 0
    for size, at, place in zip(mesh.shape, mesh.get_coordinate(), tensor.placements, strict=True):
        if not place.is_replicate():
            part = part * size + at
    return part
