"""Weights in few bits to bf16 (or fp16, fp32), block by block.

Values and scales are multiplied in fp32 and rounded once, so the results are those of the plain
path bit for bit. FP8 numbers are taken apart as integers, because GPUs before Ada have no
conversion of them.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from moe_graphs.kernels.launching import cdiv, launch
from moe_graphs.kernels.packed_weights.reference import (
    DYNAMIC_VALUES,
    FP8,
    MXFP4,
    DoubleNF4,
    PackedFormat,
    Stored,
    _FourBits,
)

BLOCKS = 64  # of a program with two codes per byte
TILE = {"ROWS": 16, "COLS": 128}


@triton.jit
def four_bits_kernel(
    codes_ptr, scales_ptr, values_ptr, nested_ptr, offsets_ptr, nested_values_ptr, out_ptr, blocks,
    per_expert, groups, HALF: tl.constexpr, HIGH_FIRST: tl.constexpr, POWERS: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scales are codes where there is a GROUP, whose scales share `nested` and `offset`."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    inside = block < blocks
    byte_at = block * HALF + tl.arange(0, HALF)[None, :]
    both = tl.load(codes_ptr + byte_at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + block, mask=inside, other=0)
    if POWERS:
        exponent = scale.to(tl.int32)  # biased as that of fp32 is; zero stands for 2**-127
        scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    if GROUP:
        group = block // per_expert * groups + block % per_expert // GROUP
        nested = tl.load(nested_ptr + group, mask=inside, other=0)
        offset = tl.load(offsets_ptr + group, mask=inside, other=0)
        # The product is rounded: a sum of its own does not become a part of it.
        scale = tl.fma(tl.load(nested_values_ptr + scale.to(tl.int32)), nested, 0.0) + offset
    if HIGH_FIRST:
        first, second = both >> 4, both & 15
    else:
        first, second = both & 15, both >> 4
    left = tl.load(values_ptr + first) * scale
    right = tl.load(values_ptr + second) * scale
    numbers = tl.interleave(left, right).to(out_ptr.dtype.element_ty)
    number_at = block * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(out_ptr + number_at, numbers, mask=inside)


@triton.jit
def float8_kernel(
    codes_ptr, scales_ptr, out_ptr, rows, N,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A tile lies within one block: `ROWS` and `COLS` divide `BLOCK`, and that divides `N`."""
    columns = N // COLS
    row = (tl.program_id(0) // columns).to(tl.int64) * ROWS
    column = (tl.program_id(0) % columns) * COLS
    scale = tl.load(scales_ptr + (row // BLOCK) * (N // BLOCK) + column // BLOCK)
    where = (row + tl.arange(0, ROWS))[:, None] * N + column + tl.arange(0, COLS)[None, :]
    code = tl.load(codes_ptr + where).to(tl.int32)
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    small = size.to(tl.float32) * 0.001953125  # 2**-9
    number = tl.where(size < 8, small, normal)
    number = tl.where(size == 0x7F, float("nan"), number)
    number = tl.where(code > 0x7F, -number, number) * scale
    tl.store(out_ptr + where, number.to(out_ptr.dtype.element_ty))


def unpack(kind: PackedFormat, stored: Stored, out: torch.Tensor) -> None:
    """Writes `kind.dequantize(stored, out.dtype)` to `out`, which is contiguous."""
    codes, scales, *others = (each.contiguous() for each in stored)
    if isinstance(kind, _FourBits):
        values, blocks = _values_on(codes.device, kind.values), scales.numel()
        nested, groups, group = [values] * 3, 1, 0
        if isinstance(kind, DoubleNF4):
            nested = [*others, _values_on(codes.device, DYNAMIC_VALUES)]
            groups, group = others[0].shape[1], kind.group
        constants = dict(
            HALF=kind.block // 2,
            HIGH_FIRST=kind.high_first,
            POWERS=isinstance(kind, MXFP4),
            GROUP=group,
            BLOCKS=BLOCKS,
        )
        given = (codes, scales, values, *nested, out, blocks, blocks // len(codes), groups)
        launch(four_bits_kernel, (cdiv(blocks, BLOCKS),), given, **constants)
    else:
        assert isinstance(kind, FP8), kind.name
        experts, rows, columns = codes.shape
        grid = (experts * rows // TILE["ROWS"]) * (columns // TILE["COLS"])
        args = (codes.view(torch.uint8), scales, out, experts * rows, columns)
        launch(float8_kernel, (grid,), args, BLOCK=kind.block, **TILE)


@functools.cache
def _values_on(device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    """The table of a format's values; made in the first call, which is in no capture."""
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)
