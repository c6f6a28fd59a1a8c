"""Graphs under every pipeline schedule, one rank at a time: bitwise equal to eager.

Bitwise: what is sent, gradients, parameters and buffers after several optimizer steps, random
numbers; with dropout, and microbatches in flight as the order of the rank says.
"""

from __future__ import annotations

import pytest
import torch

import moe_graphs
from moe_graphs import GraphConfig
from moe_graphs.capture.schedule import Schedule
from moe_graphs.capture.schedule_builders import interleaved_1f1b, one_f_one_b
from pipelines import SEQUENCE, WIDTH, eager_rank, make_chunks, make_schedule, run_rank

SPLIT = ("zero_bubble", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "LoopedBFS", *SPLIT)
SCOPES = {"layers": "attn,mlp,moe", "plain": "*"}


def check_rank(
    schedule: Schedule,
    rank: int,
    kind: str = "layers",
    device: str = "cpu",
    scopes: str | None = None,
    steps: int = 5,
    layers: int = 2,
    split: bool = False,
) -> moe_graphs.Report:
    """Graphed against eager; returns the report of the graphed run."""
    expected = eager_rank(schedule, rank, kind, device, steps, layers)
    chunks = make_chunks(kind, len(schedule.chunks(rank)), device, layers)
    more = {"split_backward": True} if split else {}
    config = GraphConfig(scopes or SCOPES[kind], warmup_steps=2, on_mismatch="error", **more)
    graphs = moe_graphs.graph(chunks, config)
    run_rank(schedule, rank, chunks, graphs, steps, split).assert_equal(expected)
    report = graphs.report()
    graphs.release()
    return report


CASES = [
    pytest.param(name, pp, rank, id=f"{name}-{rank} of {pp}")
    for name in SCHEDULES
    for pp in (2, 4)
    for rank in range(pp)
]


@pytest.mark.parametrize(("name", "pp", "rank"), CASES)
def test_graphed_is_eager_at_every_rank(name, pp, rank):
    schedule = make_schedule(name, pp, 2 * pp)
    report = check_rank(schedule, rank)
    passes = len([action for action in schedule.ranks[rank] if action.kind == "F"])
    assert report.replayed == 3 * 2 * passes  # steps, layers
    assert not report.eager_calls.get("slots_full")


@pytest.mark.parametrize(("name", "pp", "rank"), [case for case in CASES if case.values[1] == 2])
def test_a_plain_sequential_at_every_rank(name, pp, rank):
    report = check_rank(make_schedule(name, pp, 2 * pp), rank, "plain")
    assert report.replayed


@pytest.mark.parametrize(
    ("name", "pp", "rank"), [case for case in CASES if case.values[0] in SPLIT]
)
def test_weight_gradients_apart(name, pp, rank):
    check_rank(make_schedule(name, pp, 2 * pp), rank, split=True)
    if pp == 2:
        check_rank(make_schedule(name, pp, 2 * pp), rank, "plain", split=True)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_the_dispatch_may_stay_eager(name):
    check_rank(make_schedule(name, 2, 4), 0, scopes="attn,mlp,moe_router,moe_preprocess")
    check_rank(make_schedule(name, 2, 4), 0, scopes="moe_router")


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble", "InterleavedZeroBubble"])
@pytest.mark.parametrize("rank", range(4))
def test_as_many_graphs_at_64_microbatches_as_at_8(name, rank):
    few, many = (make_schedule(name, 4, count) for count in (8, 64))
    captured = []
    for schedule in (few, many):
        split = name in SPLIT
        report = check_rank(schedule, rank, "plain", steps=3, split=split)
        captured.append(report.captured)
        assert report.captured == sum(schedule.slots()[rank].values())
    assert few.slots()[rank] == many.slots()[rank] or name == "interleaved"
    assert captured[0] == captured[1] or name == "interleaved"


def test_a_view_that_outlives_its_microbatch_costs_one_eager_call():
    """torch's stages keep the last send, a detached view, until the next: in one replayed step
    that makes calls eager, from then on the output is handed out as a copy."""
    chunks = make_chunks("plain", 1, "cpu")
    graphs = moe_graphs.graph(chunks, GraphConfig("*", warmup_steps=1))
    kept, values = None, []
    for step in range(4):
        with graphs.step():
            for microbatch in range(3):
                torch.manual_seed(microbatch)
                output = chunks[0](torch.randn(2, SEQUENCE, WIDTH))
                if kept is not None:
                    assert torch.equal(kept, values[-1])
                kept = output.detach()
                values.append(kept.clone())
                output.sum().backward()
        assert graphs.report().eager_calls.get("output_held", 0) == (step > 0), step
    for again in range(3, 12):
        assert torch.equal(values[again], values[again - 3])


@pytest.mark.gpu
@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [8, 16, 32, 64])
def test_eight_ranks(rank, chunks, microbatches):
    schedule = interleaved_1f1b(8, chunks, microbatches)
    layers = 2 if chunks == 1 else 1
    scopes = "attn,mlp,moe" if layers > 1 else "attn,moe"  # a chunk's last layer has experts
    report = check_rank(schedule, rank, "layers", "cuda", scopes, steps=4, layers=layers)
    assert report.captured == layers * sum(schedule.slots()[rank].values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rank", range(4))
def test_every_schedule_on_a_gpu(name, rank):
    schedule = make_schedule(name, 4, 8)
    check_rank(schedule, rank, device="cuda")
    check_rank(schedule, rank, "plain", device="cuda")
    if name in SPLIT:
        check_rank(schedule, rank, device="cuda", split=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", range(4))
def test_graphs_and_memory_do_not_grow_with_microbatches(rank):
    reports = [check_rank(one_f_one_b(4, count), rank, device="cuda", steps=4) for count in (8, 64)]
    assert reports[0].captured == reports[1].captured
    assert reports[0].pool_bytes == reports[1].pool_bytes
