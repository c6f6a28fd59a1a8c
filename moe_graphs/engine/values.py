"""When two plain Python values are the same: bit for bit, not merely equal."""

from __future__ import annotations

import enum
import math
import types
from typing import Any

import torch

# Compared by value: they cannot change inside.
PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range,
)  # fmt: skip
# Compared by identity, and nothing in them is followed as data.
BY_IDENTITY = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum,
    torch.Generator, property,
)  # fmt: skip


def is_plain(value: Any) -> bool:
    return type(value) in PLAIN


def same_value(a: Any, b: Any) -> bool:
    """Whether ``a`` may stand for ``b``: 0.0 is not -0.0, NaN is NaN, 1 is neither True nor 1.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, complex):
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same_value, a.values(), b.values()))
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # arrays compare element by element
        return False
