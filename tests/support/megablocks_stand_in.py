"""MegaBlocks 0.10 in plain torch, for machines without a GPU: its names, layouts and maths.

Shapes: D model, F ffn, e experts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

MODULES = ("layers.arguments", "layers.glu", "layers.dmoe", "grouped_gemm_util")


@dataclass
class Arguments:
    hidden_size: int
    ffn_hidden_size: int
    device: Any
    num_layers: int = 1
    bias: bool = True
    return_bias: bool = True
    activation_fn: Any = functional.gelu
    moe_num_experts: int = 1
    moe_top_k: int = 1
    moe_normalize_expert_weights: float | None = None
    moe_loss_weight: float = 0.1
    moe_jitter_eps: float | None = None
    moe_lbl_in_fp32: bool = False
    moe_expert_model_parallelism: bool = False
    mlp_type: str = "mlp"
    mlp_impl: str = "sparse"
    fp16: bool = True
    bf16: bool = False
    init_method: Any = nn.init.normal_
    output_layer_init_method: Any = nn.init.normal_
    uniform_expert_assignment: bool = False
    shared_expert: bool = False
    fc_cls: Any = nn.Linear
    fc_kwargs: dict[str, Any] = field(default_factory=dict)
    shared_expert_hidden_size: int | None = None
    shared_expert_weighted_sum: bool = False
    moe_zloss_weight: float = 0
    moe_zloss_in_fp32: bool = False

    def __post_init__(self) -> None:
        if self.mlp_impl == "sparse":
            raise ValueError("Sparse MLP is not supported with triton >=3.2.0.")
        if self.shared_expert_hidden_size is None:
            self.shared_expert_hidden_size = self.ffn_hidden_size

    def dtype(self) -> torch.dtype | None:
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None


class GLU(nn.Module):
    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        shape = (args.moe_num_experts * args.ffn_hidden_size, args.hidden_size)
        for name in ("w1", "w2", "v1"):
            weight = nn.Parameter(torch.empty(shape, device=args.device, dtype=args.dtype()))
            args.init_method(weight.detach())
            setattr(self, name, weight)


class GroupedGLU(GLU):
    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        sizes = tokens_per_expert.cpu().to(torch.long)
        shape = (self.args.moe_num_experts, -1, self.args.hidden_size)
        weights = zip(*(weight.view(shape) for weight in (self.w1, self.v1, self.w2)), strict=True)
        rows = zip(x.split(sizes.tolist()), weights, strict=True)
        act = self.args.activation_fn
        return torch.cat([(act(r @ w1.t()) * (r @ v1.t())) @ w2 for r, (w1, v1, w2) in rows])


class LearnedRouter(nn.Module):
    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        sizes = (args.hidden_size, args.moe_num_experts)
        self.layer = nn.Linear(*sizes, bias=False, device=args.device, dtype=args.dtype())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.layer(x).softmax(-1)
        weights, experts = scores.topk(self.args.moe_top_k)
        if self.args.moe_normalize_expert_weights:
            weights = weights / weights.norm(1, -1, keepdim=True)
        return weights, experts


class SharedGLU(nn.Module):
    def __init__(self, args: Arguments) -> None:
        super().__init__()
        kwargs = {"bias": args.bias, "device": args.device, **args.fc_kwargs}
        sizes = (args.hidden_size, args.shared_expert_hidden_size)
        self.up_proj = args.fc_cls(*sizes, **kwargs)
        self.down_proj = args.fc_cls(*sizes[::-1], **kwargs)
        self.act = args.activation_fn
        self.gate_proj = args.fc_cls(*sizes, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class ParallelDroplessMLP(nn.Module):
    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args, self.mlp = args, GroupedGLU(args)


class dMoE(nn.Module):
    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.router, self.experts = LearnedRouter(args), ParallelDroplessMLP(args)
        self.shared_expert = SharedGLU(args) if args.shared_expert else None

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.view(-1, x.shape[-1])
        weights_TK, experts_TK = self.router(x_TD)
        order = experts_TK.flatten().argsort(stable=True)
        token = order // experts_TK.shape[1]
        counts = experts_TK.flatten().bincount(minlength=self.router.layer.out_features)
        rows = self.experts.mlp(x_TD[token], counts) * weights_TK.flatten()[order].unsqueeze(1)
        out = torch.zeros_like(x_TD).index_add(0, token, rows)
        return (out if self.shared_expert is None else out + self.shared_expert(x_TD)).view(x.shape)


@pytest.fixture
def megablocks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-in for MegaBlocks, also if MegaBlocks is installed."""
    names = dict(
        Arguments=Arguments,
        GroupedGLU=GroupedGLU,
        dMoE=dMoE,
        grouped_gemm_is_available=lambda: True,
    )
    for name in (f"megablocks.{each}" for each in MODULES):
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(**names)
