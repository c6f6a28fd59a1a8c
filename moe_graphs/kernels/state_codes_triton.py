"""Averages in 8 bits, within a kernel: as `state_codes_reference.py` has them, bit by bit."""

import triton
import triton.language as tl


@triton.jit
def _of_each(of_block, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """What numbers share, for every one of them."""
    return tl.broadcast_to(of_block[:, None], (BLOCK // NUMBERS, NUMBERS)).reshape(BLOCK)


@triton.jit
def _power(exponents, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """2 to `exponents` - 127, for every number."""
    return _of_each(exponents << 23, BLOCK, NUMBERS).to(tl.float32, bitcast=True)


@triton.jit
def decoded(codes, scales, SIGNED: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """`codes` [BLOCK] and `scales` [BLOCK // NUMBERS], uint8: fp32 [BLOCK]."""
    up: tl.constexpr = 2.0**112
    if SIGNED:  # the sign goes along to all bits above the code
        exact = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    else:
        exact = codes.to(tl.int32) << 19
    scale = _power(tl.maximum(scales.to(tl.int32), 1), BLOCK, NUMBERS)
    return exact.to(tl.float32, bitcast=True) * up * scale


@triton.jit
def encoded(x, bits, SIGNED: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 [BLOCK] and uint32 whose upper bits are used: codes and scales."""
    cut: tl.constexpr = 20 if SIGNED else 19
    most: tl.constexpr = 2.0**126
    down: tl.constexpr = 2.0**-112
    noise = (bits.to(tl.uint32) >> (32 - cut)).to(tl.int32)
    size = tl.minimum(tl.abs(x), most)
    exact = size.to(tl.int32, bitcast=True)
    scales = (tl.max(exact.reshape(BLOCK // NUMBERS, NUMBERS), 1) + ((1 << cut) - 1)) >> 23
    scaled = size * _power(254 - tl.maximum(scales, 1), BLOCK, NUMBERS) * down
    code = (scaled.to(tl.int32, bitcast=True) + noise) >> cut
    if SIGNED:
        code |= (x.to(tl.int32, bitcast=True) >> 24) & 128
    else:
        code = tl.maximum(code, tl.minimum(exact, 1))
    return code.to(tl.uint8), scales.to(tl.uint8)
