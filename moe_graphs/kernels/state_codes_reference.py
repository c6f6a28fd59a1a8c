"""Averages in 8 bits: floating-point numbers of 4 exponent bits below the largest of their block.

64 numbers that lie behind one another share a scale, a byte: the exponent of the largest of them,
as fp32 has it (that of E8M0). A code is what is left of fp32's exponent, counted from 15 octaves
below that, and of its mantissa: 3 bits and a sign for averages of gradients (E4M3), 4 bits for
those of squares, which have no sign. Code 0 is zero, and so zeros of both are.

Neighbouring codes are 1/8 or 1/16 of an octave's start apart wherever a scale moves to: numbers
that keep still are never rounded again. Rounding is stochastic, by 16 bits, so that an average
moves by what it gets, on the average, also where that is far less than a code. Below the least code
of a block the average of gradients is that code or zero, at random; that of squares is the least
code, never zero, as what is divided by it must not blow up: there, 2^15 below the largest, updates
are smaller than they ought to be. No code is an infinity or a NaN: they become the largest number.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = 64  # that share a scale
NEAREST = 0x8000  # for bits
MIXER = 0x61C88647  # odd: its product with 32 random bits has others in its upper half


def encode(x: Tensor, bits: Tensor | int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes of numbers, and their scales.

    Args:
        x: ``[..., S * 64]``, any float dtype; not below 0 if not ``signed``.
        bits: integers, of which the lower 16 are used; like ``x``, or one for all.

    Returns:
        uint8 ``[..., S * 64]`` and ``[..., S]``.
    """
    kept = 3 if signed else 4
    cut = 23 - kept
    bits = bits & 0xFFFF
    value = x.float().unflatten(-1, (-1, NUMBERS))
    exact = (value.view(torch.int32) & 0x7FFFFFFF).clamp_max(0x7F7FFFFF)
    if isinstance(bits, Tensor):
        bits = bits.int().unflatten(-1, (-1, NUMBERS))
    noise = (bits << (cut - 16)) + (1 << (cut - 17))
    rounded = ((exact + noise) >> cut).clamp_max((255 << kept) - 1)
    scale = rounded.amax(-1, keepdim=True) >> kept
    base = (scale - 15).clamp_min(0) << kept
    if signed:
        least = (base + 1) << cut
        is_least = (bits + 0.5) * (1 / 65536) * least.view(torch.float32) < value.abs()
        code = torch.where(exact < least, is_least.int(), rounded - base)
        code = code | torch.where(value.view(torch.int32) < 0, 128, 0)
    else:
        code = torch.maximum(rounded - base, exact.clamp_max(1))
    return code.to(torch.uint8).flatten(-2), scale.to(torch.uint8).squeeze(-1)


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """What ``encode`` has made codes of: fp32, like ``codes``."""
    kept = 3 if signed else 4
    code = codes.int().unflatten(-1, (-1, NUMBERS))
    base = (scales.int() - 15).clamp_min(0) << kept
    size = code & 127 if signed else code
    exact = torch.where(size > 0, (size + base[..., None]) << (23 - kept), 0).view(torch.float32)
    if signed:
        exact = torch.where(code > 127, -exact, exact)
    return exact.flatten(-2)
