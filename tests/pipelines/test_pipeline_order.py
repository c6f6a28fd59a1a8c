"""Graphs under every pipeline schedule, one rank at a time: bitwise equal to eager.

Messages, gradients, parameters and buffers after several optimizer steps, and random numbers are
compared, with dropout and with the microbatches in flight that the rank's order has.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import moe_graphs
from grids import by_turns, pairs
from moe_graphs import GraphConfig
from moe_graphs.engine.callables.order import slots
from moe_graphs.engine.report import Report
from moe_graphs.pipelines.builders import interleaved_1f1b, one_f_one_b
from moe_graphs.pipelines.schedule import Schedule
from pipeline_runs import SEQUENCE, WIDTH, eager_rank, make_chunks, make_schedule, run_rank

SPLIT = ("zero_bubble", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
WHOLE = ("gpipe", "1f1b", "interleaved", "LoopedBFS")
SCHEDULES = (*WHOLE, *SPLIT)
SCOPES = {"layers": "attn,mlp,moe", "plain": "*"}


def check_rank(
    schedule: Schedule,
    rank: int,
    kind: str = "layers",
    device: str = "cpu",
    scopes: str | None = None,
    steps: int = 4,
    layers: int = 2,
    split: bool = False,
) -> Report:
    """Compare graphed with eager, with as many slots as the order needs; return the report."""
    expected = eager_rank(schedule, rank, kind, device, steps, layers)
    chunks = make_chunks(kind, len(schedule.chunks(rank)), device, layers)
    config = GraphConfig(
        scopes or SCOPES[kind], warmup_steps=1, on_mismatch="error", split_backward=split
    )
    graphs = moe_graphs.graph(chunks, config)
    run_rank(schedule, rank, chunks, graphs, steps, split).assert_equal(expected)
    report = graphs.report()
    graphs.release()
    order = [action for action in schedule.ranks[rank] if split or action.kind != "W"]
    assert sorted(report.slots) == sorted(slots(order).values())
    return report


def cases(names: Sequence[str], sizes: Sequence[int]) -> list:
    """Cases: ranks of pipelines of some sizes, and layers of a chunk, the last one with experts."""
    return [
        (name, pp, rank, layers)
        for name in names
        for pp in sizes
        for rank in range(pp)
        for layers in (1, 2)
    ]


def marked(places: list) -> list:
    """Mark cases as long: those of four ranks, and one of the two ranks of two, in turn."""
    names = list(dict.fromkeys(place.values[0] for place in places))
    by_turn = {(name, 2, number % 2) for number, name in enumerate(names)}
    return [
        pytest.param(*place.values, marks=(*place.marks, *marks))
        for place in places
        for marks in [() if place.values[:3] in by_turn else (pytest.mark.long,)]
    ]


PLACES = ("name", "pp", "rank", "layers")
LAYERS = {1: "attn,moe", 2: SCOPES["layers"]}


@pytest.mark.parametrize(PLACES, marked(pairs(cases(SCHEDULES, [2]) + cases(WHOLE, [4]))))
def test_graphed_is_eager_at_every_rank(name, pp, rank, layers):
    schedule = make_schedule(name, pp, 2 * pp)
    report = check_rank(schedule, rank, scopes=LAYERS[layers], layers=layers)
    passes = len([action for action in schedule.ranks[rank] if action.kind == "F"])
    assert report.matched == 3 * layers * passes


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.long
def test_a_plain_sequential_at_every_rank(name, rank):
    schedule = make_schedule(name, 2, 4)
    assert check_rank(schedule, rank, "plain").replayed
    if name in SPLIT:
        assert check_rank(schedule, rank, "plain", split=True).replayed


@pytest.mark.parametrize(PLACES, marked(pairs(cases(SPLIT, [2, 4]))))
def test_weight_gradients_apart(name, pp, rank, layers):
    schedule = make_schedule(name, pp, 2 * pp)
    check_rank(schedule, rank, scopes=LAYERS[layers], layers=layers, split=True)


@pytest.mark.parametrize("name", ["1f1b", pytest.param("interleaved", marks=pytest.mark.long)])
def test_the_dispatch_may_stay_eager(name):
    check_rank(make_schedule(name, 2, 4), 0, scopes="attn,mlp,moe_router,moe_preprocess")
    check_rank(make_schedule(name, 2, 4), 0, scopes="moe_router")


@pytest.mark.parametrize(
    ("name", "rank"),
    by_turns(["1f1b", "interleaved", "zero_bubble", "InterleavedZeroBubble"], [0, 2]),
)
def test_as_many_graphs_at_64_microbatches_as_at_8(name, rank):
    captured = []
    for microbatches in (8, 64):
        schedule = make_schedule(name, 4, microbatches)
        report = check_rank(schedule, rank, "plain", steps=2, split=name in SPLIT)
        captured.append(report.captured)
    assert captured[0] == captured[1] == sum(schedule.slots()[rank].values())


def test_a_view_that_outlives_its_microbatch_costs_one_eager_call():
    """Calls run eagerly in one replayed step, then the output is handed out as a copy.

    Torch's stages keep a view of the last send until the next one.
    """
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
    scopes = "attn,mlp,moe" if layers > 1 else "attn,moe"  # only a chunk's last layer has experts
    report = check_rank(schedule, rank, "layers", "cuda", scopes, layers=layers)
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
    reports = [check_rank(one_f_one_b(4, count), rank, device="cuda") for count in (8, 64)]
    assert reports[0].captured == reports[1].captured
    assert reports[0].pool_bytes == reports[1].pool_bytes
