"""A decoder-only language model of ``TransformerLayer`` s.

Shapes: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_graphs.dispatch import Dispatcher
from moe_graphs.layers.model_config import TransformerConfig
from moe_graphs.layers.moe import MoELayer
from moe_graphs.layers.norm import RMSNorm
from moe_graphs.layers.rope import RotaryEmbedding
from moe_graphs.layers.transformer import TransformerLayer
from moe_graphs.staged import record


@record
class ModelOutput:
    """Attributes:
    aux_loss: 0-dim fp32, the sum over the layers; add it to the loss.
    dropped_tokens: 0-dim int64 on the device, the sum over the layers.
    """

    logits_BSV: Tensor
    aux_loss: Tensor
    dropped_tokens: Tensor


class LanguageModel(nn.Module):
    """Embedding, layers, norm, output projection (not tied to the embedding).

    All layers use one dispatcher (default: ``LocalDispatcher``) and one rotary table. The
    embedding's backward is deterministic on CUDA: torch sorts the tokens, without atomics.
    """

    def __init__(
        self,
        config: TransformerConfig,
        dispatcher: Dispatcher | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.rope = RotaryEmbedding(
            config.head_size, config.max_sequence_length, config.rope_theta, device=device
        )
        self.layers = nn.ModuleList(
            TransformerLayer(config, index, dispatcher, self.rope, **factory)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **factory)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        self.init_weights()

    if TYPE_CHECKING:  # nn.Module's says Any

        def __call__(self, tokens_BS: Tensor) -> ModelOutput: ...

    def forward(self, tokens_BS: Tensor) -> ModelOutput:
        hidden_BSD = self.embedding(tokens_BS)
        aux_loss = torch.zeros((), dtype=torch.float32, device=hidden_BSD.device)
        dropped = torch.zeros((), dtype=torch.int64, device=hidden_BSD.device)
        for layer in self.layers:
            output = layer(hidden_BSD)
            hidden_BSD = output.hidden_BSD
            if layer.is_moe:
                aux_loss = aux_loss + output.aux_loss
                dropped = dropped + output.dropped_tokens
        return ModelOutput(self.head(self.norm(hidden_BSD)), aux_loss, dropped)

    @torch.no_grad()
    def init_weights(self, std: float = 0.02) -> None:
        """GPT-2's: normal, projections into the residual stream scaled by ``1/sqrt(2 L)``.

        Also computes the rotary tables and zeroes the routers' buffers, so it completes a model
        built on the meta device and moved with ``to_empty``.
        """
        out_std = std / math.sqrt(2 * self.config.num_layers)
        nn.init.normal_(self.embedding.weight, std=std)
        nn.init.normal_(self.head.weight, std=std)
        nn.init.ones_(self.norm.weight)
        self.rope.reset_tables()
        for layer in self.modules():
            if isinstance(layer, TransformerLayer):
                layer.init_weights(std, out_std)

    def update_expert_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Between steps: ``TopKRouter.update_expert_bias`` of every MoE layer."""
        for moe in self._moe_layers():
            moe.router.update_expert_bias(group)

    def num_parameters(self, *, active: bool = False) -> int:
        """Parameters of the whole model, experts on other ranks included.

        Args:
            active: count only those that a token uses: ``top_k`` of the routed experts.
        """
        total = sum(parameter.numel() for parameter in self.parameters())
        for moe in self._moe_layers():
            w1, w2 = moe.experts.w1, moe.experts.w2
            local = w1.numel() + w2.numel()
            count = moe.config.top_k if active else moe.config.num_experts
            total += local // w1.shape[0] * count - local
        return total

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of one token's forward and backward, for model FLOPs utilisation.

        ``6 N + 12 L H Q S`` (PaLM, arXiv 2204.02311, appendix B): N active parameters without
        the embedding table, attention counted as if it were not causal, as is customary.
        """
        config = self.config
        matmul = self.num_parameters(active=True) - self.embedding.weight.numel()
        attention = config.num_layers * config.num_heads * config.head_size * sequence_length
        return 6 * matmul + 12 * attention

    def _moe_layers(self) -> list[MoELayer]:
        return [module for module in self.modules() if isinstance(module, MoELayer)]
