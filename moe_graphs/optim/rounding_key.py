"""What a parameter is rounded stochastically by: numbers that only it has."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

_BITS = (1 << 64) - 1


def rounding_key(seed: int, number: int, parameter: Tensor) -> int:
    """What Philox rounds a parameter by.

    Ranks with the same part of a DTensor have the same key, those with another one another: so
    copies stay copies.

    Args:
        number: of the parameter among all of the optimizer.

    Returns:
        63 bits, the first and the last of them 1: for a kernel all keys are of one kind.
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
    """Which part of a DTensor this rank has, in the order of its mesh; 0 of other tensors."""
    if not hasattr(tensor, "placements"):
        return 0
    mesh, part = tensor.device_mesh, 0
    for size, at, place in zip(mesh.shape, mesh.get_coordinate(), tensor.placements, strict=True):
        if not place.is_replicate():
            part = part * size + at
    return part
