"""Projections of transformers' models in FP8 (``accelerate_model(dense_precision=)``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from moe_graphs.engine.guards.introspection import hooks_of
from moe_graphs.integrations.transformers.changes import Changes
from moe_graphs.integrations.transformers.decoding import theirs_in_decoding
from moe_graphs.integrations.transformers.swapped_block import ROUTERS, SHARED_GATE
from moe_graphs.kernels.fp8 import check_sizes
from moe_graphs.kernels.fp8.linear import linear_fp8
from moe_graphs.layers.model_config import Precision, check_precision

_LEFT = "stays in its weight's dtype"
_OTHERS = {*ROUTERS, SHARED_GATE, "experts"}  # by name, with all that is in them


def projections_in_fp8(model: nn.Module, done: Changes, precision: Precision) -> None:
    """Let linear layers within decoder layers compute in FP8, but for the first and last layer's.

    Raises:
        ValueError: the precision is unknown, or no linear layer takes it.
    """
    check_precision(precision)
    if precision == "weights":
        return
    found = [each for layer in _inner_layers(model) for each in _linear_layers(layer)]
    reasons = list(map(_why_not, found))
    if None not in reasons:
        why = "; ".join(dict.fromkeys(map(str, reasons))) or "no linear layer between two others"
        raise ValueError(f"dense_precision={precision!r} has no projection to take it: {why}")
    note = "projections in blocks of 128; those of the first and last layer, and the head, are not"
    maker = _all_in_fp8 if precision == "fp8" else _rows_in_fp8
    done.changed_unless("fp8", found, _why_not, maker, note, _LEFT)


def _inner_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Decoder layers without the first and the last one of each list."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            layers = list(module)
            if all(isinstance(each, GradientCheckpointingLayer) for each in layers):
                yield from layers[1:-1]


def _linear_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Plain linear layers, but those of routers, of experts and within PEFT's modules."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            if name not in _OTHERS:
                yield child
        elif name not in _OTHERS and not type(child).__module__.startswith("peft."):
            yield from _linear_layers(child)


def _why_not(linear: Any) -> str | None:
    try:
        check_sizes(in_features=linear.in_features, out_features=linear.out_features)
    except ValueError as error:
        return str(error)
    if type(linear.weight) is not nn.Parameter or not linear.weight.is_floating_point():
        return "its weight is no plain tensor of floats"
    if any(hooks_of(linear)) or "forward" in vars(linear):
        return "it has hooks or a forward of its own"
    return None


@theirs_in_decoding
def _all_in_fp8(kind: type[Any]) -> Callable[..., Tensor]:
    return functools.partial(_forward, weight_gradients=True)


@theirs_in_decoding
def _rows_in_fp8(kind: type[Any]) -> Callable[..., Tensor]:
    return functools.partial(_forward, weight_gradients=False)


def _forward(self: Any, input: Tensor, *, weight_gradients: bool) -> Tensor:
    rows = linear_fp8(input, self.weight, weight_gradients=weight_gradients)
    return rows if self.bias is None else rows + self.bias
