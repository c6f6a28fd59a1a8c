"""Causal self-attention with grouped key and value heads.

Shapes: B batch, S sequence, D model, H query heads, G kv heads, Q head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.kernels import split_heads, split_heads_by_rank
from moe_graphs.layers.documents import causal_attention
from moe_graphs.layers.head_exchange import HeadExchange, check_exchange
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

    Attributes:
        exchange: the exchange between ranks if the inputs are this rank's part of every sequence
            (context parallelism), else None.
    """

    exchange: HeadExchange | None = None

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

    def forward(self, hidden_BSD: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
        """Mix tokens with those before them: ``[B, S, D]``, also if a row has several documents.

        Raises:
            ValueError: documents and an ``exchange``; a rank knows its part of a row only.
        """
        check_exchange(self.exchange, document_ids_BS)
        heads_BSHQ = self._heads(hidden_BSD)
        query_BHSQ, key_BGSQ, value_BGSQ = (x.transpose(1, 2) for x in heads_BSHQ)
        mixed_BHSQ = causal_attention(
            query_BHSQ,
            key_BGSQ,
            value_BGSQ,
            document_ids_BS,
            dropout=self.dropout if self.training else 0.0,
        )
        mixed_BSHQ = mixed_BHSQ.transpose(1, 2)
        if self.exchange is not None:
            return self.out(self.exchange.own_part(mixed_BSHQ))
        return self.out(mixed_BSHQ.flatten(2))

    def _heads(self, hidden_BSD: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of all heads.

        With an ``exchange`` they are the heads of this rank, over whole sequences.
        """
        qkv, exchange = self.qkv(hidden_BSD), self.exchange
        tables = self.rope.tables(hidden_BSD.shape[1], exchange)
        heads, kv_heads = self.num_heads, self.kv_heads
        norm, eps = self._norm_weights(), self.norm_eps
        if exchange is None:
            return split_heads(qkv, *tables, heads, kv_heads, *norm, eps=eps)
        ranks = exchange.ranks
        sent = split_heads_by_rank(qkv, *tables, heads, kv_heads, ranks, *norm, eps=eps)
        counts = (heads // ranks, *(math.lcm(kv_heads, ranks) // ranks,) * 2)
        return exchange.whole_sequences(sent, [(count, self.head_dim) for count in counts])

    def matrices(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Weights between hidden states, with the rows of each matrix if a weight holds several."""
        return {self.qkv.weight: self.sizes, self.out.weight: ()}

    def init_weights(self, std: float, out_std: float) -> None:
        """Draw normal weights; ``out_std`` is for the projection back into the residual."""
        nn.init.normal_(self.qkv.weight, std=std)
        nn.init.normal_(self.out.weight, std=out_std)

    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        if self.qk_norm == "none":
            return None, None
        return self.query_norm.weight, self.key_norm.weight
