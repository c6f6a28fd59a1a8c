"""Routings over several ranks, and a layer's dispatch held against one process that has all.

Shapes: T tokens of a rank, G = W * T of all W ranks, D model, F ffn, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_graphs.dispatch import Dispatcher, LocalDispatcher
from moe_graphs.kernels import grouped_gemm, swiglu
from stand_in_experts import sums_of

T, D, F, E = 24, 16, 8, 8


def _random(top_k: int) -> Callable[[int, int], torch.Tensor]:
    return lambda tokens, world_size: torch.rand(tokens, E).topk(top_k).indices


def _at_one_rank(last: bool) -> Callable[[int, int], torch.Tensor]:
    """All tokens to two experts of the first rank, or of the last: the others have no rows."""

    def route(tokens: int, world_size: int) -> torch.Tensor:
        experts_e = torch.rand(tokens, E // world_size).topk(2).indices
        return experts_e + (E - E // world_size if last else 0)

    return route


def _each_token_at_one_rank(tokens: int, world_size: int) -> torch.Tensor:
    local = E // world_size
    rank_T = torch.randint(world_size, (tokens, 1))
    return rank_T * local + torch.rand(tokens, local).topk(2).indices


# Each with whether every token's experts are one rank's, where sums are the same bits.
ROUTINGS = {
    "random": (_random(2), False),
    "one-choice": (_random(1), True),
    "more-choices-than-local-experts": (_random(5), False),
    "every-expert": (_random(E), False),
    "all-at-the-first-rank": (_at_one_rank(False), True),
    "all-at-the-last-rank": (_at_one_rank(True), True),
    "each-token-at-one-rank": (_each_token_at_one_rank, True),
}


def run_layer(dispatcher: Dispatcher, hidden_TD, weights_TK, experts_TK, w1, w2, grad_TD) -> list:
    """The output, and the gradients of tokens, routing weights and experts."""
    local = dispatcher.local_experts(E)
    mine = slice(local.start, local.stop)
    leaves = [
        leaf.detach().requires_grad_() for leaf in (hidden_TD, weights_TK, w1[mine], w2[mine])
    ]
    hidden_TD, weights_TK, w1, w2 = leaves
    plan = dispatcher.preprocess(hidden_TD, weights_TK, experts_TK, E)
    dispatched = dispatcher.dispatch(plan)

    def experts(rows_RD: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        # What experts make of rows that are nobody's must not matter.
        row_R = torch.arange(rows_RD.shape[0], device=rows_RD.device)
        nobody_R = (row_R >= offsets_E[-1]).unsqueeze(1)
        assert not rows_RD.masked_select(nobody_R).any()
        rows_RF = swiglu(grouped_gemm(rows_RD, w1, offsets_E, zero_tail=False))
        rows_RD = grouped_gemm(rows_RF, w2, offsets_E, zero_tail=False)
        return rows_RD.masked_fill(nobody_R, torch.nan)

    output_TD = dispatcher.combine(sums_of(dispatched, experts), dispatched, plan)
    return [output_TD.detach(), *torch.autograd.grad(output_TD, leaves, grad_TD)]


def check_routing(dispatcher: Dispatcher, device: str, dtype: torch.dtype, name: str) -> None:
    rank, world_size = dist.get_rank(dispatcher.group), dist.get_world_size(dispatcher.group)
    route, exact = ROUTINGS[name]
    torch.manual_seed(7)
    all_tokens = world_size * T
    experts_GK = route(all_tokens, world_size)
    weights_GK = torch.rand(experts_GK.shape)
    hidden_GD, grad_GD = torch.randn(2, all_tokens, D)
    w1, w2 = torch.randn(E, D, 2 * F), torch.randn(E, F, D)
    hidden_GD, grad_GD, w1, w2 = (t.to(device, dtype) for t in (hidden_GD, grad_GD, w1, w2))
    weights_GK, experts_GK = weights_GK.to(device), experts_GK.to(device)

    mine = slice(rank * T, (rank + 1) * T)
    batch = (hidden_GD, weights_GK, experts_GK)
    got = run_layer(dispatcher, *(each[mine] for each in batch), w1, w2, grad_GD[mine])
    want = run_layer(LocalDispatcher(), *batch, w1, w2, grad_GD)
    local = dispatcher.local_experts(E)
    own = [mine, mine, mine, *[slice(local.start, local.stop)] * 2]
    names = ["output", "hidden gradient", "weights gradient", "w1 gradient", "w2 gradient"]
    want = [whole[part] for whole, part in zip(want, own, strict=True)]
    for what, found, expected in zip(names, got, want, strict=True):
        if device == "cpu" and (exact or "w" in what):
            assert torch.equal(found, expected), f"{name}: {what} is not the same bits"
        # On GPUs the GEMMs choose their tiles, and so the order of their sums, by the rows.
        bound = (4 if device == "cpu" else 8) * torch.finfo(dtype).eps * expected.abs().max()
        assert (found - expected).abs().max() <= bound, f"{name}: {what}"
