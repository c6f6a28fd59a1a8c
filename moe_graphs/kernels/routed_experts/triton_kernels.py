"""SwiGLU times the routing weight of each row, again in the backward, with all of its gradients.

    h = weight * silu(gate) * up,  x_R2F = [gate | up]
    dgate, dup = those of SwiGLU for weight * dh,  dweight = <silu(gate) * up, dh>

A clamped gate takes the place of SwiGLU if `limit` is not zero, as in `swiglu.triton_kernels`.

A program has a few whole rows, so that one program adds up a weight's gradient: no atomics, and the
same bits on every run. It has read what it overwrites: results may take the place of `dh` and `x`.
The kernels compute in fp32 and round once. Rows without a pair are zero, whatever lies in their
memory.

R rows, F ffn, T tokens, K top-k.
"""

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.swiglu.triton_kernels import gate_and_up_at, gated, gradients_of

TILE = {"ROWS": 4, "COLS": 256}


@triton.jit
def rows_of_program(order_ptr, weights_ptr, rows, ROWS: tl.constexpr):
    """The program's rows, their pairs, their weights [ROWS, 1], and whether they have a pair."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(order_ptr + row, mask=row < rows, other=-1)
    weight = tl.load(weights_ptr + pair, mask=pair >= 0, other=0.0).to(tl.float32)
    return row.to(tl.int64)[:, None], pair, weight[:, None], (pair >= 0)[:, None]


@triton.jit
def gradients_of_tile(
    x_ptr, dh_ptr, row, column, used, weight, F, alpha, limit, offset,
    CLAMPED: tl.constexpr, BY_TURNS: tl.constexpr,
):  # fmt: skip
    """Element numbers of gate and up, their gradients, the result without weight, times dh."""
    gate_at, up_at = gate_and_up_at(row, column, F, BY_TURNS)
    gate = tl.load(x_ptr + gate_at, mask=used, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + up_at, mask=used, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * F + column, mask=used, other=0.0).to(tl.float32)
    h = gated(gate, up, alpha, limit, offset, CLAMPED)
    dgate, dup = gradients_of(gate, up, dh * weight, alpha, limit, offset, CLAMPED)
    return gate_at, up_at, dgate, dup, h, h * dh


@triton.jit(do_not_specialize=["rows"])
def weighted_swiglu_kernel(
    x_ptr, order_ptr, weights_ptr, h_ptr, rows, F, alpha, limit, offset,
    CLAMPED: tl.constexpr, BY_TURNS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, _, weight, live = rows_of_program(order_ptr, weights_ptr, rows, ROWS)
    for base in range(0, F, COLS):
        column = base + tl.arange(0, COLS)[None, :]
        inside, used = (row < rows) & (column < F), live & (column < F)
        gate_at, up_at = gate_and_up_at(row, column, F, BY_TURNS)
        gate = tl.load(x_ptr + gate_at, mask=used, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + up_at, mask=used, other=0.0).to(tl.float32)
        h = gated(gate, up, alpha, limit, offset, CLAMPED) * weight
        tl.store(h_ptr + row * F + column, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def weighted_swiglu_backward_kernel(
    x_ptr, dh_ptr, order_ptr, weights_ptr, dx_ptr, dweights_ptr, h_ptr, rows, F,
    alpha, limit, offset, CLAMPED: tl.constexpr, BY_TURNS: tl.constexpr, RESULT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, pair, weight, live = rows_of_program(order_ptr, weights_ptr, rows, ROWS)
    products = tl.zeros((ROWS, COLS), tl.float32)
    for base in range(0, F, COLS):
        column = base + tl.arange(0, COLS)[None, :]
        inside, used = (row < rows) & (column < F), live & (column < F)
        gate_at, up_at, dgate, dup, h, product = gradients_of_tile(
            x_ptr, dh_ptr, row, column, used, weight, F, alpha, limit, offset, CLAMPED, BY_TURNS
        )
        products += product
        tl.store(dx_ptr + gate_at, dgate.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + up_at, dup.to(dx_ptr.dtype.element_ty), mask=inside)
        if RESULT:
            weighted = (h * weight).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + row * F + column, weighted, mask=inside)
    dweight = tl.sum(products, 1).to(dweights_ptr.dtype.element_ty)
    tl.store(dweights_ptr + pair, dweight, mask=pair >= 0)


@define_op(device="default")
def weighted_swiglu(
    x_R2F: torch.Tensor,
    weights_TK: torch.Tensor,
    order_R: torch.Tensor,
    alpha: float,
    limit: float,
    offset: float,
    by_turns: bool,
) -> torch.Tensor:
    """`[R, 2F] -> [R, F]`."""
    rows, F = x_R2F.shape[0], x_R2F.shape[1] // 2
    x_R2F, h_RF = x_R2F.contiguous(), x_R2F.new_empty((rows, F))
    if h_RF.numel():
        args = (x_R2F, order_R, weights_TK.contiguous(), h_RF, rows, F, alpha, limit, offset)
        kind = {"CLAMPED": limit > 0, "BY_TURNS": by_turns}
        launch(weighted_swiglu_kernel, _grid(rows), args, **kind, **TILE)
    return h_RF


@define_op(device="default", mutates_args=("dh_RF", "dx_R2F"))
def weighted_swiglu_backward(
    x_R2F: torch.Tensor,
    dh_RF: torch.Tensor,
    weights_TK: torch.Tensor,
    order_R: torch.Tensor,
    dx_R2F: torch.Tensor,
    has_gaps: bool,
    with_result: bool,
    alpha: float,
    limit: float,
    offset: float,
    by_turns: bool,
) -> torch.Tensor:
    """Gradient of `weights_TK`; that of `x_R2F` goes to `dx_R2F`, which may be `x_R2F` itself.

    With a result `dh_RF` becomes `weighted_swiglu`. Both are contiguous.
    """
    x_R2F, dweights_TK = x_R2F.contiguous(), weights_TK.new_empty(weights_TK.shape)
    if has_gaps or not dh_RF.numel():
        dweights_TK.zero_()  # pairs without a row
    if dh_RF.numel():
        rows, F = dh_RF.shape
        given = (x_R2F, dh_RF, order_R, weights_TK.contiguous())
        args = (*given, dx_R2F, dweights_TK, dh_RF, rows, F, alpha, limit, offset)
        constants = dict(CLAMPED=limit > 0, BY_TURNS=by_turns, RESULT=with_result, **TILE)
        launch(weighted_swiglu_backward_kernel, _grid(rows), args, **constants)
    return dweights_TK


@torch.library.register_fake("moe_graphs::weighted_swiglu")
def _(x_R2F, weights_TK, order_R, alpha, limit, offset, by_turns):
    return x_R2F.new_empty((x_R2F.shape[0], x_R2F.shape[1] // 2))


@torch.library.register_fake("moe_graphs::weighted_swiglu_backward")
def _(x_R2F, dh_RF, weights_TK, order_R, dx_R2F, has_gaps, with_result, *gate):
    return weights_TK.new_empty(weights_TK.shape)


def _grid(rows: int) -> tuple[int]:
    return (cdiv(rows, TILE["ROWS"]),)
