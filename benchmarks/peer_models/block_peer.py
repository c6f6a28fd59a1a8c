"""Another library's MoE block between attention and norms in plain torch.

Shapes: B sequences, S sequence length, D model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from peer_models.cases import Case
from peer_models.moe_blocks import BLOCKS, BlockWeights
from peer_models.peer import Peer
from peer_models.plain import plain_model
from peer_models.weights import LayerWeights

PREPARED_TOKENS = 4096


class OfSequences(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        return self.block(hidden_BSD.flatten(0, 1)).view_as(hidden_BSD)


def prepare(case: Case, device: torch.device, dtype: torch.dtype, block: str) -> None:
    """Compile and tune the block's kernels, which takes some libraries minutes."""
    moe = case.config.moe
    assert moe is not None
    shape = moe.num_experts, moe.ffn_hidden_size, case.config.hidden_size
    gate, up, down = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(3))
    router = torch.zeros(shape[0], shape[2], device=device, dtype=dtype)
    down = down.transpose(1, 2).contiguous()
    weights = BlockWeights(router, gate, up, down, moe.top_k)
    x_TD = torch.randn(PREPARED_TOKENS, shape[2], device=device, dtype=dtype, requires_grad=True)
    out_TD = BLOCKS[block](weights)(x_TD)
    out_TD.backward(torch.ones_like(out_TD))  # a sum's gradient has strides that SonicMoE refuses


def build(
    case: Case,
    state: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    block: str,
) -> Peer:
    """``block``: a key of ``BLOCKS``."""
    moe = case.config.moe
    assert moe is not None

    def made(weights: LayerWeights) -> nn.Module:
        return OfSequences(BLOCKS[block](BlockWeights.of(weights, moe.top_k)))

    settings = {"experts": block, "attention": "torch's SDPA", "compile": "none"}
    return plain_model(case.config, state, dict(device=device, dtype=dtype), settings, made)
