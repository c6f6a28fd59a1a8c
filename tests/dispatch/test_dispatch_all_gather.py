"""All-gather on gloo ranks against all experts in one process, on the gathered batch.

Shapes: T tokens of a rank, G = W * T of all W ranks, D model, F ffn, K top-k, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from distributed import RANKS, run_distributed
from moe_graphs.dispatch import AllGatherDispatcher, Dispatcher, LocalDispatcher, all_gather
from moe_graphs.layers import MoEConfig, MoELayer
from moe_graphs.layers.expert_backends import ExpertsBackend
from moe_graphs.layers.experts import GroupedExperts, swiglu_experts

T, D, F, E = 24, 16, 8, 8
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)]


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


def _run(dispatcher: Dispatcher, hidden_TD, weights_TK, experts_TK, w1, w2, grad_TD) -> list:
    """The output, and the gradients of tokens, routing weights and experts."""
    local = dispatcher.local_experts(E)
    mine = slice(local.start, local.stop)
    leaves = [
        leaf.detach().requires_grad_() for leaf in (hidden_TD, weights_TK, w1[mine], w2[mine])
    ]
    hidden_TD, weights_TK, w1, w2 = leaves
    plan = dispatcher.preprocess(hidden_TD, weights_TK, experts_TK, E)
    dispatched = dispatcher.dispatch(plan)
    rows_RD = swiglu_experts(dispatched.rows_RD, w1, w2, dispatched.offsets_e)
    # What experts make of rows that are nobody's must not matter.
    row_R = torch.arange(rows_RD.shape[0], device=rows_RD.device)
    nobody_R = (row_R >= dispatched.offsets_e[-1]).unsqueeze(1)
    assert not dispatched.rows_RD.masked_select(nobody_R).any()
    output_TD = dispatcher.combine(rows_RD.masked_fill(nobody_R, torch.nan), dispatched, plan)
    return [output_TD.detach(), *torch.autograd.grad(output_TD, leaves, grad_TD)]


def _check_routing(dispatcher: Dispatcher, device: str, dtype: torch.dtype, name: str) -> None:
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
    got = _run(dispatcher, *(each[mine] for each in batch), w1, w2, grad_GD[mine])
    want = _run(LocalDispatcher(), *batch, w1, w2, grad_GD)
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


def _check_routings(rank: int, world_size: int, device: str) -> None:
    dispatchers = [AllGatherDispatcher()]
    if world_size == 4:  # and in groups of two
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dispatchers.append(AllGatherDispatcher(groups[rank // 2]))
    # The GEMM of GPUs takes bfloat16 only.
    dtypes = [torch.float32, torch.bfloat16] if device == "cpu" else [torch.bfloat16]
    for dispatcher, dtype, name in itertools.product(dispatchers, dtypes, ROUTINGS):
        _check_routing(dispatcher, device, dtype, name)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_one_process_on_the_gathered_batch(world_size):
    run_distributed(_check_routings, world_size, arguments=("cpu",))


@pytest.mark.multigpu
def test_equals_one_gpu_on_the_gathered_batch():
    run_distributed(_check_routings, RANKS, "nccl", arguments=("cuda",))


def test_worked_example_of_the_order():
    experts = torch.tensor([[2, 0], [0, 1], [2, 1]])
    order = all_gather._local_order(experts, range(2), 3)
    assert order.order_R.tolist() == [1, 2, 3, 5, -1, -1]
    assert order.inverse_R.tolist() == [-1, 0, 1, 2, -1, 3]
    assert order.offsets_E.tolist() == [2, 4]
    order = all_gather._local_order(experts, range(2, 3), 3)  # one row a token is enough
    assert order.order_R.tolist() == [0, 4, -1]
    assert order.inverse_R.tolist() == [0, -1, -1, -1, 1, -1]
    assert order.offsets_E.tolist() == [2]


def _call(tokens: int, device: str) -> str | None:
    """What is said of so many tokens, None if they are taken and come out right."""
    hidden_TD = torch.full((tokens, 1), 1.0 + dist.get_rank(), device=device)
    weights_TK = torch.ones(tokens, 1, device=device)
    experts_TK = torch.arange(tokens, device=device).view(-1, 1) % E
    dispatcher = AllGatherDispatcher()
    try:
        plan = dispatcher.preprocess(hidden_TD, weights_TK, experts_TK, E)
    except ValueError as error:
        return str(error)
    dispatched = dispatcher.dispatch(plan)
    output_TD = dispatcher.combine(dispatched.rows_RD, dispatched, plan)
    assert torch.equal(output_TD, hidden_TD)
    return None


def _unequal(rank: int, world_size: int, device: str) -> list[str | None]:
    said = [_call(tokens, device) for tokens in (8 + rank, 8, 8, 12 - rank, 0, 12, 8)]
    if rank == 0:
        return said  # goes on with a number it knows
    all_gather.PATIENCE = 1.0
    return [*said, _call(9 + rank, device)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_unequal_tokens_are_refused_on_every_rank(backend):
    device = "cuda" if backend == "nccl" else "cpu"
    first, *others = run_distributed(_unequal, RANKS, backend, arguments=(device,))
    ranks = range(RANKS)
    for said in (first, *others):
        assert f"have {[8 + rank for rank in ranks]} tokens" in said[0]
        assert "choose dispatcher 'all_to_all'" in said[0]
        assert f"have {[12 - rank for rank in ranks]} tokens" in said[3]
        assert [said[index] for index in (1, 2, 4, 5, 6)] == [None] * 5
    for rank, said in enumerate(others, 1):
        assert f"rank {rank} has {9 + rank} tokens for the first time, and not all" in said[7]


class _NeedsEveryRow(GroupedExperts):
    takes_tail = False


def test_experts_that_take_no_tail_are_refused(monkeypatch):
    config = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=4)
    layer = MoELayer(config, 8, AllGatherDispatcher())
    before = layer.experts
    monkeypatch.setattr("moe_graphs.layers.experts.GroupedExperts", _NeedsEveryRow)
    with pytest.raises(ValueError, match="'all_gather' leaves rows that are no expert's, which"):
        MoELayer(config, 8, AllGatherDispatcher())
    with pytest.raises(ValueError, match="or dispatcher 'all_to_all'"):
        layer.use_experts("moe_graphs")
    assert layer.experts is before
    assert not ExpertsBackend.takes_tail
