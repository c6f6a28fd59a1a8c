"""Causal self-attention with grouped key and value heads.

Shapes: B batch, S sequence, D model, H query heads, G kv heads, Q head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_graphs.kernels import split_heads
from moe_graphs.layers.linear import build_linear
from moe_graphs.layers.model_config import TransformerConfig
from moe_graphs.layers.norm import RMSNorm
from moe_graphs.layers.rope import RotaryEmbedding


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions.

    One projection holds queries, keys and values: rows ``[H*Q, G*Q, G*Q]`` of ``qkv.weight``.
    ``query_norm`` and ``key_norm`` hold weights and are not called: their hooks do not fire.
    On CUDA the backward of torch's flash attention adds with atomics unless
    ``torch.use_deterministic_algorithms(True)`` is set.
    """

    def __init__(
        self,
        config: TransformerConfig,
        rope: RotaryEmbedding,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.kv_heads = config.num_heads, config.kv_heads
        self.head_dim, self.dropout = config.head_size, config.attention_dropout
        self.qk_norm, self.norm_eps, self.rope = config.qk_norm, config.norm_eps, rope
        self.sizes = (self.num_heads * self.head_dim, *(self.kv_heads * self.head_dim,) * 2)
        self.qkv = build_linear(config.linear, config.hidden_size, sum(self.sizes), **factory)
        self.out = build_linear(config.linear, self.sizes[0], config.hidden_size, **factory)
        if self.qk_norm != "none":
            per_head = (self.head_dim, self.head_dim)
            query_size, key_size = per_head if self.qk_norm == "head" else self.sizes[:2]
            self.query_norm = RMSNorm(query_size, config.norm_eps, **factory)
            self.key_norm = RMSNorm(key_size, config.norm_eps, **factory)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        heads_BSHQ = split_heads(
            self.qkv(hidden_BSD),
            *self.rope.tables(hidden_BSD.shape[1]),
            self.num_heads,
            self.kv_heads,
            *self._norm_weights(),
            eps=self.norm_eps,
        )
        query_BHSQ, key_BGSQ, value_BGSQ = (x.transpose(1, 2) for x in heads_BSHQ)
        mixed_BHSQ = functional.scaled_dot_product_attention(
            query_BHSQ,
            key_BGSQ,
            value_BGSQ,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.num_heads,
        )
        return self.out(mixed_BHSQ.transpose(1, 2).flatten(2))

    def init_weights(self, std: float, out_std: float) -> None:
        """Normal weights; ``out_std`` for the projection back into the residual."""
        nn.init.normal_(self.qkv.weight, std=std)
        nn.init.normal_(self.out.weight, std=out_std)

    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        if self.qk_norm == "none":
            return None, None
        return self.query_norm.weight, self.key_norm.weight
