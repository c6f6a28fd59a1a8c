"""An MoE block of transformers that computes by our stages, with transformers' own parameters.

Names of parameters and buffers stay those of the block that it replaces.

Shapes: T tokens, D model, F ffn, E experts, R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.dispatch import LocalDispatcher
from moe_graphs.engine.hooks import forward_hooks_of
from moe_graphs.kernels import route, swiglu_gemms
from moe_graphs.layers import MoEConfig, Routing
from moe_graphs.layers.moe import MoEInput, MoEStages, Prepared, Routed
from moe_graphs.layers.router import rule_of
from moe_graphs.staged import Stage, record

ROUTERS = ("gate", "router")
SHARED = ("shared_expert", "shared_experts", "shared_mlp")
SHARED_GATE = "shared_expert_gate"
BIAS = "e_score_correction_bias"


@record
class PreparedRows:
    """``dtype`` is that of the block's input, and of its output."""

    prepared: Prepared
    dtype: torch.dtype


class SwappedExperts(nn.Module):
    """``gate_up_proj [E, 2F, D]`` and ``down_proj [E, D, F]`` of ``experts``, the very parameters:
    rows are multiplied by transposed views."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.training = experts.training

    def forward(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(rows_RD.device.type):
            rows_RD = rows_RD.to(self.gate_up_proj.dtype)
        w1_ED2F, w2_EFD = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        return swiglu_gemms(rows_RD, w1_ED2F, w2_EFD, offsets_E)


class SwappedMoE(MoEStages):
    """``block`` with the same router and shared expert, our choice of experts and our GEMMs.

    Logits are fp32 in every precision. A router with hooks is called as well, so that they see
    its logits (the load-balancing loss of ``output_router_logits=True`` comes from there); what
    hooks return is not used.
    """

    def __init__(self, block: nn.Module, config: MoEConfig) -> None:
        super().__init__()
        self.config, self.rule = config, rule_of(config)
        self.dispatcher = LocalDispatcher()
        parts = dict(block.named_children())
        for name, child in parts.items():
            self.add_module(name, SwappedExperts(child) if name == "experts" else child)
        self._buffers.update(block._buffers)
        self.training = block.training
        self._router = next(name for name in ROUTERS if name in parts)
        self._shared = next((name for name in SHARED if name in parts), None)

    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage("moe_router", lambda entered: self.route(entered.hidden)),
            Stage("moe_preprocess", self._prepare),
            Stage("moe_experts", self._run_rows),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.run_stages(MoEInput(hidden_states))

    def choose(self, hidden_TD: Tensor) -> Routing:
        router = getattr(self, self._router)
        own = self._buffers.get(BIAS)
        bias_E = getattr(router, BIAS, own)
        if forward_hooks_of(router):
            router(hidden_TD) if own is None else router(hidden_TD, own)
        if bias_E is not None:
            bias_E = bias_E.float()
        return Routing(*route(hidden_TD, router.weight, bias_E, self.rule))

    def run_shared(self, hidden_TD: Tensor) -> Tensor | None:
        if self._shared is None:
            return None
        shared_TD = getattr(self, self._shared)(hidden_TD)
        gate = getattr(self, SHARED_GATE, None)
        return shared_TD if gate is None else gate(hidden_TD).sigmoid() * shared_TD

    def _prepare(self, routed: Routed) -> PreparedRows:
        return PreparedRows(self.preprocess(routed), routed.hidden.dtype)

    def _run_rows(self, rows: PreparedRows) -> Tensor:
        return self.run_experts(rows.prepared).hidden.to(rows.dtype)
