"""Cross entropy, forward and backward, each one pass over the logits; fp32 inside.

    loss = logsumexp(x) - x[target]
    dx   = g * (exp(x - logsumexp(x)) - [v == target])

A program of the forward walks along one row. Each of its lanes keeps the maximum and the sum of
what it has seen, `WIDTH` neighbours at a time, and the lanes meet only at the end. Rows with the
target `IGNORED` are not read. A target outside the vocabulary makes its row NaN.

Under a `LossRule` `x` is scaled and capped where it is loaded. The forward then also sums a row's
logits, and the backward adds the terms of label smoothing and z-loss.

N rows, V vocabulary, or the part of it that is here.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch, next_power_of_2
from moe_graphs.kernels.ops import define_op

TILE = 2048  # logits a program of four warps has in flight
LOGITS_PER_WARP = TILE // 4
MEAN_BLOCK, MEAN_WARPS = 8192, 16  # rows that the one program of the mean takes at once
LOWEST = tl.constexpr(-3.0e38)  # below any logit but -inf, from which it may be subtracted


@triton.jit
def scaled_and_capped(x, scale, cap, CAPPED: tl.constexpr):
    x *= scale
    if CAPPED:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # cap * tanh(x / cap)
    return x


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr, targets_ptr, losses_ptr, logsumexp_ptr, sums_ptr, V, row_stride, scale, cap,
    IGNORED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    RULE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    target = tl.load(targets_ptr + row)
    counts = target != IGNORED
    logits_ptr += row.to(tl.int64) * row_stride
    tile = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    added = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, tl.where(counts, V, 0), LANES * WIDTH):
        column = start + tile
        x = tl.load(logits_ptr + column, mask=column < V, other=-float("inf")).to(tl.float32)
        if RULE:
            x = scaled_and_capped(x, scale, cap, CAPPED)
            added += tl.sum(tl.where(column < V, x, 0.0), 1)
            x = tl.where(column < V, x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
        top = higher
    highest = tl.max(top, 0)
    log = tl.log(tl.sum(total * tl.exp(top - highest), 0))
    known = (target >= 0) & (target < V)
    at_target = tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    if RULE:
        at_target = scaled_and_capped(at_target, scale, cap, CAPPED)
        tl.store(sums_ptr + row, tl.sum(added, 0))
    # logsumexp - x would lose digits where both are large and their difference is not.
    loss = log + (highest - at_target)
    tl.store(losses_ptr + row, tl.where(counts, loss, 0.0))
    tl.store(logsumexp_ptr + row, highest + log)


@triton.jit
def cross_entropy_mean_kernel(
    losses_ptr, targets_ptr, mean_ptr, count_ptr, N,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, N, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + row, mask=row < N, other=0.0)
        count += tl.load(targets_ptr + row, mask=row < N, other=IGNORED) != IGNORED
    counted = tl.sum(count, 0).to(tl.float32)
    tl.store(mean_ptr, tl.sum(total, 0) / counted)
    tl.store(count_ptr, counted)


@triton.jit
def cross_entropy_backward_kernel(
    logits_ptr, targets_ptr, logsumexp_ptr, grad_ptr, count_ptr, out_ptr,
    V, row_stride, grad_stride, chunks, scale, cap, smoothing, alike, z_loss,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr, MEAN: tl.constexpr, PART: tl.constexpr,
    RULE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // chunks
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    wide = row.to(tl.int64)
    target = tl.load(targets_ptr + row)
    counts = target != IGNORED
    grad = tl.load(grad_ptr + wide * grad_stride)
    if MEAN:
        grad /= tl.load(count_ptr)
    if not PART:
        grad = tl.where((target >= 0) & (target < V), grad, float("nan"))
    at = logits_ptr + wide * row_stride + column
    x = tl.load(at, mask=(column < V) & counts, other=0.0).to(tl.float32)
    logsumexp = tl.load(logsumexp_ptr + row)
    if RULE:
        x = scaled_and_capped(x, scale, cap, CAPPED)
        dx = tl.exp(x - logsumexp) * (1 + 2 * z_loss * logsumexp) - alike
        dx = grad * tl.where(column == target, dx - (1 - smoothing), dx) * scale
        if CAPPED:
            dx *= 1 - (x / cap) * (x / cap)
    else:
        probability = tl.exp(x - logsumexp)
        dx = grad * tl.where(column == target, probability - 1, probability)
    dx = tl.where(counts, dx, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + wide * V + column, dx, mask=column < V)


@triton.jit
def scaled_kernel(x_ptr, scale_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    y = (x * tl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, y, mask=at < elements)


@define_op(device="default")
def scaled(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`(x * scale).to(dtype)` of a dense tensor in one pass; torch's mixed dtypes take thrice."""
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        args = (x, scale, out, x.numel())
        launch(scaled_kernel, (cdiv(x.numel(), TILE),), args, BLOCK=TILE, num_warps=4)
    return out


@define_op(device="default")
def cross_entropy_rows(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's loss (zero if ignored), and its logsumexp for the backward."""
    losses_N = logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32)
    logsumexp_N = torch.empty_like(losses_N)
    _launch_forward(logits_NV, targets_N, losses_N, logsumexp_N, losses_N, ignore_index, None)
    return losses_N, logsumexp_N


