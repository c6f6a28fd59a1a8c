"""MoE blocks of other libraries with given weights, for `moe_layer.py` and for whole models.

Every block takes and gives `[T, D]` in bf16, and computes what Qwen3-MoE's block computes: a
softmax over the logits, top-k, weights that sum to one, SwiGLU experts. Libraries are imported when
their block is built.

Shapes: T tokens, D model, E experts, F ffn, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from peer_models.weights import LayerWeights, assign


@dataclass(frozen=True)
class BlockWeights:
    """``router`` [E, D], ``gate`` and ``up`` [E, F, D], ``down`` [E, D, F]."""

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    top_k: int

    @classmethod
    def of(cls, weights: LayerWeights, top_k: int) -> BlockWeights:
        return cls(weights.router, weights.gate, weights.up, weights.down, top_k)

    def qwen_config(self) -> Any:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

        experts, ffn, hidden = self.gate.shape
        config = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=ffn, num_experts=experts,
            num_experts_per_tok=self.top_k, norm_topk_prob=True,
        )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        return config


class Block(nn.Module):
    """A library's module, and how it is called with tokens."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self._call = module, call

    def forward(self, x_TD: Tensor) -> Tensor:
        return self._call(self.module, x_TD)


class Routed(nn.Module):
    """A router in plain torch before a library's experts."""

    def __init__(self, experts: nn.Module, router_ED: Tensor, top_k: int) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = nn.Parameter(torch.empty_like(router_ED))
        assign(self.router, router_ED)

    def forward(self, x_TD: Tensor) -> Tensor:
        scores_TE = (x_TD @ self.router.t()).float().softmax(dim=-1)
        weights_TK, experts_TK = scores_TE.topk(self.top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return self.experts(x_TD, weights_TK.to(x_TD.dtype), experts_TK)


def sonic(weights: BlockWeights) -> nn.Module:
    """SonicMoE; it keeps the stream that it was made on, so it cannot be in a graph."""
    from sonicmoe import KernelBackendMoE, MoE
    from sonicmoe.enums import ActivationType

    experts, ffn, hidden = weights.gate.shape
    module = MoE(
        num_experts=experts, num_experts_per_tok=weights.top_k, hidden_size=hidden,
        intermediate_size=ffn, activation_function=ActivationType.SWIGLU, add_bias=False, std=0.02,
    ).to(weights.gate)  # fmt: skip
    assign(module.router.weight, weights.router)
    by_turns = torch.stack((weights.gate, weights.up), dim=2).flatten(1, 2)
    assign(module.c_fc.weight, by_turns)
    assign(module.c_proj.weight, weights.down)
    backend = KernelBackendMoE.sonicmoe
    return Block(module, lambda moe, x_TD: moe(x_TD, kernel_backend_moe=backend)[0])


def scattermoe(weights: BlockWeights) -> nn.Module:
    from scattermoe.mlp import GLUMLP

    experts, ffn, hidden = weights.gate.shape
    mlp = GLUMLP(hidden, ffn, experts, weights.top_k).to(weights.gate)
    assign(mlp.experts.weight, torch.cat((weights.up, weights.gate), dim=1))
    assign(mlp.output_experts.weight, weights.down)
    return Routed(mlp, weights.router, weights.top_k)


def hugging_face(weights: BlockWeights, experts: nn.Module | None = None) -> nn.Module:
    """Qwen3-MoE's block; ``experts`` are another library's in place of `grouped_mm`."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    block = qwen.Qwen3MoeSparseMoeBlock(weights.qwen_config())
    if experts is not None:
        block.experts = experts
    block = block.to(weights.gate).train()
    assign(block.gate.weight, weights.router)
    assign(block.experts.gate_up_proj, torch.cat((weights.gate, weights.up), dim=1))
    assign(block.experts.down_proj, weights.down)
    return Block(block, _of_one_sequence)


def liger(weights: BlockWeights) -> nn.Module:
    """Qwen3-MoE's block as Liger-Kernel changes it; its kernels tune themselves at first."""
    from liger_kernel.transformers.swiglu import LigerExperts

    return hugging_face(weights, LigerExperts(weights.qwen_config()))


def unsloth(weights: BlockWeights) -> nn.Module:
    """Unsloth's block around its grouped GEMM, with tiles that it tunes for 4,096 tokens."""
    from unsloth.kernels.moe import autotune_cache
    from unsloth.kernels.moe.grouped_gemm.reference.layers.qwen3_moe import (
        Qwen3MoeFusedGroupedGEMMBlock,
    )

    experts, ffn, hidden = weights.gate.shape
    sizes = experts, hidden, ffn, weights.top_k
    forward, dx, dw = autotune_cache.get_or_autotune_moe_kernels(*sizes, weights.gate.dtype)
    gate_up = torch.cat((weights.gate, weights.up), dim=1)
    rows = torch.contiguous_format  # its kernels refuse the strides of `weights.down`
    copies = (x.clone(memory_format=rows) for x in (weights.router, gate_up, weights.down))
    block = Qwen3MoeFusedGroupedGEMMBlock(
        weights.qwen_config(), *copies, autotune=False,
        kernel_config_fwd=forward, kernel_config_bwd_dX=dx, kernel_config_bwd_dW=dw,
    )  # fmt: skip
    return Block(block, _of_one_sequence)


def _of_one_sequence(block: nn.Module, x_TD: Tensor) -> Tensor:
    out = block(x_TD[None])
    return rearrange(out[0] if isinstance(out, tuple) else out, "1 t d -> t d")


BLOCKS: dict[str, Callable[[BlockWeights], nn.Module]] = {
    "SonicMoE": sonic,
    "ScatterMoE": scattermoe,
    "Liger-Kernel": liger,
    "Unsloth": unsloth,
    "HF grouped_mm": hugging_face,
}
