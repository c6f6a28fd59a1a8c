"""All-gather on gloo ranks against all experts in one process, on the gathered batch.

Shapes: T tokens of a rank, G = W * T of all W ranks, D model, F ffn, K top-k, E experts.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from distributed import RANKS, run_distributed
from moe_graphs.dispatch import AllGatherDispatcher, SymmetricDispatcher, equal_tokens
from moe_graphs.dispatch.local_rows import local_rows, room_for_rows
from moe_graphs.layers import MoEConfig, MoELayer
from moe_graphs.layers.expert_backends import ExpertsBackend
from moe_graphs.layers.experts import GroupedExperts
from routed_ranks import ROUTINGS, E, check_routing
from stand_in_experts import unchanged

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)]


def _check_routings(rank: int, world_size: int, device: str) -> None:
    dispatchers = [AllGatherDispatcher()]
    if world_size == 4:  # all ranks, then groups of two
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dispatchers.append(AllGatherDispatcher(groups[rank // 2]))
    dtypes = [torch.float32, torch.bfloat16]
    for dispatcher, dtype, name in itertools.product(dispatchers, dtypes, ROUTINGS):
        check_routing(dispatcher, device, dtype, name)


@pytest.mark.parametrize(
    "world_size", [4, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 2))]
)
def test_equals_one_process_on_the_gathered_batch(world_size):
    run_distributed(_check_routings, world_size, arguments=("cpu",))


@pytest.mark.multigpu
def test_equals_one_gpu_on_the_gathered_batch():
    run_distributed(_check_routings, RANKS, "nccl", arguments=("cuda",))


def test_worked_example_of_the_order():
    experts = torch.tensor([[2, 0], [0, 1], [2, 1]])
    rows = local_rows(experts, range(2), 3, 6)
    assert rows.order.order_R.tolist() == [1, 2, 3, 5, -1, -1]
    assert rows.order.inverse_R.tolist() == [-1, 0, 1, 2, -1, 3]
    assert rows.order.offsets_E.tolist() == [2, 4]
    assert (rows.needed.item(), rows.dropped.item()) == (4, 0)
    rows = local_rows(experts, range(2, 3), 3, 3)  # one row per token is enough room
    assert rows.order.order_R.tolist() == [0, 4, -1]
    assert rows.order.inverse_R.tolist() == [0, -1, -1, -1, 1, -1]
    assert rows.order.offsets_E.tolist() == [2]


def test_worked_example_of_rows_without_room():
    rows = local_rows(torch.tensor([[2, 0], [0, 1], [2, 1]]), range(2), 3, 3)
    assert rows.order.order_R.tolist() == [1, 2, 3]
    assert rows.order.inverse_R.tolist() == [-1, 0, 1, 2, -1, -1]
    assert rows.order.offsets_E.tolist() == [2, 3]
    assert (rows.needed.item(), rows.dropped.item()) == (4, 1)


@pytest.mark.parametrize(
    ("factor", "rows"), [(None, 256), (1.0, 128), (1.01, 136), (1.5, 192), (2.0, 256), (9.0, 256)]
)
def test_room_for_rows(factor, rows):
    assert room_for_rows(64, 2, range(4), 2, factor) == rows


@pytest.mark.parametrize("factor", [0.9, 0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [AllGatherDispatcher, SymmetricDispatcher])
def test_rows_factors_below_one_are_refused(kind, factor):
    with pytest.raises(ValueError, match=r"rows_factor must be at least 1 and finite"):
        kind(rows_factor=factor)


def _call(tokens: int, device: str) -> str | None:
    """Dispatch ``tokens`` tokens; return the error, or None if the results are right."""
    hidden_TD = torch.full((tokens, 1), 1.0 + dist.get_rank(), device=device)
    weights_TK = torch.ones(tokens, 1, device=device)
    experts_TK = torch.arange(tokens, device=device).view(-1, 1) % E
    dispatcher = AllGatherDispatcher()
    try:
        plan = dispatcher.preprocess(hidden_TD, weights_TK, experts_TK, E)
    except ValueError as error:
        return str(error)
    dispatched = dispatcher.dispatch(plan)
    output_TD = dispatcher.combine(unchanged(dispatched), dispatched, plan)
    assert torch.equal(output_TD, hidden_TD)
    return None


def _unequal(rank: int, world_size: int, device: str) -> list[str | None]:
    said = [_call(tokens, device) for tokens in (8 + rank, 8, 8, 12 - rank, 0, 12, 8)]
    if rank == 0:
        return said  # this rank goes on with a known number
    equal_tokens.PATIENCE = 1.0
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
    with pytest.raises(
        ValueError, match="'all_gather' leaves rows that belong to no expert, which"
    ):
        MoELayer(config, 8, AllGatherDispatcher())
    with pytest.raises(ValueError, match="or dispatcher local, "):
        layer.use_experts("moe_graphs")
    assert layer.experts is before
    assert not ExpertsBackend.takes_tail
