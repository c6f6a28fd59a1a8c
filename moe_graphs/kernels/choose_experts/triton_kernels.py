"""The choice of experts: two kernels forward, one backward, which keep the logits and the choice.

    scores   softmax(logits) or sigmoid(logits)
    choose   the best groups of a token by the sum of their two best scores + bias, in them the best
             K experts by score + bias; the lowest number wins a tie
    weights  scores of the chosen (/ their sum) * SCALING
    loss     AUX * E / (K * T) * sum_e counts[e] * mean_t probs[t, e] + Z * mean_t logsumexp[t]^2

A program takes ROWS tokens at a time with all experts beside each other and repeats "find the best,
strike it out". Floats are compared as integers of the same order: every integer has a place in it,
so NaN (the largest, as for `torch.topk`) can neither stop a search nor leave the experts' range,
and a reduction over a warp is one instruction. What a loss needs of all tokens is summed up per
program and then over the programs, in a fixed order: no atomics.

T tokens, E experts, K top-k, N groups, P programs; LANES is E in powers of two.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch, next_power_of_2
from moe_graphs.kernels.ops import define_op

STRUCK = tl.constexpr(-(2**31))  # below the key of every number, -inf included
ELEMENTS = 256  # elements of a program's tile: 8 per thread
# 16 warps for each of 132 SMs: half as many take 26 us instead of 19 (H200, 16384 tokens, 128
# experts). The number does not depend on the device, since it decides the order of the sums.
PROGRAMS = 2048
# With so few registers all programs are resident at once: a second round would take as long as the
# first. A warp that holds 512 lanes and more of a token needs all registers there are.
MAX_REGISTERS, MAX_REGISTERS_WIDE, WIDE = 128, 255, 512
FINISH = {"WIDTH": 8, "BLOCK": 512, "num_warps": 8}  # experts of a program, programs at once


@triton.jit
def _key(value):
    """An integer in the order of the floats, NaN on top. Its own inverse but for NaN."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, lane):
    """The lane of the largest key of each row, the lowest of several."""
    largest = tl.max(keys, 1)
    return tl.min(tl.where(keys == largest[:, None], lane, 0x7FFFFFFF), 1)


@triton.jit
def _softmax(logits, real):
    """Softmax (zero in lanes without an expert) and logsumexp."""
    top = tl.max(tl.where(real, logits, float("-inf")), 1)
    powers = tl.where(real, tl.exp(logits - top[:, None]), 0.0)
    total = tl.sum(powers, 1)
    return powers / total[:, None], top + tl.log(total)


@triton.jit
def _scores(logits, real, SIGMOID: tl.constexpr, Z: tl.constexpr):
    """Scores, softmax and logsumexp; the last two are only right where the options want them."""
    if SIGMOID:
        scores = tl.where(real, tl.sigmoid(logits), 0.0)
        if Z != 0:
            softmax, logsumexp = _softmax(logits, real)
        else:
            softmax, logsumexp = scores, tl.sum(scores, 1)
    else:
        softmax, logsumexp = _softmax(logits, real)
        scores = softmax
    return scores, softmax, logsumexp


