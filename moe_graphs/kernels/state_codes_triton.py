"""Averages in 8 bits, within a kernel: as `state_codes_reference.py` has them, bit by bit."""

import triton
import triton.language as tl


@triton.jit
def _of_each(of_block, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    """What numbers share, for every one of them."""
    return tl.broadcast_to(of_block[:, None], (BLOCK // NUMBERS, NUMBERS)).reshape(BLOCK)


@triton.jit
def decoded(codes, scales, SIGNED: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """`codes` [BLOCK] and `scales` [BLOCK // NUMBERS], uint8: fp32 [BLOCK]."""
    kept: tl.constexpr = 3 if SIGNED else 4
    base = _of_each(tl.maximum(scales.to(tl.int32) - 15, 0) << kept, BLOCK, NUMBERS)
    code = codes.to(tl.int32)
    size = code & 127 if SIGNED else code
    exact = tl.where(size > 0, (size + base) << (23 - kept), 0)
    if SIGNED:
        exact |= (code >> 7) << 31
    return exact.to(tl.float32, bitcast=True)


@triton.jit
def encoded(x, bits, SIGNED: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 [BLOCK] and integers whose lower 16 bits are used: codes and scales."""
    kept: tl.constexpr = 3 if SIGNED else 4
    cut: tl.constexpr = 23 - kept
    bits = (bits & 0xFFFF).to(tl.int32)
    whole = x.to(tl.int32, bitcast=True)
    exact = tl.minimum(whole & 0x7FFFFFFF, 0x7F7FFFFF)
    rounded = (exact + (bits << (cut - 16)) + (1 << (cut - 17))) >> cut
    rounded = tl.minimum(rounded, (255 << kept) - 1)
    scales = tl.max(rounded.reshape(BLOCK // NUMBERS, NUMBERS), 1) >> kept
    base = _of_each(tl.maximum(scales - 15, 0) << kept, BLOCK, NUMBERS)
    if SIGNED:
        least = (base + 1) << cut
        share = (bits.to(tl.float32) + 0.5) * (1 / 65536)
        is_least = share * least.to(tl.float32, bitcast=True) < tl.abs(x)
        code = tl.where(exact < least, is_least.to(tl.int32), rounded - base)
        code |= (whole >> 31) & 128
    else:
        code = tl.maximum(rounded - base, tl.minimum(exact, 1))
    return code.to(tl.uint8), scales.to(tl.uint8)
