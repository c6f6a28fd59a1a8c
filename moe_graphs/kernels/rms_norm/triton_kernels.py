"""RMS norm, forward and backward, each one pass over the rows.

    y = x * r * w,  r = 1 / sqrt(mean(x^2) + eps)
    dw = sum of dy * x * r,  dx = r * (dy * w - x * r * mean(dy * w * x * r))

With ADD, x is the sum of two tensors, which is written as well, and the sum's gradient is added to
dx. Each is rounded before, as by separate kernels. Otherwise the kernels compute in fp32 and round
once. A program has whole rows in registers, several if they are short, so the backward computes r
again, and r is not kept. If the weight's gradient is wanted, a program of the backward goes over
tiles of rows in steps of the number of programs and adds up in registers; a small kernel then adds
up the programs. Their number depends on the shape only, so the result is deterministic.

R rows, N size of the norm.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.add_sums import PROGRAMS, add_sums
from moe_graphs.kernels.gpu_architectures import stages_that_fit
from moe_graphs.kernels.launching import cdiv, launch, next_power_of_2
from moe_graphs.kernels.ops import define_op

TILE = 4096  # numbers of a program at a time, unless a row has more
# Compiled for sm_90, a backward of 4096 columns has 168 registers a thread. So a multiprocessor has
# three programs of four warps, for which PROGRAMS is chosen, and each loads two tiles ahead.
FORWARD_PER_WARP, BACKWARD_PER_WARP, STAGES = 512, 1024, 3


@triton.jit
def _place(tile, rows, stride, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Element numbers of a tile in rows `stride` apart, and whether they are there."""
    row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLS)[None, :]
    return row.to(tl.int64) * stride + column, (row < rows) & (column < N)


