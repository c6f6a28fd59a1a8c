"""Experts of transformers' models with their products in FP8 (``accelerate_model(precision=)``)."""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_graphs.integrations.peft import innermost, wrappers_around
from moe_graphs.integrations.transformers.changes import Changes
from moe_graphs.integrations.transformers.packing import WEIGHTS
from moe_graphs.integrations.transformers.swapped_block import SwappedExperts, SwappedMoE
from moe_graphs.kernels.fp8 import check_sizes
from moe_graphs.layers.model_config import Precision, check_precision

_NOTES = {
    "fp8": "products and all gradients",
    "fp8_powers": "products and all gradients, scales are powers of two",
    "fp8_rows": "products and gradients of rows",
}


def experts_in_fp8(model: nn.Module, done: Changes, precision: Precision) -> None:
    """Let the experts of swapped blocks compute in FP8, where they can.

    Raises:
        ValueError: the precision is unknown, or no experts take it.
    """
    check_precision(precision)
    if precision == "weights":
        return
    outcomes: dict[str | None, list[Any]] = {}
    for block in model.modules():
        if isinstance(block, SwappedMoE):
            outcomes.setdefault(_why_not(block.experts), []).append(innermost(block.experts))
    if None not in outcomes:
        reasons = "; ".join(map(str, outcomes)) or "no MoE block of this model is on our stages"
        raise ValueError(f"precision={precision!r} has no experts to take it: {reasons}")
    for reason, experts in outcomes.items():
        if reason is not None:
            done.left("fp8", "experts", len(experts), reason)
    taken = outcomes[None]
    for each in taken:
        each.precision = precision

    def undo() -> None:
        for each in taken:
            each.precision = "weights"

    note = f"{_NOTES[precision]} in blocks of 128; routers and shared experts as before"
    done.changed("fp8", "experts", len(taken), note, undo)


def _why_not(experts: nn.Module) -> str | None:
    own = innermost(experts)
    if not isinstance(own, SwappedExperts) or own.packing is not None:
        return "they are in few bits"
    if wrappers_around(experts):
        return "LoRA beside them has products in the dtype of the weights"
    hidden_size, ffn_hidden_size = getattr(own, WEIGHTS[1]).shape[1:]
    return why_no_blocks(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)


def why_no_blocks(**sizes: int) -> str | None:
    """The reason why sizes are no whole blocks of FP8, or None."""
    try:
        check_sizes(**sizes)
    except ValueError as error:
        return str(error)
    return None
