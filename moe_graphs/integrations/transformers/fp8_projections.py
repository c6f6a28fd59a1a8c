"""Projections of transformers' models in FP8 (``accelerate_model(dense_precision=)``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from moe_graphs.engine.guards.introspection import is_intercepted
from moe_graphs.integrations.transformers.changes import Changes, lists_of_layers
from moe_graphs.integrations.transformers.decoding import theirs_in_decoding
from moe_graphs.integrations.transformers.fp8_experts import why_no_blocks
from moe_graphs.integrations.transformers.swapped_block import ROUTERS, SHARED_GATE
from moe_graphs.kernels.fp8 import PRECISIONS
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
    # The first and the last one of each list are left.
    inner = (layer for layers in lists_of_layers(model).values() for layer in list(layers)[1:-1])
    found = [each for layer in inner for each in _linear_layers(layer)]
    if all(map(_why_not, found)):
        reasons = dict.fromkeys(str(_why_not(each)) for each in found)
        why = "; ".join(reasons) or "no linear layer between two others"
        raise ValueError(f"dense_precision={precision!r} has no projection to take it: {why}")
    note = "projections in blocks of 128; those of the first and last layer, and the head, are not"
    maker = functools.partial(_in_fp8, precision=precision)
    done.changed_unless("fp8", found, _why_not, theirs_in_decoding(maker), note, _LEFT)


def _linear_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Plain linear layers, but those of routers, of experts and within PEFT's modules."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            if name not in _OTHERS:
                yield child
        elif name not in _OTHERS and not type(child).__module__.startswith("peft."):
            yield from _linear_layers(child)


def _why_not(linear: Any) -> str | None:
    if type(linear.weight) is not nn.Parameter or not linear.weight.is_floating_point():
        return "its weight is no plain tensor of floats"
    if is_intercepted(linear):
        return "it has hooks or a forward of its own"
    return why_no_blocks(in_features=linear.in_features, out_features=linear.out_features)


def _in_fp8(kind: type[Any], precision: str) -> Callable[..., Tensor]:
    return functools.partial(_forward, precision=precision)


def _forward(self: Any, input: Tensor, *, precision: str) -> Tensor:
    rows = linear_fp8(input, self.weight, **PRECISIONS[precision])
    return rows if self.bias is None else rows + self.bias
