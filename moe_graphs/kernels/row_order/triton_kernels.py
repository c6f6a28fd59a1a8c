"""The stable sort of (token, slot) pairs by expert, as a counting sort in three launches.

A general sort makes several passes over keys and values; here the keys are expert numbers, so
counting is enough. Pairs are cut into blocks of consecutive pairs, one program each. The first
kernel counts a block's pairs per expert, the second makes of an expert's counts their sums over
the blocks before, and the third places the pairs. Sums are of integers and every row is written
once: no atomics, the same result on every run.

T tokens, K top-k, R = T*K pairs, E experts, B blocks.

Worked example (that of `route_rows`, its numbers are the test): experts [[2, 0], [0, 1], [2, 1]] in
blocks of 4 pairs, [2, 0, 0, 1] and [2, 1], are counted as

    counts_BE = [[2, 1, 1],      before_BE = [[0, 0, 0],      totals_E = [2, 2, 2]
                 [0, 1, 1]]                   [2, 1, 1]]      offsets_E = [2, 4, 6]

The second block's pair 5 (expert 1) goes to row 2 (start of expert 1) + 1 (in blocks before) + 0
(before it in its own block) = 3, and so order[3] = 5, inverse[5] = 3.
"""

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch, next_power_of_2
from moe_graphs.kernels.ops import define_op

BLOCK = 128  # pairs of a program, which compares each with each
COUNT_WIDTH = 64  # experts that it counts at once
SUM = {"BLOCKS": 512, "WIDTH": 8}  # blocks that a program of the sums takes at once, its experts


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    experts_ptr, counts_ptr, pairs, num_experts, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """counts_BE[b, e]: pairs of expert e in block b, WIDTH experts at a time. Grid (B,)."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    for base in range(0, num_experts, WIDTH):
        lane = base + tl.arange(0, WIDTH)
        counts = tl.sum((expert[:, None] == lane[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + block * num_experts + lane, counts, mask=lane < num_experts)


@triton.jit(do_not_specialize=["blocks"])
def _sum_kernel(
    counts_ptr, totals_ptr, num_experts, blocks, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """counts_BE -> before_BE in place, and totals_E, for WIDTH experts. Grid (E / WIDTH,)."""
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.int32)
    for base in range(0, blocks, BLOCKS):
        block = base + tl.arange(0, BLOCKS)
        at = counts_ptr + block[:, None] * num_experts + lane[None, :]
        live = (block < blocks)[:, None] & (lane < num_experts)[None, :]
        counts = tl.load(at, mask=live, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=live)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + lane, total, mask=lane < num_experts)


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    experts_ptr, before_ptr, totals_ptr, order_ptr, inverse_ptr, offsets_ptr, pairs, num_experts,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Rows of the block's pairs, their inverse, and (first block) the offsets. Grid (B,)."""
    block = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    real = lane < num_experts
    total = tl.load(totals_ptr + lane, mask=real, other=0)
    before = tl.load(before_ptr + block * num_experts + lane, mask=real, other=0)
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(offsets_ptr + lane, ends, mask=real)
    place = tl.arange(0, BLOCK)
    pair = block * BLOCK + place
    live = pair < pairs
    expert = tl.load(experts_ptr + pair, mask=live, other=0).to(tl.int32)
    same = (expert[:, None] == expert[None, :]) & (place[None, :] < place[:, None])
    row = tl.gather(ends - total + before, expert, 0) + tl.sum(same.to(tl.int32), 1)
    tl.store(order_ptr + row, pair, mask=live)
    tl.store(inverse_ptr + pair, row, mask=live)


@define_op(device="default")
def sort_pairs(
    experts_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`order_R`, `inverse_R` and `offsets_E` (ends), all int32, of `row_order.route_rows`.

    Expert numbers must lie in `range(num_experts)`, at most 1024 of them. Does not synchronise.
    """
    experts_R = experts_TK.detach().reshape(-1).contiguous()
    pairs, device = experts_R.numel(), experts_R.device
    order_R = torch.empty(pairs, dtype=torch.int32, device=device)
    inverse_R = torch.empty_like(order_R)
    if pairs == 0:
        return order_R, inverse_R, torch.zeros(num_experts, dtype=torch.int32, device=device)
    lanes = next_power_of_2(num_experts)
    blocks = cdiv(pairs, BLOCK)
    counts_BE = torch.empty((blocks, num_experts), dtype=torch.int32, device=device)
    totals_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    offsets_E = torch.empty_like(totals_E)
    args = (experts_R, counts_BE, pairs, num_experts)
    launch(_count_kernel, (blocks,), args, BLOCK=BLOCK, WIDTH=min(lanes, COUNT_WIDTH))
    args = (counts_BE, totals_E, num_experts, blocks)
    launch(_sum_kernel, (cdiv(num_experts, SUM["WIDTH"]),), args, **SUM)
    made = (order_R, inverse_R, offsets_E)
    given = (experts_R, counts_BE, totals_E, *made, pairs, num_experts)
    launch(_place_kernel, (blocks,), given, BLOCK=BLOCK, EXPERTS=lanes)
    return order_R, inverse_R, offsets_E


@torch.library.register_fake("moe_graphs::sort_pairs")
def _(experts_TK, num_experts):
    order_R = experts_TK.new_empty(experts_TK.numel(), dtype=torch.int32)
    offsets_E = experts_TK.new_empty(num_experts, dtype=torch.int32)
    return order_R, torch.empty_like(order_R), offsets_E
