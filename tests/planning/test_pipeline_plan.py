"""Plans of pipelines and of other layouts, against real ranks on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from distributed import run_distributed
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.optimizers import build_optimizer
from moe_graphs.lm.options import TrainSettings
from moe_graphs.parallel import ParallelConfig
from moe_graphs.planning.layout_plan import RankPlan, plan_layout
from moe_graphs.planning.microbatch_memory import LiveStorages
from moe_graphs.planning.planned_step import PlannedStep
from planned_layouts import MOE, laid_out

CONFIG = replace(MOE, num_layers=4, moe_layers=(False, True, True, True))
SETTINGS = TrainSettings(steps=1, batch_size=2, sequence_length=32, learning_rate=1e-3)
STEP = PlannedStep(sequences=2, sequence_length=32, microbatches=4, on_gpus=False)
INTERLEAVED = replace(STEP, schedule="interleaved_1f1b", stages_per_rank=2)
GATHERED = {"dispatcher": "all_gather", "rows_factor": None}
OF_TWO: list[tuple[dict[str, Any], PlannedStep]] = [
    ({"dp_shard": 2}, STEP),
    ({"dp_shard": 2, "layers_per_group": 3}, replace(STEP, mixed_precision=True)),
    ({"dp_shard": 2, "ep": 2}, replace(STEP, **GATHERED)),
    ({"dp_replicate": 2}, STEP),
    ({"tp": 2}, STEP),
    ({"cp": 2, "ep": 2}, replace(STEP, **GATHERED)),
    ({"pp": 2}, STEP),
    ({"pp": 2}, replace(STEP, schedule="gpipe")),
    ({"pp": 2}, INTERLEAVED),
]
OF_FOUR: list[tuple[dict[str, Any], PlannedStep]] = [
    ({"dp_shard": 2, "tp": 2}, STEP),
    ({"dp_shard": 2, "cp": 2, "ep": 4}, replace(STEP, **GATHERED)),
    ({"pp": 4}, STEP),
    ({"pp": 2, "dp_shard": 2}, STEP),
    ({"pp": 2, "dp_shard": 2, "ep": 2}, replace(INTERLEAVED, **GATHERED)),
    ({"pp": 2, "dp_replicate": 2}, STEP),
]


class Watched(LiveStorages):
    """Mode that counts the messages of real ranks as well, by operation; reductions as rings."""

    def _note_received(self, func: Any, args: Any) -> None:
        name = func.name().removeprefix("c10d::")
        size = max(leaf.nbytes for leaf in tree_leaves(args[:2]) if isinstance(leaf, torch.Tensor))
        if name == "recv_":
            # In its first step torch sends a number to every neighbour, to connect to it.
            self.received[name] += size if size > 4 else 0
        elif name != "send":
            boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = dist.ProcessGroup.unbox(boxed).size()
            self.received[name] += size * (ranks - 1) * (1 + (name == "allreduce_")) // ranks


def real_rank(
    rank: int, world_size: int, layouts: list[tuple[dict[str, Any], PlannedStep]]
) -> list[dict[str, Any]]:
    """Bytes that each layout holds after a step, and its traffic and peak within the step."""
    return [real_step(ParallelConfig(**degrees), step) for degrees, step in layouts]


def real_step(config: ParallelConfig, step: PlannedStep) -> dict[str, Any]:
    torch.manual_seed(0)
    model = LanguageModel(CONFIG)
    laid = laid_out(model, "cpu", config, step)
    optimizer = build_optimizer(model, SETTINGS)
    tokens_BS = torch.randint(CONFIG.vocab_size, laid.tokens)
    with Watched() as watched:
        laid.run(tokens_BS)
    optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values()]
    parameters = list(model.parameters())
    held = {
        "parameters": storages(parameters),
        "gradients": storages([p.grad for p in parameters]),
        "optimizer": storages(states),
        "buffers": storages(model.buffers()),
    }
    if laid.pipeline is not None:
        _, *received = laid.pipeline.memory  # the first is the weight of a microbatch
        held["receive buffers"] = storages(received)
    peak = max(watched.peaks.values())
    return {"held": held, "received": dict(watched.received), "peak": peak}


def storages(tensors) -> int:
    local = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in local}.values())


def check(layouts: list[tuple[dict[str, Any], PlannedStep]], ranks: list[list[Any]]) -> None:
    """Check held and received bytes exactly, and peaks where they can be measured.

    The mode does not see memory that FSDP2 frees by resizing storages, so peaks are compared only
    without FSDP2.
    """
    for (degrees, step), *every in zip(layouts, *ranks, strict=True):
        config = ParallelConfig(**degrees)
        plan = plan_layout(CONFIG, config, step)
        for rank, found in enumerate(every):
            mine = plan.ranks[rank * config.pp // config.world_size]
            assert found["held"] == mine.exact, (degrees, rank)
            received = found["received"]
            assert sum(received.values()) == sum(mine.wire.values()), (degrees, rank, received)
            assert received.get("recv_", 0) == mine.wire.get("messages between stages", 0)
            if config.with_tokens == 1 or step.stages_per_rank > 1:
                most = mine.within_graph + mine.exact.get("receive buffers", 0)
                assert most == pytest.approx(found["peak"], rel=0.05), (degrees, step, rank)


@pytest.mark.long
def test_what_two_ranks_hold_and_receive_is_what_was_planned():
    check(OF_TWO, run_distributed(real_rank, 2, arguments=(OF_TWO,)))


@pytest.mark.long
def test_what_four_ranks_hold_and_receive_is_what_was_planned():
    check(OF_FOUR, run_distributed(real_rank, 4, arguments=(OF_FOUR,)))


def ranks_of(pp: int, step: PlannedStep, **degrees: int) -> tuple[RankPlan, ...]:
    return plan_layout(CONFIG, ParallelConfig(pp=pp, **degrees), step).ranks


def test_microbatches_in_flight_are_those_of_the_schedule():
    assert [rank.in_flight for rank in ranks_of(4, STEP)] == [(4,), (3,), (2,), (1,)]
    eight = replace(STEP, microbatches=8)
    assert [rank.in_flight for rank in ranks_of(4, eight)] == [(4,), (3,), (2,), (1,)]
    all_of_them = ranks_of(4, replace(eight, schedule="gpipe"))
    assert [rank.in_flight for rank in all_of_them] == [(8,)] * 4
    in_turn = ranks_of(2, INTERLEAVED)
    assert [rank.layers for rank in in_turn] == [((0, 1), (2, 1)), ((1, 1), (3, 1))]
    assert [rank.in_flight for rank in in_turn] == [(4, 2), (3, 1)]


def test_the_bubble():
    """The bubble is (p - 1) / (m + p - 1); v stages per rank divide p - 1 by v.

    The formula is that of arXiv 2104.04473.
    """
    for step, pp in ((STEP, 4), (replace(STEP, schedule="gpipe"), 2)):
        plan = plan_layout(CONFIG, ParallelConfig(pp=pp), step)
        assert plan.idle == pytest.approx((pp - 1) / (4 + pp - 1))
    plan = plan_layout(CONFIG, ParallelConfig(pp=2), INTERLEAVED)
    assert plan.idle == pytest.approx(1 / 2 / (4 + 1 / 2))


def test_first_middle_and_last_ranks_differ():
    first, *middle, last = ranks_of(4, replace(STEP, on_gpus=True))
    table = 96 * 32 * 4
    assert middle[0].exact["parameters"] == middle[1].exact["parameters"]
    assert last.exact["parameters"] - middle[0].exact["parameters"] == table + 32 * 4
    message = 2 * 32 * 32 * 4  # fp32, as between layers under autocast
    for rank, neighbours in ((first, 1), (middle[0], 2), (last, 1)):
        assert rank.wire["messages between stages"] == 4 * neighbours * message
        assert rank.exact["receive buffers"] == 4 * neighbours * message


def test_a_pipeline_gathers_and_reduces_by_its_schedule():
    """Weights stay after a backward, and gradients are reduced once in a step."""
    eight = replace(STEP, microbatches=8)
    one, two = (ranks_of(2, step, dp_shard=2) for step in (STEP, eight))
    for few, many in zip(one, two, strict=True):
        assert few.wire["FSDP2 reduce-scatter"] == many.wire["FSDP2 reduce-scatter"]
        assert few.wire["FSDP2 all-gather"] < many.wire["FSDP2 all-gather"]
        whole = few.estimated["gathered weights"]
        assert whole == 2 * few.exact["parameters"]
        assert few.estimated["gradients before their reduction"] > whole


def test_bf16_goes_between_stages():
    mixed = replace(STEP, on_gpus=True, mixed_precision=True)
    wide, narrow = (ranks_of(2, step, dp_shard=2)[0].wire for step in (STEP, mixed))
    assert narrow["messages between stages"] * 2 == wide["messages between stages"]
