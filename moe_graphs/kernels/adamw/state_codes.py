"""Averages in 8 bits: small floating-point numbers with a common power of two.

64 numbers that lie behind one another share a scale, a byte: the exponent of the largest of them,
rounded up to a code, as fp32 has it (that of E8M0). A code is a number of 4 exponent bits below
that, and of 3 bits of mantissa and a sign for averages of gradients (E4M3), or of 4 bits for those
of squares, which have no sign (E4M4). As in every such format, 14 octaves below the largest numbers
get evenly spaced.

Codes are read and made by what fp32 does with very small numbers. A code's bits in the place of
fp32's are the number times 2^-112, some of the evenly spaced numbers among them, and a product by a
power of two is exact.

Neighbouring codes are 1/8 or 1/16 of an octave's start apart, for every scale. So a number that
does not change is not rounded again when its scale does. Rounding is stochastic, by 19 or 20 bits:
an average moves by what it gets, on the average, also where that is far less than a code. An
average of squares is never rounded to zero, since the update is divided by its root: below the
least code, 2^-18 of the largest number, updates are smaller than they should be. No code is an
infinity or a NaN: both become 2^126, the largest number.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = 64  # numbers that share a scale
NEAREST = 1 << 31  # bits that round to the nearest code
MOST = 2.0**126
MIXER = 0x61C88647  # odd: its product with 32 random bits is 32 other random bits


def encode(x: Tensor, bits: Tensor | int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes of numbers, and their scales.

    Args:
        x: ``[..., S * 64]``, any float dtype; not below 0 if not ``signed``.
        bits: integers of 32 bits, of which the upper ones are used; like ``x``, or one for all.

    Returns:
        uint8 ``[..., S * 64]`` and ``[..., S]``.
    """
    cut = 20 if signed else 19
    noise = (bits & 0xFFFFFFFF) >> (32 - cut)
    if isinstance(noise, Tensor):
        noise = noise.int().unflatten(-1, (-1, NUMBERS))
    value = x.float().unflatten(-1, (-1, NUMBERS))
    size = value.abs().nan_to_num(MOST, MOST).clamp_max(MOST)
    exact = size.view(torch.int32)
    scale = exact.amax(-1, keepdim=True) + ((1 << cut) - 1) >> 23
    scaled = size * _power(254 - scale.clamp_min(1)) * 2.0**-112
    code = (scaled.view(torch.int32) + noise) >> cut
    if signed:
        code = code | (value.view(torch.int32) >> 24) & 128
    else:
        code = torch.maximum(code, exact.clamp_max(1))
    return code.to(torch.uint8).flatten(-2), scale.to(torch.uint8).squeeze(-1)


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The numbers that ``encode`` has made codes of, in fp32 and the shape of ``codes``."""
    code = codes.int().unflatten(-1, (-1, NUMBERS))
    exact = (code & 127) << 20 | (code >> 7) << 31 if signed else code << 19
    value = exact.view(torch.float32) * 2.0**112 * _power(scales.int().clamp_min(1))[..., None]
    return value.flatten(-2)


def _power(exponent: Tensor) -> Tensor:
    """2 to ``exponent`` - 127."""
    return (exponent << 23).view(torch.float32)
