"""The command ``moe-graphs plan``: memory and communication of a layout, without its GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from moe_graphs.checkpoints.hf_config import transformer_config
from moe_graphs.checkpoints.shards import CONFIG, read_json
from moe_graphs.layers import TransformerConfig, architectures
from moe_graphs.lm.option_values import dtype_of, stages_of
from moe_graphs.lm.run_presets import presets
from moe_graphs.lm.settings import (
    TrainSettings,
    build_optimizer,
    check_optimizer_layout,
    make_optimizer_state,
)
from moe_graphs.lm.workers import layout_of
from moe_graphs.optim.whole_matrices import received_bytes, rows_of
from moe_graphs.planning.layout_plan import plan_layout
from moe_graphs.planning.plan_table import plan_table, ranks_table
from moe_graphs.planning.planned_step import OptimizerCosts, PlannedStep, local_part
from moe_graphs.terminal import errors_in_a_line, make_console, print_json

ARCHITECTURES: dict[str, Callable[[], TransformerConfig]] = {
    "mixtral-8x7b": architectures.mixtral_8x7b,
    "qwen3-30b-a3b": architectures.qwen3_30b_a3b,
    "qwen3-235b-a22b": architectures.qwen3_235b_a22b,
    "olmoe-1b-7b": architectures.olmoe_1b_7b,
    "deepseek-v3": architectures.deepseek_v3,
    "llama3-8b": architectures.llama3_8b,
    "llama3.1-405b": architectures.llama3_1_405b,
}
_SEQUENCE_LENGTH = 4096


def plan(
    *,
    model: str,
    gpus: int,
    batch_size: int | None,
    microbatches: int | None,
    sequence_length: int | None,
    dtype: str,
    mixed_precision: bool,
    reshard_after_forward: bool,
    dispatcher: str | None,
    rows_factor: float | None,
    schedule: str,
    stages_per_rank: int | None,
    optimizer: str | None,
    optimizer_state: str | None,
    ema_decay: float | None,
    json_: bool,
    **degrees: int | None,
) -> None:
    """Runs the command with the options of the command line, under their names there.

    Args:
        degrees: fields of ``ParallelConfig``; None means the default.
    """
    console = make_console(stderr=json_)
    with errors_in_a_line():
        config, defaults = named_model(model)
        layout = replace(layout_of(gpus, **degrees), reshard_after_forward=reshard_after_forward)
        if layout.ep == 1 and (dispatcher is not None or rows_factor is not None):
            raise ValueError("dispatcher, rows_factor: between ranks, which ep=1 does not use")
        parts = microbatches or defaults.get("microbatches", 1)
        ranks = layout.data_parallel * parts
        batch = batch_size or defaults.get("batch_size", ranks)
        _check_batch(batch, parts, layout.data_parallel)
        length = sequence_length or defaults.get(
            "sequence_length", min(_SEQUENCE_LENGTH, config.max_sequence_length)
        )
        asked = {"optimizer": optimizer, "optimizer_state": optimizer_state, "ema_decay": ema_decay}
        settings = _settings(batch, length, asked)
        check_optimizer_layout(settings, layout.tp)
        step = PlannedStep(
            sequences=batch // ranks,
            sequence_length=length,
            microbatches=parts,
            dtype=dtype_of(dtype),
            mixed_precision=mixed_precision,
            dispatcher=dispatcher or "all_to_all",
            rows_factor=rows_factor,
            schedule=schedule,
            stages_per_rank=stages_of(schedule, stages_per_rank),
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
    if json_:
        print_json({"model": model, "gpus": gpus, "tokens": batch * length, **found.to_dict()})


def _check_batch(batch: int, parts: int, ranks: int) -> None:
    if batch % (ranks * parts):
        raise ValueError(
            f"batch_size: {batch} sequences in {parts} microbatch(es) cannot be shared equally "
            f"by {ranks} ranks: choose a multiple of {ranks * parts}"
        )


def _settings(batch: int, length: int, asked: dict[str, Any]) -> TrainSettings:
    """Settings of the planned step. In ``asked`` None means the default."""
    given = {name: value for name, value in asked.items() if value is not None}
    sizes = {"batch_size": batch, "sequence_length": length}
    return TrainSettings(steps=1, learning_rate=1.0, **sizes, **given)


def optimizer_costs(settings: TrainSettings, model: nn.Module) -> OptimizerCosts:
    """Costs of the optimizer of ``moe-graphs train`` on this rank's part of a model.

    The model may be on the meta device.

    Raises:
        ValueError: if ``build_optimizer`` refuses the settings.
    """
    optimizer = build_optimizer(model, settings)
    make_optimizer_state(optimizer)
    states = [local_part(v) for state in optimizer.state.values() for v in state.values()]
    received = 0
    for group in optimizer.param_groups:
        if group.get("muon"):
            rows = (rows_of(parameter) for parameter in group["params"])
            received += received_bytes([each for each in rows if each is not None])
    return OptimizerCosts(sum(state.nbytes for state in states), received)


def named_model(name: str) -> tuple[TransformerConfig, dict[str, Any]]:
    """The model of that name or directory, and the preset's settings if the name is a preset.

    Raises:
        ValueError: if no architecture, preset or directory has this name, or if its config.json
            describes a model that our layers do not compute.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name](), {}
    if name in presets():
        preset = presets()[name]()
        settings = preset.training
        names = ("batch_size", "microbatches", "sequence_length")
        return preset.model, {each: getattr(settings, each) for each in names}
    if Path(name).is_dir():
        return transformer_config(read_json(Path(name) / CONFIG)), {}
    raise ValueError(
        f"model: {name!r} is no directory and not one of {', '.join([*ARCHITECTURES, *presets()])}"
    )
