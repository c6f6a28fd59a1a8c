"""Weights of MegaBlocks' GLUs in our layout, and back.

``w1`` is the gate, ``v1`` the up projection, each ``[e * F, D]`` like ``w2``.

Shapes: D model, F ffn, e experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stacked(glu: Any, experts: int) -> tuple[Tensor, Tensor]:
    """``w1_eD2F`` and ``w2_eFD``, without a gradient."""
    gate_eFD, up_eFD, down_eFD = _by_expert(glu, experts)
    return torch.cat([gate_eFD.mT, up_eFD.mT], dim=2), down_eFD


def load_stacked(glu: Any, experts: int, w1_eD2F: Tensor, w2_eFD: Tensor) -> None:
    gate_eFD, up_eFD, down_eFD = _by_expert(glu, experts)
    gate_eDF, up_eDF = w1_eD2F.chunk(2, dim=2)
    gate_eFD.copy_(gate_eDF.mT)
    up_eFD.copy_(up_eDF.mT)
    down_eFD.copy_(w2_eFD)


def _by_expert(glu: Any, experts: int) -> tuple[Tensor, ...]:
    weights = (glu.w1, glu.v1, glu.w2)
    return tuple(weight.detach().view(experts, -1, weight.shape[1]) for weight in weights)
