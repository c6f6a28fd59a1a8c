"""`moe_graphs.LanguageModel`: eager, scopes or whole steps, as the contender says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_graphs.kernels import cross_entropy
from moe_graphs.layers import LanguageModel
from peer_models.cases import Case
from peer_models.peer import Peer


class OursPeer(Peer):
    def loss(self, model: Any, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        logits_BSV = model(tokens_BS).logits_BSV
        return cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def build(
    case: Case, state: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Peer:
    # FP8 by Transformer Engine's modules (`MoEConfig(experts="transformer_engine")` and its
    # linears) comes here, with `te.autocast` around the step: not there yet.
    model = LanguageModel(case.config, device=device, dtype=dtype)
    model.load_state_dict(state)
    return OursPeer(model.train(), {"experts": "moe_graphs", "attention": "torch's SDPA"})
