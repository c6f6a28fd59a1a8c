"""`moe_graphs.LanguageModel`: eager, scopes or whole steps, as the contender says."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from contenders import in_precision
from moe_graphs.layers import LanguageModel
from moe_graphs.layers.model_config import Precision
from peer_models.cases import Case
from peer_models.peer import Peer, version_of

TE = "transformer_engine"


class OursPeer(Peer):
    recipe: Any = None

    def loss(self, model: Any, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        return model(tokens_BS, targets_BS).loss

    def around_step(self) -> contextlib.AbstractContextManager[Any]:
        if self.recipe is None:
            return contextlib.nullcontext()
        from moe_graphs.integrations.transformer_engine import fp8_autocast

        return fp8_autocast(self.recipe)


def build(
    case: Case,
    state: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    linear: str = "torch",
    experts: str = "moe_graphs",
    fp8: str | None = None,
    precision: Precision = "weights",
) -> Peer:
    """Build our model.

    Args:
        linear, experts: kernels of projections and of experts.
        fp8: recipe for the kernels of Transformer Engine.
        precision: of our kernels, for experts and the projections of all layers.
    """
    # The field is set only if needed, so this also runs with versions that do not have the field.
    chosen: dict[str, Any] = {} if linear == "torch" else {"linear": linear}
    config = replace(in_precision(case.config, precision), **chosen)
    model = LanguageModel(config, device=device, dtype=dtype)
    model.load_state_dict(state)
    if experts != "moe_graphs":
        model.use_experts(experts)
    settings = {"linear": linear, "experts": experts, "attention": "torch's SDPA"}
    settings |= {"precision": precision} if precision != "weights" else {}
    peer = OursPeer(model.train(), settings)
    if TE in (linear, experts):
        peer.settings |= {TE: version_of(TE), "fp8": fp8 or "none"}
    if fp8 is not None:
        from moe_graphs.integrations.transformer_engine import fp8_recipe

        peer.recipe = fp8_recipe(fp8)
    return peer
