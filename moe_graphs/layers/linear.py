"""Whose kernels the projections of a layer run on: torch's or Transformer Engine's."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import nn

from moe_graphs.layers.model_config import check_linear


class Projection(nn.Module):
    """What the kinds have in common, for type checkers: none is a subclass."""

    weight: nn.Parameter


def build_linear(
    kind: str,
    in_features: int,
    out_features: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Projection:
    """A projection without bias. Whatever the kind: the same name and shape of its ``weight``, the
    same values in it, and the same draws from the generator.

    Raises:
        ImportError: ``kind`` needs a library that is not installed; says which.
    """
    check_linear(kind)
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    if kind == "torch":
        return cast(Projection, nn.Linear(in_features, out_features, bias=False, **factory))
    # Imported when it is asked for: layers know no integration.
    engine = importlib.import_module("moe_graphs.integrations.transformer_engine")
    return cast(Projection, engine.te_linear(in_features, out_features, **factory))
