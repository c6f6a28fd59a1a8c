"""Values of options that several commands have: what they mean, or what is wrong with them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from moe_graphs.lm.options import PipelineOptions
from moe_graphs.lm.run_presets import Preset
from moe_graphs.lm.workers import Place
from moe_graphs.registry import PRESETS


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Context in which torch's errors about missing memory become a ``MemoryError``.

    torch raises ``OutOfMemoryError`` on a GPU, and any ``RuntimeError`` on the CPU.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(f"out of memory: {error}") from error
        raise


def device_of(name: str | None) -> torch.device:
    """The device of a command that runs on one process."""
    if Place.of_environment().world_size > 1:
        raise ValueError("this command runs on one process: start it without torchrun")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = name if name is not None else "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise ValueError(f"device: {name!r} is none of cpu, cuda, and cuda:0 and so on")
    if not count:
        raise ValueError("device: no CUDA device is available here: use --device cpu")
    if index:
        if int(index) >= count:
            raise ValueError(f"device: {name!r} is not here, the last one is cuda:{count - 1}")
        torch.cuda.set_device(int(index))  # Triton's kernels are launched on the current one
    return torch.device(name)


def dtype_of(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ValueError(f"dtype: {name!r} is not one of {', '.join(known)}")
    return known[name]


def preset_of(name: str | None, device: torch.device) -> tuple[str, Preset]:
    name = name if name is not None else "small" if device.type == "cuda" else "tiny"
    preset = PRESETS[name]()
    if not isinstance(preset, Preset):
        raise ValueError(
            f"preset: {name!r} returns a {type(preset).__name__} and no Preset, which says how to "
            f"train, too"
        )
    return name.rpartition(":")[2], preset


def stages_of(pipeline: PipelineOptions) -> int:
    """The number of stages of a rank, by default the schedule's."""
    stages = pipeline.stages_per_rank
    if stages is None:
        return 2 if pipeline.schedule == "interleaved_1f1b" else 1
    if stages < 1:
        raise ValueError(f"stages_per_rank: {stages} must be at least 1")
    return stages


def with_settings(preset: Preset, changes: dict[str, Any]) -> tuple[Preset, list[str]]:
    """Changes the preset's training; returns it, and lines about settings that were adapted.

    Raises:
        ValueError: if the changes do not fit each other.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    if not 0 <= given.get("learning_rate", 0) < math.inf:
        raise ValueError(f"learning_rate: {given['learning_rate']} must be at least 0 and finite")
    settings, said = dataclasses.replace(preset.training, **given), []
    steps, warmup = settings.steps, settings.warmup_steps
    if warmup >= max(steps, 1) and "warmup_steps" in given and warmup > 0:
        raise ValueError(
            f"warmup_steps, steps: --warmup-steps {warmup} leaves none of --steps {steps} at the "
            f"peak learning rate: lower --warmup-steps, or raise --steps"
        )
    if warmup >= steps:
        settings = dataclasses.replace(settings, warmup_steps=steps // 10)
        said.append(
            f"warm-up: --warmup-steps {steps // 10}, a tenth of --steps {steps}, in place of the "
            f"preset's {warmup}, which would not end"
        )
    return dataclasses.replace(preset, training=settings), said