@triton.jit
def _load(ptr, tile, rows, stride, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    at, live = _place(tile, rows, stride, N, ROWS, COLS)
    return tl.load(ptr + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, tile, rows, y, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    at, live = _place(tile, rows, N, N, ROWS, COLS)
    tl.store(ptr + at, y.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def _load_scale(weight_ptr, ZERO_CENTRED: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr):
    # One dimension until it is loaded: for [1, COLS], Triton would use the layout of the rows.
    column = tl.arange(0, COLS)
    scale = tl.load(weight_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    return (scale + 1 if ZERO_CENTRED else scale)[None, :]


@triton.jit(do_not_specialize=["rows"])
def rms_norm_forward_kernel(
    x_ptr, update_ptr, weight_ptr, y_ptr, sum_ptr, rows, stride, update_stride,
    N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    x = _load(x_ptr, tile, rows, stride, N, ROWS, COLS)
    if ADD:
        x += _load(update_ptr, tile, rows, update_stride, N, ROWS, COLS)
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
        _store(sum_ptr, tile, rows, x, N, ROWS, COLS)
    scale = _load_scale(weight_ptr, ZERO_CENTRED, N, COLS)
    r = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / N + EPS)
    _store(y_ptr, tile, rows, x * r * scale, N, ROWS, COLS)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, dsum_ptr, weight_ptr, dx_ptr, sums_ptr, rows, dy_stride, stride, dsum_stride,
    N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, ADD: tl.constexpr,
    SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    scale = _load_scale(weight_ptr, ZERO_CENTRED, N, COLS)
    dw = tl.zeros((ROWS, COLS), tl.float32)
    programs = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        x = _load(x_ptr, tile, rows, stride, N, ROWS, COLS)
        dy = _load(dy_ptr, tile, rows, dy_stride, N, ROWS, COLS)
        # Two sums that do not wait for one another. `tl.fma` says which products are fused, here
        # and below: bits are the same with the weight's gradient and without.
        square = tl.sum(tl.fma(x, x, 0.0), 1, keep_dims=True) / N
        along = tl.sum(tl.fma(x * dy, scale, 0.0), 1, keep_dims=True) / N
        # If eps is 0, a row past the end has no finite r, and would spoil the sums.
        there = tile * ROWS + tl.arange(0, ROWS)[:, None] < rows
        r = tl.where(there, tl.rsqrt(square + EPS), 0.0)
        x *= r
        if SUMS:
            dw += dy * x
        dx = r * tl.fma(x, -along * r, dy * scale)
        if ADD:
            dsum = _load(dsum_ptr, tile, rows, dsum_stride, N, ROWS, COLS)
            dx = dx.to(dx_ptr.dtype.element_ty).to(tl.float32) + dsum
        _store(dx_ptr, tile, rows, dx, N, ROWS, COLS)
    if SUMS:
        _store(sums_ptr, tl.program_id(0), programs, tl.sum(dw, 0, keep_dims=True), N, 1, COLS)


@define_op(device="default")
def rms_norm_forward(
    x_RN: torch.Tensor, weight_N: torch.Tensor, eps: float, zero_centred: bool
) -> torch.Tensor:
    """`[..., N]`, contiguous."""
    y_RN = x_RN.new_empty(x_RN.shape)
    _launch_forward(x_RN, None, weight_N, y_RN, y_RN, eps, zero_centred)
    return y_RN


@define_op(device="default")
def add_rms_norm_forward(
    x_RN: torch.Tensor,
    update_RN: torch.Tensor,
    weight_N: torch.Tensor,
    eps: float,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum in the dtype that torch would give it, and its norm, contiguous."""
    sum_RN, y_RN = _empty_sum(x_RN, update_RN), _empty_sum(x_RN, update_RN)
    _launch_forward(x_RN, update_RN, weight_N, y_RN, sum_RN, eps, zero_centred)
    return sum_RN, y_RN


def _launch_forward(x_RN, update_RN, weight_N, y_RN, sum_RN, eps, zero_centred) -> None:
    """Launch the forward. `sum_RN` is written where there is an `update_RN`."""
    if not y_RN.numel():
        return
    rows = _rows(x_RN)
    update = rows if update_RN is None else _rows(update_RN)
    strides = rows.stride(0), update.stride(0)
    args = (rows, update, weight_N.contiguous(), y_RN, sum_RN, len(rows), *strides)
    variant = _variant(weight_N, eps, zero_centred, FORWARD_PER_WARP)
    grid = (cdiv(len(rows), variant["ROWS"]),)
    launch(rms_norm_forward_kernel, grid, args, **variant, ADD=update_RN is not None)


@define_op(device="default")
def rms_norm_backward(
    dy_RN: torch.Tensor,
    x_RN: torch.Tensor,
    weight_N: torch.Tensor,
    eps: float,
    zero_centred: bool,
    wants_weight: bool,
    dsum_RN: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The gradient of `x_RN` plus `dsum_RN`, and if wanted the weight's, in the weight's dtype."""
    dx_RN, *dw = made = _empty_gradients(x_RN, weight_N, wants_weight)
    variant = _variant(weight_N, eps, zero_centred, BACKWARD_PER_WARP)
    programs = cdiv(x_RN.numel() // max(len(weight_N), 1), variant["ROWS"])
    sums = dx_RN  # a pointer that is not written to
    if wants_weight:
        programs = min(programs, PROGRAMS)
        sums = x_RN.new_empty((programs, len(weight_N)), dtype=torch.float32)
    if dx_RN.numel():
        dy, rows = _rows(dy_RN), _rows(x_RN)
        dsum = rows if dsum_RN is None else _rows(dsum_RN)
        strides = dy.stride(0), rows.stride(0), dsum.stride(0)
        args = (dy, rows, dsum, weight_N.contiguous(), dx_RN, sums, len(rows), *strides)
        stages = 1
        # Loading ahead copies 16 numbers at once; one by one, it takes too many registers.
        if wants_weight and len(weight_N) % 16 == 0:
            read = (dy, rows) if dsum_RN is None else (dy, rows, dsum)
            tile = variant["ROWS"] * variant["COLS"] * sum(x.element_size() for x in read)
            stages = stages_that_fit(x_RN.device, tile, STAGES)
        kinds = {"ADD": dsum_RN is not None, "SUMS": wants_weight, "STAGES": stages}
        launch(rms_norm_backward_kernel, (programs,), args, **variant, **kinds)
    if wants_weight:
        add_sums(sums, *dw)
    return made


@torch.library.register_fake("moe_graphs::rms_norm_forward")
def _(x_RN, weight_N, eps, zero_centred):
    return x_RN.new_empty(x_RN.shape)


@torch.library.register_fake("moe_graphs::add_rms_norm_forward")
def _(x_RN, update_RN, weight_N, eps, zero_centred):
    return _empty_sum(x_RN, update_RN), _empty_sum(x_RN, update_RN)


@torch.library.register_fake("moe_graphs::rms_norm_backward")
def _(dy_RN, x_RN, weight_N, eps, zero_centred, wants_weight, dsum_RN=None):
    return _empty_gradients(x_RN, weight_N, wants_weight)


def _empty_sum(x_RN: torch.Tensor, update_RN: torch.Tensor) -> torch.Tensor:
    return x_RN.new_empty(x_RN.shape, dtype=torch.promote_types(x_RN.dtype, update_RN.dtype))


def _empty_gradients(
    x_RN: torch.Tensor, weight_N: torch.Tensor, wants_weight: bool
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in ((x_RN, weight_N) if wants_weight else (x_RN,))]


def _rows(x_RN: torch.Tensor) -> torch.Tensor:
    """`[R, N]` of numbers side by side; a copy only where no stride leads from row to row."""
    x_RN = x_RN.reshape(-1, x_RN.shape[-1])
    return x_RN if x_RN.stride(1) == 1 else x_RN.contiguous()


def _variant(
    weight_N: torch.Tensor, eps: float, zero_centred: bool, per_warp: int
) -> dict[str, Any]:
    """The constants that the kernels are compiled for."""
    columns = next_power_of_2(len(weight_N))
    rows = max(TILE // columns, 1)
    return {
        "N": len(weight_N), "ROWS": rows, "COLS": columns, "EPS": eps, "ZERO_CENTRED": zero_centred,
        "num_warps": rows * columns // per_warp,
    }  # fmt: skip
