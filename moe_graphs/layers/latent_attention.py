"""Causal self-attention whose queries, keys and values come from low-rank projections.

Shapes: B batch, S sequence, D model, H heads, Q head dim of queries and keys = P plain + R rotated,
V head dim of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.kernels import apply_rotary
from moe_graphs.kernels.heads.reference import plain_heads_by_rank
from moe_graphs.layers.documents import causal_attention
from moe_graphs.layers.head_exchange import HeadExchange, check_exchange
from moe_graphs.layers.linear import build_linear
from moe_graphs.layers.model_config import TransformerConfig
from moe_graphs.layers.norm import RMSNorm
from moe_graphs.layers.rope import RotaryEmbedding


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434) as it is trained: keys and values in full.

    One projection, ``down``, holds the low-rank projections: rows ``[query_rank, kv_rank, R]`` of
    ``down.weight``, without the first part if ``query_rank`` is None. A head has the rows
    ``[P, R]`` in ``query_up`` and ``[P, V]`` in ``kv_up``.

    Attributes:
        exchange: the exchange between ranks if the inputs are this rank's part of every sequence
            (context parallelism), else None. Keys and values are sent in full.
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
        latent, size = config.latent, config.hidden_size
        if latent is None:
            raise ValueError("latent attention has sizes of its own: set latent")
        self.num_heads, self.rope, self.dropout = config.num_heads, rope, config.attention_dropout
        self.query_sizes = (latent.plain_head_dim, latent.rope_head_dim)
        self.kv_sizes = (latent.plain_head_dim, latent.value_head_dim)
        self.down_sizes = (latent.query_rank or 0, latent.kv_rank, latent.rope_head_dim)
        softmax_factor = 1.0 if rope.scaling is None else rope.scaling.softmax_factor
        self.scale = softmax_factor / math.sqrt(config.head_size)
        self.down = build_linear(config.linear, size, sum(self.down_sizes), **factory)
        self.query_norm: RMSNorm | None = None
        if latent.query_rank is not None:
            self.query_norm = RMSNorm(latent.query_rank, latent.norm_eps, **factory)
        self.kv_norm = RMSNorm(latent.kv_rank, latent.norm_eps, **factory)
        query_width = self.num_heads * sum(self.query_sizes)
        kv_width = self.num_heads * sum(self.kv_sizes)
        self.query_up = build_linear(
            config.linear, latent.query_rank or size, query_width, **factory
        )
        self.kv_up = build_linear(config.linear, latent.kv_rank, kv_width, **factory)
        value_width = self.num_heads * latent.value_head_dim
        self.out = build_linear(config.linear, value_width, size, **factory)

    def forward(self, hidden_BSD: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
        """Mix tokens as ``Attention.forward`` does."""
        check_exchange(self.exchange, document_ids_BS)
        query, kv, rope_key_BSR = self.down(hidden_BSD).split(self.down_sizes, dim=-1)
        query = hidden_BSD if self.query_norm is None else self.query_norm(query)
        query_BSHQ = self.query_up(query).unflatten(-1, (self.num_heads, -1))
        kv_BSH = self.kv_up(self.kv_norm(kv)).unflatten(-1, (self.num_heads, -1))
        plain_query_BSHP, rope_query_BSHR = query_BSHQ.split(self.query_sizes, dim=-1)
        plain_key_BSHP, value_BSHV = kv_BSH.split(self.kv_sizes, dim=-1)
        turned = apply_rotary(
            rope_query_BSHR.transpose(1, 2),
            rope_key_BSR.unsqueeze(1),
            *self.rope.doubled_tables(hidden_BSD.shape[1], self.exchange),
        )
        rope_query_BSHR, rope_key_BSHR = (x.transpose(1, 2) for x in turned)
        rope_key_BSHR = rope_key_BSHR.expand(-1, -1, self.num_heads, -1)
        query_BSHQ = torch.cat((plain_query_BSHP, rope_query_BSHR), dim=-1)
        key_BSHQ = torch.cat((plain_key_BSHP, rope_key_BSHR), dim=-1)
        heads_BSH: Sequence[Tensor] = (query_BSHQ, key_BSHQ, value_BSHV)
        if self.exchange is not None:
            ranks = self.exchange.ranks
            sent = plain_heads_by_rank(heads_BSH, ranks)
            shapes = [(self.num_heads // ranks, x.shape[3]) for x in heads_BSH]
            heads_BSH = self.exchange.whole_sequences(sent, shapes)
        query_BHSQ, key_BHSQ, value_BHSV = (x.transpose(1, 2) for x in heads_BSH)
        mixed_BHSV = causal_attention(
            query_BHSQ,
            key_BHSQ,
            value_BHSV,
            document_ids_BS,
            dropout=self.dropout if self.training else 0.0,
            scale=self.scale,
        )
        mixed_BSHV = mixed_BHSV.transpose(1, 2)
        if self.exchange is not None:
            return self.out(self.exchange.own_part(mixed_BSHV))
        return self.out(mixed_BSHV.flatten(2))

    def matrices(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Weights between hidden states, with the rows of each matrix if a weight holds several."""
        others = (self.query_up, self.kv_up, self.out)
        whole: dict[nn.Parameter, tuple[int, ...]] = {each.weight: () for each in others}
        return {self.down.weight: tuple(size for size in self.down_sizes if size), **whole}

    def init_weights(self, std: float, out_std: float) -> None:
        """Draw normal weights; ``out_std`` is for the projection back into the residual."""
        for projection in (self.down, self.query_up, self.kv_up):
            nn.init.normal_(projection.weight, std=std)
        nn.init.normal_(self.out.weight, std=out_std)
