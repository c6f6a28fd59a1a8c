"""The shared expert on a side stream: what of it can be there, and the casts of autocast.

Shapes: T tokens, D model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.kernels.swiglu_beside import begin_swiglu, end_swiglu
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.staged import record

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@record
class Begun:
    """A shared expert's output that may not be there yet. ``begun`` is for ``end`` alone."""

    begun: Any

    def end(self) -> Tensor:
        """``shared_TD``, for the stream on which it was begun."""
        return end_swiglu(self.begun)


def begin_shared(expert: SwiGLU, gate: nn.Linear | None, hidden_TD: Tensor) -> Begun:
    """Begins ``expert`` of the tokens, times the sigmoid of ``gate``, on the side stream.

    Raises:
        ValueError: modules that are not plain projections, or have hooks (neither is called), or an
            autocast that caches its casts.
    """
    for module in (expert, expert.w1, expert.w2, *(() if gate is None else (gate,))):
        _check_plain(module)
    kind = hidden_TD.device.type
    if torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
        raise ValueError(
            "overlap='shared_experts': autocast shares casts of weights between calls, on one "
            "stream: use torch.autocast(..., cache_enabled=False), or overlap='none'"
        )
    # Each projection has a cast of its own, as by autocast: their gradients meet behind it.
    inputs_TD, w1, w2 = _cast(hidden_TD), _cast(expert.w1.weight), _cast(expert.w2.weight)
    if gate is None:
        return Begun(begin_swiglu(inputs_TD, w1, w2))
    return Begun(begin_swiglu(inputs_TD, w1, w2, _cast(gate.weight), _cast(hidden_TD)))


def _cast(x: Tensor) -> Tensor:
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _check_plain(module: nn.Module) -> None:
    name = type(module).__name__
    if type(module) not in (SwiGLU, nn.Linear) or getattr(module, "bias", None) is not None:
        raise ValueError(
            f"overlap='shared_experts': the shared expert has a {name}: only plain nn.Linear "
            f"without bias runs beside: pass overlap='none'"
        )
    if any(getattr(module, hooks) for hooks in _HOOKS) or "forward" in module.__dict__:
        raise ValueError(
            f"overlap='shared_experts': the {name} of the shared expert has hooks, and it is not "
            f"called: remove them, or pass overlap='none'"
        )
