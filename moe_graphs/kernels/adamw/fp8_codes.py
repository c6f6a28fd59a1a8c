"""AdamW's update of weights whose codes in FP8 it writes, too.

To quantize a weight takes as many bytes again as its codes: the weight is read once more. Here a
program updates a block of 128x128 numbers, some rows at a time, and then quantizes the block, which
the cache still has. The numbers get the bits of `adamw_kernel`, the codes those of `fp8_weights`.

E experts, M rows and N columns of a weight of an expert.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.adamw.triton_kernels import (
    pointer_at,
    count_versions,
    launch_updates,
    place,
    tabulated,
    update_numbers,
)
from moe_graphs.kernels.fp8.triton_kernels import BLOCK as SIDE_OF_A_BLOCK
from moe_graphs.kernels.fp8.triton_kernels import store_codes_of_block
from moe_graphs.kernels.ops import define_op

SIDE = tl.constexpr(SIDE_OF_A_BLOCK.value)
PART = 32  # rows of a block that a program updates at once
LAUNCH = {"num_warps": 8, "STAGES": 2, "maxnreg": 80}


@triton.jit
def _places(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OF: tl.constexpr):
    """Places in memory, divided by `OF`, of the numbers of SIDE columns from `row` on."""
    i = tl.arange(0, ROWS * SIDE // OF)
    across: tl.constexpr = SIDE // OF
    return (row + i // across) * (COLUMNS // OF) + (column // OF + i % across)


@triton.jit(do_not_specialize=["begin"])
def adamw_fp8_kernel(
    table_ptr, map_ptr, begin,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, E: tl.constexpr,
    ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr, SCALED: tl.constexpr,
    MULTIPLIED: tl.constexpr, STOCHASTIC: tl.constexpr, CODED: tl.constexpr,
    NEAR: tl.constexpr, NUMBERS: tl.constexpr, MIXER: tl.constexpr, F: tl.constexpr,
    W: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """`ROWS` and `COLUMNS` are M and N; E to V are dtypes, as in `adamw_kernel`."""
    row, n, first = place(table_ptr, map_ptr, begin, ALIGNED, W, SPAN, BLOCK)
    if first >= n:  # the last span of a tensor
        return
    block, across = first // BLOCK, COLUMNS // SIDE
    down, column = block // across, block % across
    for part in tl.range(0, SIDE, PART, num_stages=STAGES):
        top, left = down * SIDE + part, column * SIDE
        update_numbers(
            row, n, _places(top, left, PART, COLUMNS, 1), _places(top, left, PART, COLUMNS, 16),
            _places(top, left, PART, COLUMNS, NUMBERS),
            P, G, M, V, E, ALIGNED, MAXIMIZE, SCALED, MULTIPLIED, STOCHASTIC, CODED, NEAR, NUMBERS,
            MIXER, F, PART * SIDE,
        )  # fmt: skip
    tl.debug_barrier()  # other threads read the numbers now
    c = row + (7 if E is None else 8)
    per_expert = ROWS // SIDE
    store_codes_of_block(
        pointer_at(row + 3, P, ALIGNED),
        pointer_at(c, tl.float8e4nv, True), pointer_at(c + 1, tl.float32, True),
        pointer_at(c + 2, tl.float8e4nv, True), pointer_at(c + 3, tl.float32, True),
        down // per_expert, down % per_expert, column, ROWS, COLUMNS, True, True, POWERS,
    )  # fmt: skip


_WRITTEN = (
    "params", "grads", "exp_avgs", "exp_avg_sqs", "emas", "codes", "code_scales", "flipped",
    "flipped_scales",
)  # fmt: skip


@define_op(device="default", mutates_args=_WRITTEN)
def adamw_update_fp8(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    lr: float,
    lr_tensor: torch.Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    grad_factor: torch.Tensor | None,
    emas: Sequence[torch.Tensor],
    ema_decay: float,
    keys: Sequence[int],
    rounded: bool,
    codes: Sequence[torch.Tensor],
    code_scales: Sequence[torch.Tensor],
    flipped: Sequence[torch.Tensor],
    flipped_scales: Sequence[torch.Tensor],
    powers: bool,
) -> None:
    """`adamw_update` of contiguous weights `[E, M, N]`, and their codes as `fp8_weights` has them.

    States are no codes: to decode them and to quantize in one program takes longer than in two.
    If `found_inf` is 1, the weights do not change, and their codes are written all the same.
    """
    columns = [params, grads, exp_avgs, exp_avg_sqs, *([emas] if emas else [])]
    of_codes, block = [codes, code_scales, flipped, flipped_scales], SIDE.value**2
    table = tabulated(columns, steps, of_codes, [], keys, block)
    numbers = (
        lr, lr_tensor, beta1, beta2, eps, weight_decay, maximize, grad_scale, found_inf,
        grad_factor, ema_decay, rounded,
    )  # fmt: skip
    constants = {"CODED": False, "PART": PART, "POWERS": powers}
    launch_updates(adamw_fp8_kernel, table, numbers, block, **constants, **LAUNCH)
    count_versions(params, exp_avgs, exp_avg_sqs, emas, *of_codes)


@torch.library.register_fake("moe_graphs::adamw_update_fp8")
def _(*_):
    return None