@define_op(device="default")
def cross_entropy_rows_by_rule(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, ignore_index: int, rule: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy, logsumexp and sum of the logits of each row, as the rule scales and caps them.

    `rule`: `LossRule.numbers`. Smoothing and z-loss are left to the caller.
    """
    losses_N = logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32)
    logsumexp_N, sums_N = torch.empty_like(losses_N), torch.empty_like(losses_N)
    _launch_forward(logits_NV, targets_N, losses_N, logsumexp_N, sums_N, ignore_index, rule)
    return losses_N, logsumexp_N, sums_N


def _launch_forward(logits_NV, targets_N, losses_N, logsumexp_N, sums_N, ignore_index, rule):
    logits_NV, targets_N = _rows(logits_NV), targets_N.contiguous()
    N, V = logits_NV.shape
    if N:
        row_stride = logits_NV.stride(0)
        # A lane loads 16 bytes if Triton can know that rows begin at multiples of 16 bytes.
        aligned = V % 16 == 0 and row_stride % 16 == 0
        width = 16 // logits_NV.element_size() if aligned else 1
        block = min(TILE, next_power_of_2(V))
        tile = {"LANES": block // width, "WIDTH": width, "num_warps": _warps(block)}
        scale, cap = (1.0, 0.0) if rule is None else rule[:2]
        tile |= {"IGNORED": ignore_index, "RULE": rule is not None, "CAPPED": cap > 0}
        args = (logits_NV, targets_N, losses_N, logsumexp_N, sums_N, V, row_stride, scale, cap)
        launch(cross_entropy_forward_kernel, (N,), args, **tile)


@define_op(device="default")
def mean_of_counted(
    losses_N: torch.Tensor, targets_N: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the losses that count, and how many they are, in fp32."""
    mean, count = losses_N.new_empty(()), losses_N.new_empty(())
    N = losses_N.shape[0]
    args = (losses_N, targets_N.contiguous(), mean, count, N)
    tile = {"BLOCK": min(MEAN_BLOCK, next_power_of_2(max(N, 1))), "num_warps": MEAN_WARPS}
    launch(cross_entropy_mean_kernel, (1,), args, IGNORED=ignore_index, **tile)
    return mean, count


@define_op(device="default")
def cross_entropy_backward(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    logsumexp_N: torch.Tensor,
    grad: torch.Tensor,
    count: torch.Tensor | None,
    ignore_index: int,
    part: bool = False,
    rule: Sequence[float] | None = None,
) -> torch.Tensor:
    """The gradient of the logits, from the gradient of the losses, their sum or their mean.

    `count` is given for the mean. `part`: the logits are some columns of a vocabulary, and targets
    may be other columns. `rule`: `LossRule.numbers`.
    """
    logits_NV = _rows(logits_NV)
    grad_NV = logits_NV.new_empty(logits_NV.shape)
    given = (targets_N, logsumexp_N, grad, count, ignore_index, part, rule)
    _launch_backward(grad_NV, logits_NV, *given)
    return grad_NV


@define_op(device="default", mutates_args=("logits_NV",))
def cross_entropy_backward_in_place(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    logsumexp_N: torch.Tensor,
    grad: torch.Tensor,
    count: torch.Tensor | None,
    ignore_index: int,
    part: bool = False,
    rule: Sequence[float] | None = None,
) -> None:
    """`cross_entropy_backward` that writes the gradient where the contiguous logits are."""
    given = (targets_N, logsumexp_N, grad, count, ignore_index, part, rule)
    _launch_backward(logits_NV, logits_NV, *given)


def _launch_backward(
    grad_NV, logits_NV, targets_N, logsumexp_N, grad, count, ignore_index, part, rule
):
    N, V = logits_NV.shape
    if N:
        block = min(TILE, next_power_of_2(V))
        chunks = cdiv(V, block)
        last = grad if count is None else count
        tensors = (logits_NV, targets_N.contiguous(), logsumexp_N, grad, last)
        strides = (logits_NV.stride(0), grad.stride(0) if grad.dim() else 0)
        numbers = (1.0, 0.0, 0.0, 0.0, 0.0) if rule is None else rule
        args = (*tensors, grad_NV, V, *strides, chunks, *numbers)
        tile = {"BLOCK": block, "MEAN": count is not None, "num_warps": _warps(block)}
        tile |= {"IGNORED": ignore_index, "PART": part}
        tile |= {"RULE": rule is not None, "CAPPED": numbers[1] > 0}
        launch(cross_entropy_backward_kernel, (N * chunks,), args, **tile)


@torch.library.register_fake("moe_graphs::cross_entropy_rows")
def _(logits_NV, targets_N, ignore_index):
    losses_N = logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32)
    return losses_N, torch.empty_like(losses_N)


@torch.library.register_fake("moe_graphs::cross_entropy_rows_by_rule")
def _(logits_NV, targets_N, ignore_index, rule):
    losses_N = logits_NV.new_empty(logits_NV.shape[0], dtype=torch.float32)
    return losses_N, torch.empty_like(losses_N), torch.empty_like(losses_N)


@torch.library.register_fake("moe_graphs::scaled")
def _(x, scale, dtype):
    return torch.empty_like(x, dtype=dtype)


@torch.library.register_fake("moe_graphs::mean_of_counted")
def _(losses_N, targets_N, ignore_index):
    return losses_N.new_empty(()), losses_N.new_empty(())


@torch.library.register_fake("moe_graphs::cross_entropy_backward")
def _(logits_NV, targets_N, logsumexp_N, grad, count, ignore_index, part=False, rule=None):
    return logits_NV.new_empty(logits_NV.shape)


@torch.library.register_fake("moe_graphs::cross_entropy_backward_in_place")
def _(logits_NV, targets_N, logsumexp_N, grad, count, ignore_index, part=False, rule=None):
    return None


def _rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """The logits, copied if a row is not contiguous; rows may lie apart (a padded vocabulary)."""
    return logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()


def _warps(block: int) -> int:
    return max(1, block // LOGITS_PER_WARP)
