"""The weights of one layer of `LanguageModel`'s state, in the shapes that other libraries have.

Shapes: D model, H query heads, G kv heads, Q head dim, E experts, F ffn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_graphs.layers import TransformerConfig


@dataclass(frozen=True)
class LayerWeights:
    """Views of a layer's state, in the shapes that linear layers have.

    Shapes: ``query`` [H*Q, D], ``key`` and ``value`` [G*Q, D], ``out`` [D, H*Q], ``gate`` and
    ``up`` [E, F, D], ``down`` [E, D, F].
    """

    attention_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, state: Mapping[str, Tensor], index: int, config: TransformerConfig) -> LayerWeights:
        def get(name: str) -> Tensor:
            return state[f"layers.{index}.{name}"]

        sizes = [heads * config.head_size for heads in (config.num_heads, *[config.kv_heads] * 2)]
        gate, up = get("moe.experts.w1").transpose(1, 2).chunk(2, dim=1)
        normed = config.qk_norm == "head"
        return cls(
            get("attention_norm.weight"),
            *get("attention.qkv.weight").split(sizes),
            get("attention.out.weight"),
            get("attention.query_norm.weight") if normed else None,
            get("attention.key_norm.weight") if normed else None,
            get("mlp_norm.weight"),
            get("moe.router.weight"),
            gate,
            up,
            get("moe.experts.w2").transpose(1, 2),
        )

    def interleaved_qkv(self, config: TransformerConfig) -> Tensor:
        """Megatron's order: of each kv head its queries, its key, its value, all along rows."""
        groups, width = config.kv_heads, self.query.shape[1]
        parts = [x.reshape(groups, -1, width) for x in (self.query, self.key, self.value)]
        return torch.cat(parts, dim=1).flatten(0, 1)


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copies in place; a wrong shape is an error, not a broadcast."""
    if parameter.shape != value.shape:
        raise ValueError(f"{tuple(parameter.shape)} cannot hold {tuple(value.shape)}")
    parameter.copy_(value)


def assign_linear(module: nn.Module, value: Tensor) -> None:
    assign(module.get_parameter("weight"), value)


def assign_optional(module: nn.Module | None, value: Tensor | None) -> None:
    """Copy the weight of a norm that not every model has: both are there, or none."""
    if (module is None) != (value is None):
        raise ValueError(f"{module} for {'no' if value is None else 'a'} weight")
    if module is not None and value is not None:
        assign_linear(module, value)
