"""transformers' Qwen3-MoE or Mixtral with `grouped_mm`, or with Liger-Kernel's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from moe_graphs.checkpoints.hf_config import hf_config
from moe_graphs.checkpoints.weight_names import pieces
from peer_models import block_peer
from peer_models.cases import Case
from peer_models.peer import Peer
from peer_models.weights import assign


class HuggingFacePeer(Peer):
    def loss(self, model: Any, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        targets_BS = targets_BS.contiguous()
        return model(input_ids=tokens_BS, labels=targets_BS, shift_labels=targets_BS).loss


def prepare(case: Case, device: torch.device, dtype: torch.dtype, liger: bool = False) -> None:
    if liger:
        block_peer.prepare(case, device, dtype, "Liger-Kernel")


def build(
    case: Case,
    state: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    liger: bool = False,
) -> Peer:
    """``liger``: with all kernels of Liger-Kernel (experts, norms, rotation, loss)."""
    values = hf_config(case.config)
    settings = dict(experts_implementation="grouped_mm", attn_implementation="sdpa")
    kept = {name: value for name, value in values.items() if name != "architectures"}
    config = transformers.AutoConfig.for_model(
        **kept | settings | {"dtype": dtype, "use_cache": False}
    )
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    named = dict(model.named_parameters())
    for piece in pieces(case.config, values, fused=True):
        theirs = named[piece.theirs]
        theirs = theirs[piece.expert] if piece.expert is not None else theirs
        assign(theirs, piece.view(state[piece.ours]))
    settings |= {"transformers": transformers.__version__}
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

        apply_liger_kernel_to_qwen3_moe(model=model)
        settings |= {"experts_implementation": "liger"}
    return HuggingFacePeer(model, settings)
