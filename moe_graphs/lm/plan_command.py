"""The command ``moe-graphs plan``: memory and communication of a layout, without its GPUs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import nn

from moe_graphs.checkpoints.hf_config import transformer_config
from moe_graphs.checkpoints.shards import CONFIG, read_json
from moe_graphs.kernels.local_part import local_part
from moe_graphs.layers import TransformerConfig
from moe_graphs.lm.optimizers import (
    build_optimizer,
    check_optimizer_layout,
    make_optimizer_state,
    optimizer_choice,
)
from moe_graphs.lm.option_values import dtype_of, stages_of
from moe_graphs.lm.options import PlanOptions, TrainSettings
from moe_graphs.lm.run_presets import Preset
from moe_graphs.lm.workers import layout_of
from moe_graphs.parallel import ParallelConfig
from moe_graphs.planning.layout_plan import plan_layout
from moe_graphs.planning.plan_table import plan_table, ranks_table
from moe_graphs.planning.planned_step import OptimizerCosts, PlannedStep
from moe_graphs.registry import MODELS, PRESETS
from moe_graphs.terminal import errors_in_a_line, make_console, print_json

_SEQUENCE_LENGTH = 4096


def plan(asked: PlanOptions) -> None:
    """Runs the command."""
    model, gpus = asked.model.model, asked.model.gpus
    dispatcher, rows_factor = asked.graphs.dispatcher, asked.step.rows_factor
    console = make_console(stderr=asked.output.json)
    with errors_in_a_line():
        config, defaults = named_model(model)
        layout = layout_of(gpus, **asked.layout)
        if layout.ep == 1 and (dispatcher is not None or rows_factor is not None):
            raise ValueError("dispatcher, rows_factor: between ranks, which ep=1 does not use")
        settings = _settings(asked, layout, {**_own(config), **defaults})
        batch, parts, length = settings.batch_size, settings.microbatches, settings.sequence_length
        check_optimizer_layout(settings, layout.tp)
        step = PlannedStep(
            sequences=batch // (layout.data_parallel * parts),
            sequence_length=length,
            microbatches=parts,
            dtype=dtype_of(asked.numerics.dtype),
            mixed_precision=asked.numerics.mixed_precision,
            dispatcher=dispatcher or PlannedStep.dispatcher,
            rows_factor=rows_factor,
            schedule=asked.pipeline.schedule,
            stages_per_rank=stages_of(asked.pipeline),
            optimizer=functools.partial(optimizer_costs, settings),
        )
        console.print(
            f"{model} on {gpus} GPU(s), {layout}: {batch} sequences of {length} tokens in {parts} "
            f"microbatch(es)",
            markup=False,
        )
        found = plan_layout(config, layout, step)
    if len(found.ranks) > 1:
        console.print(ranks_table(found, step))
    console.print(plan_table(found))
    if asked.output.json:
        print_json({"model": model, "gpus": gpus, "tokens": batch * length, **found.to_dict()})


def _check_batch(batch: int, parts: int, ranks: int) -> None:
    if batch % (ranks * parts):
        raise ValueError(
            f"batch_size: {batch} sequences in {parts} microbatch(es) cannot be shared equally "
            f"by {ranks} ranks: choose a multiple of {ranks * parts}"
        )


def _own(config: TransformerConfig) -> dict[str, Any]:
    """Sizes of a step of a model that is no preset."""
    length = min(_SEQUENCE_LENGTH, config.max_sequence_length)
    return {"microbatches": 1, "sequence_length": length}


def _settings(asked: PlanOptions, layout: ParallelConfig, sizes: dict[str, Any]) -> TrainSettings:
    """Settings of the planned step; ``sizes`` has those that are not asked for."""
    sizes = {**sizes, **asked.training}
    ranks = layout.data_parallel
    sizes.setdefault("batch_size", ranks * sizes["microbatches"])
    _check_batch(sizes["batch_size"], sizes["microbatches"], ranks)
    return TrainSettings(steps=1, learning_rate=1.0, **sizes)


def optimizer_costs(settings: TrainSettings, model: nn.Module) -> OptimizerCosts:
    """Costs of the optimizer of ``moe-graphs train`` on this rank's part of a model.

    The model may be on the meta device.

    Raises:
        ValueError: if ``build_optimizer`` refuses the settings.
    """
    optimizer = build_optimizer(model, settings)
    make_optimizer_state(optimizer, settings)
    states = [local_part(v) for state in optimizer.state.values() for v in state.values()]
    received = optimizer_choice(settings.optimizer).received_bytes(optimizer)
    return OptimizerCosts(sum(state.nbytes for state in states), received)


def named_model(name: str) -> tuple[TransformerConfig, dict[str, Any]]:
    """The model of that name or directory, and the preset's settings if the name is a preset.

    Raises:
        ValueError: if no architecture, preset or directory has this name, or if its config.json
            describes a model that our layers do not compute.
    """
    if name not in MODELS and name not in PRESETS:
        if Path(name).is_dir():
            return transformer_config(read_json(Path(name) / CONFIG)), {}
        raise ValueError(
            f"model: {name!r} is no directory and not one of {', '.join([*MODELS, *PRESETS])}, nor "
            f"a function of your own by module:function"
        )
    found = (PRESETS if name in tuple(PRESETS) else MODELS)[name]()
    if isinstance(found, Preset):
        names = ("batch_size", "microbatches", "sequence_length")
        return found.model, {each: getattr(found.training, each) for each in names}
    if not isinstance(found, TransformerConfig):
        raise ValueError(
            f"model: {name!r} returns a {type(found).__name__}: return a TransformerConfig or a "
            f"Preset"
        )
    return found, {}
