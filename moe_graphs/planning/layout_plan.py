"""Plan of a parallel layout: the memory of its ranks, and their traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.parallel import ParallelConfig
from moe_graphs.parallel.degrees import check_degrees
from moe_graphs.planning.computed_stages import computed_stages
from moe_graphs.planning.laid_out import (
    LaidOutRank,
    LaidOutStage,
    idle_share,
    lay_out,
    schedule_of,
)
from moe_graphs.planning.microbatch_memory import MicrobatchMemory, part_of
from moe_graphs.planning.planned_step import PlannedStep
from moe_graphs.planning.step_memory import Action, StageCosts, StepMemory, step_memory
from moe_graphs.planning.weights_around import most_around
from moe_graphs.planning.wire_bytes import fsdp_bytes


@dataclass(frozen=True)
class RankPlan:
    """Bytes of a rank, by purpose.

    Attributes:
        layers: for each stage, the number of its first layer and how many layers it has.
        in_flight: for each stage, the largest number of microbatches between forward and backward.
        padding: share of the rank's parameters beyond an equal division, from 0 to 1. FSDP2 divides
            a weight's first dimension, for experts their number.
        exact: bytes that are held between two steps, and gradients.
        estimated: peak bytes of each kind of memory that is allocated and freed within a step.
        per_layer: bytes that one microbatch keeps from forward to backward, by part: the embedding,
            one dense layer, one MoE layer, the head with norm and loss.
        wire: bytes received from other ranks in a step.
        within_graph: peak bytes of gradients and ``estimated`` together, which are in a graph's
            pool if whole steps are graphs.
        memory: peak bytes of everything together.
    """

    layers: tuple[tuple[int, int], ...]
    in_flight: tuple[int, ...]
    padding: float
    exact: dict[str, int] = field(hash=False)
    estimated: dict[str, int] = field(hash=False)
    per_layer: dict[str, int] = field(hash=False)
    wire: dict[str, int] = field(hash=False)
    within_graph: int
    memory: int


@dataclass(frozen=True)
class LayoutPlan:
    """Plan of all ranks of a layout.

    Attributes:
        parameters: number of parameters of the whole model.
        expert_rows: number of rows of a layer that a rank's experts have room for.
        idle: share of a pipeline's time in which a rank waits for others, from 0 to 1, if all
            stages took the same time and messages none.
        ranks: one rank for each rank of the pipeline, one in all without a pipeline. Each is the
            first of the ranks with the same stages, which has the most memory of them.
    """

    parameters: int
    expert_rows: int
    idle: float
    ranks: tuple[RankPlan, ...]

    @property
    def most(self) -> RankPlan:
        """The rank with the most memory, which has to fit."""
        return max(self.ranks, key=lambda rank: rank.memory)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the rank with the most memory at the top, all ranks under ``ranks``."""
        return {**dataclasses.asdict(self), **dataclasses.asdict(self.most)}


