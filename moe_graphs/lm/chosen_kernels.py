"""The libraries whose kernels a run computes on, checked before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_graphs.integrations.transformer_engine import import_transformer_engine
from moe_graphs.kernels.fp8 import check_sizes
from moe_graphs.lm.options import ModelOptions
from moe_graphs.lm.run_presets import Preset
from moe_graphs.registry import FP8_RECIPES

_THEIRS = "transformer_engine"


def with_kernels(preset: Preset, asked: ModelOptions, device: torch.device) -> Preset:
    """The preset with these kernels in its model's config.

    Raises:
        ValueError: if a name is unknown, or if a choice would change nothing or cannot run on this
            device.
        ImportError: if Transformer Engine is asked for and is not installed.
    """
    experts, linear, fp8 = asked.experts, asked.linear, asked.fp8
    precision: Any = asked.precision
    model = replace(preset.model, linear=linear)  # the configs check the names
    if asked.dense_precision != "weights":
        dense: Any = asked.dense_precision
        model = replace(model, precision=dense)
    if model.moe is not None:
        moe = replace(model.moe, experts=experts, precision=precision)
        if asked.precision != "weights":
            check_sizes(hidden_size=model.hidden_size, ffn_hidden_size=moe.ffn_hidden_size)
        model = replace(model, moe=moe)
    elif asked.precision != "weights":
        raise ValueError(
            f"precision: {asked.precision!r}, but the model has no experts: drop --precision, or "
            f"take --dense-precision"
        )
    elif experts != "moe_graphs":
        raise ValueError(f"experts: {experts!r}, but the model has none: drop --experts")
    if fp8 != "none":
        FP8_RECIPES.check(fp8)
    if _THEIRS in (experts, linear):
        if device.type != "cuda":
            raise ValueError(f"Transformer Engine needs a CUDA GPU, and this run is on {device}")
        import_transformer_engine()
    elif fp8 != "none":
        raise ValueError(
            f"fp8: {fp8!r}, but nothing would compute in it: add --linear {_THEIRS}, --experts "
            f"{_THEIRS} or both"
        )
    return replace(preset, model=model)
