"""Kernels of a layer's projections: torch's or Transformer Engine's."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_graphs.layers.model_config import check_linear

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Projection(nn.Module):
    """Interface of a projection, for type checkers alone: no kind is a subclass."""

    weight: nn.Parameter


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a call of ``module`` is ``functional.linear`` with its weight, and nothing else."""
    return (
        type(module) is nn.Linear
        and module.bias is None
        and not is_traceable_wrapper_subclass(module.weight)  # DTensors, quantized weights
        and not is_watched(module)
    )


def is_watched(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs more than the forward of its class: hooks or a patch."""
    # By getattr: graphs compare hooks by themselves, and call them hooks in their reports.
    hooked = any(getattr(module, kind) for kind in _HOOKS)
    return hooked or _has_any_global_hook() or "forward" in module.__dict__


def build_linear(
    kind: str,
    in_features: int,
    out_features: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Projection:
    """Build a projection without bias.

    Every kind has a ``weight`` of the same shape with the same values, and draws the same numbers
    from the random generator.

    Raises:
        ImportError: ``kind`` needs a library that is not installed; the message says which.
    """
    check_linear(kind)
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    if kind == "torch":
        return cast(Projection, nn.Linear(in_features, out_features, bias=False, **factory))
    # Imported by name and late, because layers may not import integrations.
    engine = importlib.import_module("moe_graphs.integrations.transformer_engine")
    return cast(Projection, engine.te_linear(in_features, out_features, **factory))