def plan_layout(config: TransformerConfig, layout: ParallelConfig, step: PlannedStep) -> LayoutPlan:
    """Plan the memory and the traffic of the ranks of ``layout``, without allocating anything.

    ``pipeline_stages`` and ``parallelize`` lay out the model on the meta device, in a fake process
    group. Forwards and backwards on fake tensors, in the order of torch's schedule, give the sizes
    of activations and temporaries.

    Raises:
        ValueError: the model cannot have this layout, or this process is in a process group.
    """
    if step.sequence_length > config.max_sequence_length:
        raise ValueError(
            f"sequence_length: {step.sequence_length} is more than the "
            f"{config.max_sequence_length} positions that the model knows: lower it"
        )
    check_degrees(layout, config, step.sequence_length)
    if layout.pp == 1 and (step.schedule, step.stages_per_rank) != ("1f1b", 1):
        raise ValueError("schedule, stages_per_rank: of a pipeline: add --pp, or drop them")
    # From here on, `step` has the length of a rank's part of a sequence.
    step = dataclasses.replace(step, sequence_length=step.sequence_length // layout.cp)
    actions: list[list[Action]] = [[("F", 0), ("B", 0)] * step.microbatches]
    idle = 0.0
    if layout.pp > 1:
        schedule, actions = schedule_of(config, layout, step)
        idle = idle_share(schedule)
    laid_out = [lay_out(config, layout, step, rank) for rank in range(layout.pp)]
    every = [stage.layers for rank in laid_out for stage in rank.stages]
    computed = iter(computed_stages(config, layout, step, every))
    ranks = []
    for rank, order in zip(laid_out, actions, strict=True):
        memories = [next(computed) for _ in rank.stages]
        ranks.append(_rank_plan(config, layout, step, rank, memories, order))
    parameters = LanguageModel(config, device="meta").num_parameters()
    return LayoutPlan(parameters, _expert_rows(config, layout, step), idle, tuple(ranks))


def _rank_plan(
    config: TransformerConfig,
    layout: ParallelConfig,
    step: PlannedStep,
    rank: LaidOutRank,
    memories: Sequence[MicrobatchMemory],
    order: Sequence[Action],
) -> RankPlan:
    hidden = step.tokens * config.hidden_size * step.held_dtype.itemsize
    arriving = [_neighbours(config, stage) * hidden for stage in rank.stages]
    costs = []
    for stage, memory, count in zip(rank.stages, memories, arriving, strict=True):
        by_schedule: dict[str, int] = {}
        if step.schedule == "interleaved_1f1b":
            by_schedule = {"sent": count}  # a stage sends as much as it receives
        elif layout.pp > 1:
            sending = hidden if stage.layers.start else 0
            by_schedule = {"sending": sending}
        groups = list(stage.groups.values())
        costs.append(StageCosts(memory, stage.parts, groups, **by_schedule))
    found = step_memory(order, costs, deferred=layout.pp > 1)
    exact = dict(rank.held)
    if sum(arriving):
        exact["receive buffers"] = step.microbatches * sum(arriving)
    estimated = _estimated(rank, costs, found, deferred=layout.pp > 1)
    if sent := step.microbatches * sum(each.sent for each in costs):
        estimated["messages sent, held until the end"] = sent
    shared = sum(_shared_with_peers(config, layout, step, stage) for stage in rank.stages)
    if shared:
        estimated["memory shared with peers"] = shared
    return RankPlan(
        tuple((stage.layers.start, len(stage.layers)) for stage in rank.stages),
        found.in_flight,
        rank.padding,
        exact,
        estimated,
        _per_layer(memories),
        _wire(config, layout, step, rank, memories, found, sum(arriving)),
        found.peak,
        sum(exact.values()) - exact["gradients"] + found.peak + shared,
    )


def _neighbours(config: TransformerConfig, stage: LaidOutStage) -> int:
    """Number of stages before and behind this one: 0, 1 or 2."""
    return (stage.layers.start > 0) + (stage.layers.stop < config.num_layers)


def _estimated(
    rank: LaidOutRank, costs: Sequence[StageCosts], found: StepMemory, *, deferred: bool
) -> dict[str, int]:
    around = [most_around(stage.parts, deferred=deferred) for stage in rank.stages]
    return {
        **{name: sum(each[name] for each in around) for name in around[0]},
        "activations": found.activations,
        "copies of weights (autocast)": found.weight_copies,
        "temporaries": max(each.memory.temporaries for each in costs),
    }


def _per_layer(memories: Sequence[MicrobatchMemory]) -> dict[str, int]:
    """The largest of each part in any stage of the rank."""
    found: dict[str, int] = {}
    for memory in memories:
        for part, size in memory.per_layer.items():
            found[part] = max(found.get(part, 0), size)
    return found


def _expert_rows(config: TransformerConfig, layout: ParallelConfig, step: PlannedStep) -> int:
    if config.moe is None:
        return 0
    costs = step.dispatch_costs(config, layout.ep)
    return step.tokens * config.moe.top_k if costs is None else costs.expert_rows


def _shared_with_peers(
    config: TransformerConfig, layout: ParallelConfig, step: PlannedStep, stage: LaidOutStage
) -> int:
    """Bytes of peer memory for all layers of a stage, whose process groups are its own."""
    costs = step.dispatch_costs(config, layout.ep)
    if costs is None or not any(map(config.is_moe_layer, stage.layers)):
        return 0
    return costs.shared_bytes


def _wire(
    config: TransformerConfig,
    layout: ParallelConfig,
    step: PlannedStep,
    rank: LaidOutRank,
    memories: Sequence[MicrobatchMemory],
    step_found: StepMemory,
    messages: int,
) -> dict[str, int]:
    reductions = 1 if layout.pp > 1 else step.microbatches
    found: dict[str, int] = {}

    def add(name: str, count: float) -> None:
        found[name] = found.get(name, 0) + round(count)

    for stage, times in zip(rank.stages, step_found.gathers, strict=True):
        gathers = {name: times[stage.groups[part_of(name)]] for name in stage.weights}
        sharded = fsdp_bytes(stage.weights, *step.on_the_wire, gathers, reductions)
        for name, count in sharded.items():
            add(name, count)
    for memory in memories:
        for name, count in memory.received.items():
            add(name, count * step.microbatches)
    layers = [number for stage in rank.stages for number in stage.layers]
    costs = step.dispatch_costs(config, layout.ep)
    if costs is not None:
        calls = sum(map(config.is_moe_layer, layers)) * step.microbatches
        add("expert dispatch", costs.dispatch_bytes * calls)
        add("expert combine", costs.combine_bytes * calls)
    if rank.update.received:
        add("matrices of the update", rank.update.received)
    if messages:
        add("messages between stages", messages * step.microbatches)
    return found