@triton.jit
def _strike_groups(keys, lane, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Leaves only the experts of the best groups."""
    totals = tl.full(
        keys.shape, STRUCK, dtype=tl.int32
    )  # a group's total, in the lane of each of its experts
    for group in range(GROUPS):
        own = tl.where(lane // SIZE == group, keys, STRUCK)
        total = _value(tl.max(own, 1))
        if SIZE > 1:
            rest = tl.where(lane == _best(own, lane)[:, None], STRUCK, own)
            total += _value(tl.max(rest, 1))
        totals = tl.where(lane // SIZE == group, _key(total)[:, None], totals)
    kept = tl.full(keys.shape, STRUCK, dtype=tl.int32)
    for _ in range(TOP_GROUPS):
        hit = lane // SIZE == _best(totals, lane)[:, None] // SIZE
        totals = tl.where(hit, STRUCK, totals)
        kept = tl.where(hit, keys, kept)
    return kept


@triton.jit(do_not_specialize=["tokens"])
def choose_kernel(
    logits_ptr, bias_ptr, given_ptr, weights_ptr, experts_ptr, chosen_ptr, counts_ptr, probs_ptr,
    squares_ptr, tokens, E: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, SCALING: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    AUX: tl.constexpr, Z: tl.constexpr, BIASED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """The choice; of a program's tokens counts_PE, probs_PE and squares_P. Grid (P,)."""
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    real = lane < E
    counts = tl.zeros((ROWS, LANES), dtype=tl.int32)
    probs = tl.zeros((ROWS, LANES), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        live = first + row < tokens
        wide = tl.cast(first, tl.int64)
        logits = tl.load(logits_ptr + wide * E + (row * E + lane), mask=live & real, other=0.0)
        scores, _, logsumexp = _scores(logits, real, SIGMOID, Z)
        ranks = tl.full((ROWS, LANES), -1, dtype=tl.int32)
        if GIVEN:
            for k in range(K):
                given = tl.load(given_ptr + wide * K + (row * K + k), mask=live, other=-1)
                ranks = tl.where(lane == given.to(tl.int32), k, ranks)
        else:
            biased = scores
            if BIASED:
                biased += tl.load(bias_ptr + lane, mask=real, other=0.0).to(tl.float32)
            keys = tl.where(real, _key(biased), STRUCK)
            if GROUPS > 1:
                keys = _strike_groups(keys, lane, E // GROUPS, GROUPS, TOP_GROUPS)
            for k in range(K):
                hit = lane == _best(keys, lane)[:, None]
                keys = tl.where(hit, STRUCK, keys)
                ranks = tl.where(hit, k, ranks)
        chosen = (ranks >= 0) & live
        weights = tl.where(chosen, scores, 0.0)
        if NORMALIZE:
            weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
        place = wide * K + (row * K + ranks)
        tl.store(weights_ptr + place, weights * SCALING, mask=chosen)
        tl.store(experts_ptr + place, lane.to(tl.int64), mask=chosen)
        tl.store(chosen_ptr + place, lane.to(tl.int16), mask=chosen)
        counts += chosen.to(tl.int32)
        if AUX != 0:
            if SIGMOID:
                scores = scores / (tl.sum(scores, 1) + 1e-20)[:, None]
            probs += tl.where(live, scores, 0.0)
        if Z != 0:
            squares += tl.where(first + tl.arange(0, ROWS) < tokens, logsumexp * logsumexp, 0.0)
    at = tl.program_id(0) * E + tl.arange(0, LANES)
    tl.store(counts_ptr + at, tl.sum(counts, 0), mask=tl.arange(0, LANES) < E)
    if AUX != 0:
        tl.store(probs_ptr + at, tl.sum(probs, 0), mask=tl.arange(0, LANES) < E)
    if Z != 0:
        tl.store(squares_ptr + tl.program_id(0), tl.sum(squares, 0))


@triton.jit(do_not_specialize=["tokens", "programs"])
def finish_kernel(
    counts_ptr, probs_ptr, squares_ptr, totals_ptr, terms_ptr, tokens, programs,
    E: tl.constexpr, K: tl.constexpr, AUX: tl.constexpr, Z: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts_E, and terms_E whose sum is the loss, for WIDTH experts. Grid (E / WIDTH,)."""
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    counts = tl.zeros((BLOCK, WIDTH), dtype=tl.int32)
    probs = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for base in range(0, programs, BLOCK):
        program = base + tl.arange(0, BLOCK)
        at = program[:, None] * E + lane[None, :]
        live = (program < programs)[:, None] & (lane < E)[None, :]
        counts += tl.load(counts_ptr + at, mask=live, other=0)
        if AUX != 0:
            probs += tl.load(probs_ptr + at, mask=live, other=0.0)
        if Z != 0:
            squares += tl.load(squares_ptr + program, mask=program < programs, other=0.0)
    count, prob, square = tl.sum(counts, 0), tl.sum(probs, 0), tl.sum(squares, 0)
    tl.store(totals_ptr + lane, count.to(tl.int64), mask=lane < E)
    if AUX + Z != 0:
        terms = AUX * E / (K * 1.0 * tokens) * (count * (prob / tokens))
        # The z-loss goes to the term of expert 0.
        terms += tl.where(lane == 0, Z * (square / tokens), 0.0)
        tl.store(terms_ptr + lane, terms, mask=lane < E)


@triton.jit(do_not_specialize=["tokens"])
def choose_backward_kernel(
    logits_ptr, chosen_ptr, counts_ptr, dweights_ptr, dloss_ptr, out_ptr, tokens,
    E: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, SCALING: tl.constexpr,
    AUX: tl.constexpr, Z: tl.constexpr, WEIGHTED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits, [T, E] or split. AUX and Z are zero without a dloss."""
    lane = tl.arange(0, LANES)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    real, live = lane < E, row < tokens
    logits = tl.load(logits_ptr + row * E + lane, mask=live & real, other=0.0)
    scores, softmax, logsumexp = _scores(logits, real, SIGMOID, Z)
    if WEIGHTED:
        ranks = tl.full((ROWS, LANES), -1, dtype=tl.int32)
        for k in tl.static_range(K):
            expert = tl.load(chosen_ptr + row * K + k, mask=live, other=-1).to(tl.int32)
            ranks = tl.where(lane == expert, k, ranks)
        chosen = ranks >= 0
        dscores = tl.load(dweights_ptr + row * K + ranks, mask=chosen, other=0.0) * SCALING
        if NORMALIZE:
            total = (tl.sum(tl.where(chosen, scores, 0.0), 1) + 1e-20)[:, None]
            mean = tl.sum(dscores * scores, 1)[:, None] / total
            dscores = tl.where(chosen, (dscores - mean) / total, 0.0)
    else:
        dscores = tl.zeros((ROWS, LANES), dtype=tl.float32)
    if AUX != 0:
        slope = AUX * E / (K * 1.0 * tokens) * (tl.load(dloss_ptr) / tokens)
        dprobs = slope * tl.load(counts_ptr + lane, mask=real, other=0).to(tl.float32)
        if SIGMOID:
            total = (tl.sum(scores, 1) + 1e-20)[:, None]
            dscores += (dprobs - tl.sum(dprobs * scores, 1)[:, None] / total) / total
        else:
            dscores += dprobs
    if SIGMOID:
        dlogits = dscores * scores * (1 - scores)
    else:
        dlogits = scores * (dscores - tl.sum(dscores * scores, 1)[:, None])
    if Z != 0:
        dlogits += softmax * (2 * Z * (tl.load(dloss_ptr) / tokens) * logsumexp)[:, None]
    if SPLIT:
        at = out_ptr + row * (2 * E) + lane
        high = dlogits.to(out_ptr.dtype.element_ty)
        low = (dlogits - high.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(at, high, mask=live & real)
        tl.store(at + E, low, mask=live & real)
    else:
        tl.store(out_ptr + row * E + lane, dlogits, mask=live & real)


@define_op(device="default")
def choose_experts(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalize: bool,
    scaling: float,
    num_groups: int,
    top_k_groups: int,
    aux_loss_coef: float,
    z_loss_coef: float,
    given_TK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`weights_TK` (fp32), `experts_TK`, loss (0-dim fp32), `counts_E` (int64), `chosen_TK`.

    `chosen_TK` is `experts_TK` (int64) in 16 bits, which the backward keeps. With `given_TK`
    (int64, contiguous) nothing is chosen: these are the experts.
    """
    (tokens, E), device = logits_TE.shape, logits_TE.device
    if given_TK is None:
        weights_TK = torch.empty((tokens, top_k), device=device)
        experts_TK = torch.empty((tokens, top_k), dtype=torch.int64, device=device)
        chosen_TK = torch.empty((tokens, top_k), dtype=torch.int16, device=device)
    else:  # filled here: an expert that is given twice has one place in the kernel
        weights_TK = torch.zeros((tokens, top_k), device=device)
        experts_TK, chosen_TK = given_TK.clone(), given_TK.to(torch.int16)
    if not tokens:
        counts_E = torch.zeros(E, dtype=torch.int64, device=device)
        return weights_TK, experts_TK, torch.zeros((), device=device), counts_E, chosen_TK
    tile, losses = _tile(E), {"AUX": aux_loss_coef, "Z": z_loss_coef}
    programs = min(cdiv(tokens, tile["ROWS"]), PROGRAMS)
    counts_PE = torch.empty((programs, E), dtype=torch.int32, device=device)
    probs_PE = torch.empty((programs, E) if aux_loss_coef else 1, device=device)
    squares_P = torch.empty(programs if z_loss_coef else 1, device=device)
    sums = (counts_PE, probs_PE, squares_P)
    bias = logits_TE if bias_E is None else bias_E
    given = experts_TK if given_TK is None else given_TK
    launch(
        choose_kernel, (programs,),
        (logits_TE, bias, given, weights_TK, experts_TK, chosen_TK, *sums, tokens),
        E=E, K=top_k, SIGMOID=sigmoid, NORMALIZE=normalize, SCALING=scaling, GROUPS=num_groups,
        TOP_GROUPS=top_k_groups, BIASED=bias_E is not None, GIVEN=given_TK is not None,
        **losses, **tile,
        maxnreg=MAX_REGISTERS if tile["LANES"] < WIDE else MAX_REGISTERS_WIDE,
    )  # fmt: skip
    counts_E = torch.empty(E, dtype=torch.int64, device=device)
    terms_E = torch.empty(E, device=device)
    args = (*sums, counts_E, terms_E, tokens, programs)
    launch(finish_kernel, (cdiv(E, FINISH["WIDTH"]),), args, E=E, K=top_k, **FINISH, **losses)
    loss = terms_E.sum() if aux_loss_coef or z_loss_coef else torch.zeros((), device=device)
    return weights_TK, experts_TK, loss, counts_E, chosen_TK


@define_op(device="default")
def choose_experts_backward(
    logits_TE: torch.Tensor,
    chosen_TK: torch.Tensor,
    counts_E: torch.Tensor,
    grad_weights_TK: torch.Tensor | None,
    grad_loss: torch.Tensor | None,
    split: bool,
    top_k: int,
    sigmoid: bool,
    normalize: bool,
    scaling: float,
    aux_loss_coef: float,
    z_loss_coef: float,
) -> torch.Tensor:
    """The gradient of the logits in fp32, or as bf16 `[high | low]` (`split`), their sum."""
    tokens, E = logits_TE.shape
    out = _gradient_like(logits_TE, split)
    if not tokens:
        return out
    tile = _tile(E)
    grad_weights = out if grad_weights_TK is None else grad_weights_TK.contiguous()
    coefs = (0.0, 0.0) if grad_loss is None else (aux_loss_coef, z_loss_coef)
    loss = logits_TE if grad_loss is None else grad_loss
    launch(
        choose_backward_kernel, (cdiv(tokens, tile["ROWS"]),),
        (logits_TE, chosen_TK, counts_E, grad_weights, loss, out, tokens),
        E=E, K=top_k, SIGMOID=sigmoid, NORMALIZE=normalize, SCALING=scaling, AUX=coefs[0],
        Z=coefs[1], WEIGHTED=grad_weights_TK is not None, SPLIT=split, **tile,
    )  # fmt: skip
    return out


@torch.library.register_fake("moe_graphs::choose_experts")
def _(logits_TE, bias_E, top_k, *options):
    tokens, E = logits_TE.shape
    experts_TK = logits_TE.new_empty((tokens, top_k), dtype=torch.int64)
    counts_E = logits_TE.new_empty(E, dtype=torch.int64)
    chosen_TK = logits_TE.new_empty((tokens, top_k), dtype=torch.int16)
    weights_TK = logits_TE.new_empty((tokens, top_k))
    return weights_TK, experts_TK, logits_TE.new_empty(()), counts_E, chosen_TK


@torch.library.register_fake("moe_graphs::choose_experts_backward")
def _(logits_TE, chosen_TK, counts_E, grad_weights_TK, grad_loss, split, *options):
    return _gradient_like(logits_TE, split)


def _gradient_like(logits_TE: torch.Tensor, split: bool) -> torch.Tensor:
    tokens, E = logits_TE.shape
    if split:
        return logits_TE.new_empty((tokens, 2 * E), dtype=torch.bfloat16)
    return logits_TE.new_empty((tokens, E))


def _tile(E: int) -> dict[str, Any]:
    """One warp holds all experts of a token, so that no search goes through shared memory."""
    lanes = max(4, next_power_of_2(E))
    return {"LANES": lanes, "ROWS": max(1, ELEMENTS // lanes), "num_warps": 1}
