"""Stand-ins in plain torch for Transformer Engine and MegaBlocks, which need a GPU.

They have the parts that `benchmarks/peer_models` uses, with the libraries' layouts of weights.

Shapes: B sequences, S sequence length, T tokens, D model, R rows, E experts.
"""

from __future__ import annotations

import contextlib
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional


def weight_of(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype).fill_(torch.nan))


def packages(**members: types.SimpleNamespace | dict[str, Any]) -> dict[str, types.ModuleType]:
    """Modules by their dotted names (here with ``__`` for dots), and their parents."""
    made: dict[str, types.ModuleType] = {}
    for name, values in members.items():
        parts = name.split("__")
        for depth in range(1, len(parts) + 1):
            dotted = ".".join(parts[:depth])
            module = made.setdefault(dotted, types.ModuleType(dotted))
            if depth > 1:
                setattr(made[".".join(parts[: depth - 1])], parts[depth - 1], module)
        vars(made[".".join(parts)]).update(values)
    return made


def install(patch: pytest.MonkeyPatch, modules: dict[str, types.ModuleType]) -> None:
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)


# ---- Transformer Engine


class RMSNorm(nn.Module):
    def __init__(self, normalized_shape: int, eps: float, params_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = weight_of(normalized_shape, dtype=params_dtype), eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNormLinear(nn.Module):
    def __init__(self, width: int, out: int, eps: float) -> None:
        super().__init__()
        self.layer_norm_weight, self.weight, self.eps = weight_of(width), weight_of(out, width), eps

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        return functional.linear(normed, self.weight)


class Linear(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = weight_of(out, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class MultiheadAttention(nn.Module):
    """Rows of ``layernorm_qkv.weight``: of each kv head its queries, its key, its value."""

    def __init__(
        self, hidden_size: int, num_attention_heads: int, *, kv_channels: int,
        attention_dropout: float, layernorm_epsilon: float, layer_number: int,
        attn_mask_type: str, num_gqa_groups: int, params_dtype: torch.dtype,
        input_layernorm: bool, fuse_qkv_params: bool, bias: bool, normalization: str,
        qkv_format: str, qk_norm_type: str | None, qk_norm_eps: float, qk_norm_before_rope: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        assert (attention_dropout, attn_mask_type, bias, qkv_format) == (0, "causal", False, "bshd")
        assert input_layernorm
        assert fuse_qkv_params
        assert normalization == "RMSNorm"
        self.groups, self.size = num_gqa_groups, kv_channels
        self.per_group = num_attention_heads // num_gqa_groups
        rows = (num_attention_heads + 2 * num_gqa_groups) * kv_channels
        self.layernorm_qkv = LayerNormLinear(hidden_size, rows, layernorm_epsilon)
        self.proj = Linear(num_attention_heads * kv_channels, hidden_size)
        normed = qk_norm_type is not None and qk_norm_before_rope
        norms = [RMSNorm(kv_channels, qk_norm_eps, params_dtype) if normed else None for _ in "qk"]
        self.q_norm, self.k_norm = norms

    def forward(self, hidden_BSD: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        sizes = (self.groups, self.per_group + 2, self.size)
        mixed = self.layernorm_qkv(hidden_BSD).unflatten(-1, sizes)
        query, key, value = mixed.split((self.per_group, 1, 1), dim=-2)
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (self._rotated(x, rotary_pos_emb) for x in (query, key))
        heads = [x.transpose(1, 2) for x in (query, key, value)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    @staticmethod
    def _rotated(x: Tensor, angles_S11Q: Tensor) -> Tensor:
        angles = angles_S11Q[: x.shape[1], :, 0]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class RotaryPositionEmbedding(nn.Module):
    def __init__(self, dim: int, rotary_base: float) -> None:
        super().__init__()
        self.inverse = 1.0 / rotary_base ** (torch.arange(0, dim, 2).float() / dim)

    def forward(self, length: int) -> Tensor:
        angles = torch.outer(torch.arange(length).float(), self.inverse)
        return torch.cat((angles, angles), dim=-1)[:, None, None]


class GroupedLinear(nn.Module):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, bias: bool,
        params_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not bias
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", weight_of(out_features, in_features))

    def forward(self, rows: Tensor, m_splits: list[int]) -> Tensor:
        parts = zip(rows.split(m_splits), self.parameters(), strict=True)
        return torch.cat([functional.linear(part, weight) for part, weight in parts])


class Padding(nn.Module):
    """Each expert's rows to a multiple of 16; ``reverse`` takes the rows away again."""

    reverse = False

    def __init__(self, num_gemms: int) -> None:
        super().__init__()

    def forward(self, rows: Tensor, m_splits: list[int]) -> Any:
        padded = [-(-count // 16) * 16 for count in m_splits]
        if self.reverse:
            parts = zip(rows.split(padded), m_splits, strict=True)
            return torch.cat([part[:count] for part, count in parts])
        parts = zip(rows.split(m_splits), padded, strict=True)
        rows = torch.cat(
            [functional.pad(part, (0, 0, 0, size - len(part))) for part, size in parts]
        )
        return rows, padded


class Unpadding(Padding):
    reverse = True


def fused_topk_with_score_function(
    logits: Tensor, topk: int, use_pre_softmax: bool, num_groups: None, group_topk: None,
    scaling_factor: None, score_function: str, expert_bias: None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert not use_pre_softmax
    assert score_function == "softmax"
    assert logits.dtype == torch.float32
    best, chosen = logits.topk(topk)
    weights = torch.zeros_like(logits).scatter(1, chosen, best.softmax(-1))
    return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    assert num_out_tokens == int(routing_map.sum())
    expert_R, token_R = routing_map.T.nonzero(as_tuple=True)
    return inp[token_R], probs[token_R, expert_R], token_R


def moe_unpermute(inp: Tensor, row_id_map: Tensor, restore_shape: torch.Size) -> Tensor:
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def parallel_cross_entropy(inp: Tensor, target: Tensor) -> Tensor:
    assert inp.dim() == 3
    losses = functional.cross_entropy(inp.flatten(0, 1), target.flatten(), reduction="none")
    return losses.view_as(target)


def transformer_engine() -> dict[str, types.ModuleType]:
    recipes = {n: type(n, (), {}) for n in
               ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")}  # fmt: skip
    main = {
        "MultiheadAttention": MultiheadAttention, "RMSNorm": RMSNorm,
        "GroupedLinear": GroupedLinear, "Fp8Padding": Padding, "Fp8Unpadding": Unpadding,
        "moe_permute_with_probs": moe_permute_with_probs, "moe_unpermute": moe_unpermute,
        "parallel_cross_entropy": parallel_cross_entropy,
        "autocast": lambda enabled, recipe: contextlib.nullcontext(),
    }  # fmt: skip
    return packages(
        transformer_engine__pytorch=main,
        transformer_engine__common__recipe=recipes,
        transformer_engine__pytorch__attention={"RotaryPositionEmbedding": RotaryPositionEmbedding},
        transformer_engine__pytorch__router={
            "fused_topk_with_score_function": fused_topk_with_score_function
        },
    )


# ---- MegaBlocks


@dataclass
class Arguments:
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    bias: bool
    return_bias: bool
    activation_fn: Any
    moe_num_experts: int
    moe_top_k: int
    moe_normalize_expert_weights: int
    moe_loss_weight: float
    mlp_type: str
    mlp_impl: str
    fp16: bool
    bf16: bool
    device: Any


class DroplessMoE(nn.Module):
    """``w1`` and ``v1`` multiply from the right transposed, ``w2`` as it is: rows ``E * F``."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        if args.mlp_impl == "sparse":
            raise ValueError("Sparse MLP is not supported with triton >=3.2.0.")
        assert (args.mlp_type, args.bias, args.moe_normalize_expert_weights) == ("glu", False, 1)
        self.args = args
        self.router = nn.Module()
        self.router.layer = Linear(args.hidden_size, args.moe_num_experts)
        self.experts = nn.Module()
        self.experts.mlp = nn.Module()
        for name in ("w1", "v1", "w2"):
            shape = (args.moe_num_experts * args.ffn_hidden_size, args.hidden_size)
            setattr(self.experts.mlp, name, weight_of(*shape))

    def forward(self, x: Tensor) -> Tensor:
        args, mlp, rows_TD = self.args, self.experts.mlp, x.flatten(0, 1)
        best, chosen = self.router.layer(rows_TD).softmax(-1).topk(args.moe_top_k)
        weights_TE = rows_TD.new_zeros(len(rows_TD), args.moe_num_experts)
        weights_TE = weights_TE.scatter(1, chosen, best / best.sum(-1, keepdim=True))
        output = torch.zeros_like(rows_TD)
        for expert in range(args.moe_num_experts):
            rows = slice(expert * args.ffn_hidden_size, (expert + 1) * args.ffn_hidden_size)
            hidden = args.activation_fn(rows_TD @ mlp.w1[rows].T) * (rows_TD @ mlp.v1[rows].T)
            output = output + weights_TE[:, expert, None] * (hidden @ mlp.w2[rows])
        return output.view_as(x)


def megablocks() -> dict[str, types.ModuleType]:
    return packages(
        megablocks__layers__arguments={"Arguments": Arguments},
        megablocks__layers__dmoe={"dMoE": DroplessMoE},
    )
