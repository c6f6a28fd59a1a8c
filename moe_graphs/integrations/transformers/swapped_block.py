"""An MoE block of transformers that computes by our stages, with transformers' own parameters.

Names of parameters and buffers stay those of the block that it replaces.

Shapes: T tokens, D model, F ffn, E experts, K top-k, P pairs of token and expert.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.dispatch import Dispatched, LocalDispatcher
from moe_graphs.engine.guards.introspection import forward_hooks_of, hooks_of, is_intercepted
from moe_graphs.errors import GraphWarning
from moe_graphs.integrations.peft import (
    SUMMED,
    beside_products,
    innermost,
    lora_of,
    why_summed,
)
from moe_graphs.integrations.transformers.collected_outputs import is_collecting
from moe_graphs.integrations.transformers.decoding import is_decoding
from moe_graphs.integrations.transformers.packing import (
    WEIGHTS,
    packing_of,
    refuse_summed,
    weight_of,
)
from moe_graphs.kernels import RowOrder, route
from moe_graphs.kernels.choose_experts.reference import pairs_per_expert
from moe_graphs.kernels.fp8 import PRECISIONS
from moe_graphs.kernels.routed_experts.fp8 import routed_experts_fp8
from moe_graphs.kernels.routed_experts.lora import LoRA, routed_experts_with_lora
from moe_graphs.layers import MoEConfig, Routing
from moe_graphs.layers.model_config import Precision
from moe_graphs.layers.moe import MoEInput, MoEStages, Prepared, Routed
from moe_graphs.layers.router import rule_of
from moe_graphs.layers.topk_routers import TopKChoice
from moe_graphs.staged import Stage, record

ROUTERS = ("gate", "router")
SHARED = ("shared_expert", "shared_experts", "shared_mlp")
SHARED_GATE = "shared_expert_gate"
BIAS = "e_score_correction_bias"
LORA_IN_FP8 = (
    "LoRA is beside experts that accelerate_model(precision=) has put in FP8: their products have "
    "the dtype of the weights"
)
SETTINGS = (bool, int, float, str, type(None))


@record
class PreparedRows:
    """``dtype`` is that of the block's input, and of its output."""

    prepared: Prepared
    dtype: torch.dtype


class SwappedExperts(nn.Module):
    """Experts with the very parameters of ``experts``, which may be in few bits.

    ``gate_up_proj [E, 2F, D]`` and ``down_proj [E, D, F]``: transposed views multiply the rows.

    Attributes:
        precision: as in ``MoEConfig``; with LoRA beside them products have the weights' dtype.
        keeps_codes: whether codes of weights in FP8 are kept from the forward to the backward.
    """

    precision: Precision = "weights"
    keeps_codes = True

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._parameters.update(experts._parameters)
        self.packing = packing_of(experts)
        self.training = experts.training

    def forward(
        self, tokens_TD: Tensor, order: RowOrder, weights_TK: Tensor, is_sorted: bool = False
    ) -> Tensor:
        return self.with_lora({}, tokens_TD, order, weights_TK, is_sorted)

    def with_lora(
        self,
        lora: Mapping[str, LoRA],
        tokens_TD: Tensor,
        order: RowOrder,
        weights_TK: Tensor,
        is_sorted: bool,
    ) -> Tensor:
        """The forward with factors beside the parameters of these names, in their layout."""
        w1_ED2F, w2_EFD = (weight_of(self, name, is_transposed=False) for name in WEIGHTS)
        if not torch.is_autocast_enabled(tokens_TD.device.type):
            tokens_TD = tokens_TD.to(w1_ED2F.dtype)
        factors = beside_products(lora, is_transposed=False)
        if self.precision != "weights":
            if factors == (None, None):
                assert isinstance(w1_ED2F, Tensor)
                assert isinstance(w2_EFD, Tensor)  # experts in few bits are left
                return routed_experts_fp8(
                    tokens_TD, order, weights_TK, w1_ED2F, w2_EFD,
                    is_sorted=is_sorted, keep_codes=self.keeps_codes, **PRECISIONS[self.precision],
                )  # fmt: skip
            warnings.warn(LORA_IN_FP8, GraphWarning, stacklevel=2)
        given = tokens_TD, order, weights_TK, w1_ED2F, w2_EFD, *factors
        return routed_experts_with_lora(*given, is_sorted=is_sorted)


class SwappedMoE(MoEStages):
    """``block`` with the same router and shared expert, our choice of experts and our GEMMs.

    Logits are fp32 in every precision. A router from which transformers collects logits is called
    as well (the load-balancing loss of ``output_router_logits=True`` comes from there). A router
    that was changed since the swap (LoRA around it, another ``top_k``, forward, class or hook)
    chooses experts by itself, with one warning: ``why_own`` says why. LoRA of PEFT around the
    experts multiplies the rows, and no summed weight is made (``integrations.peft``).

    While the model generates, ``block`` computes with the weights of now: a token of each sequence
    waits for the host, and the block's few launches are faster than our kernels.
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
        self._block: tuple[Any] = (block,)  # in a tuple, since it is no part of this module
        self._router = next(name for name in ROUTERS if name in parts)
        self._shared = next((name for name in SHARED if name in parts), None)
        router = parts[self._router]
        self._router_kind, self._router_forward = type(router), type(router).forward
        self._router_settings = router_settings(router)
        for name, value in settings_of(block).items():
            if not hasattr(self, name):
                setattr(self, name, value)

    def why_own(self) -> str | None:
        """The reason why the router chooses experts by its own forward, None if ours does."""
        router = getattr(self, self._router)
        if not isinstance(router, self._router_kind):
            return f"its router is a {type(router).__name__} now"
        if type(router).forward is not self._router_forward or "forward" in vars(router):
            return "its router has another forward now"
        if type(router) is not self._router_kind:
            return "its router has another class now"
        now = router_settings(router)
        for name, value in self._router_settings.items():
            if now[name] != value:
                return f"its router's {name} is {now[name]} now, not {value}"
        before, after, *backward = hooks_of(router)
        if before or any(backward) or not is_collecting(after):
            return "its router has hooks"
        return None

    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage("moe_router", lambda entered: self.route(entered.hidden)),
            Stage("moe_preprocess", self._prepare),
            Stage("moe_experts", self._run_rows),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        block = self._block_of_now() if is_decoding(hidden_states) else None
        if block is not None:
            return block(hidden_states)
        return self.run_stages(MoEInput(hidden_states))

    def _block_of_now(self) -> Any:
        """The block with the weights of now, or None if it would compute something else."""
        block, experts = self._block[0], self.experts
        if self.routing_pass is not None or (self.expert_load is not None and self.training):
            return None
        if type(experts) is not SwappedExperts or experts.packing is not None:
            return None
        if experts.precision != "weights" or is_intercepted(experts):
            return None
        others = (
            block._modules[n] is each for n, each in self._modules.items() if each is not experts
        )
        if experts._parameters.keys() != block.experts._parameters.keys() or not all(others):
            return None
        block.experts._parameters.update(experts._parameters)
        block._buffers.update(self._buffers)
        block.training = self.training
        return block

    def choose(self, hidden_TD: Tensor, given_TK: Tensor | None = None) -> Routing:
        name = jitter_of(self)
        if name is not None:
            raise ValueError(
                f"{name} was set on a {type(self).__name__}, which adds no noise: set it before "
                f"the swap, and the block is left"
            )
        router = getattr(self, self._router)
        own = self._buffers.get(BIAS)
        given = (hidden_TD,) if own is None else (hidden_TD, own)
        reason = self.why_own()
        if reason is not None:
            warnings.warn(
                f"{reason}: its own forward chooses experts from now on", GraphWarning, stacklevel=2
            )
            with TopKChoice(self.config.num_experts, given_TK):
                _, weights_TK, experts_TK = router(*given)
            zero = hidden_TD.new_zeros((), dtype=torch.float32)
            counts_E = pairs_per_expert(experts_TK, self.config.num_experts)
            return Routing(weights_TK.float(), experts_TK, zero, counts_E)
        if forward_hooks_of(router):
            router(*given)
        bias_E = getattr(router, BIAS, own)
        if bias_E is not None:
            bias_E = bias_E.float()
        return Routing(*route(hidden_TD, router.weight, bias_E, self.rule, given_TK))

    def run_shared(self, hidden_TD: Tensor) -> Tensor | None:
        if self._shared is None:
            return None
        shared_TD = getattr(self, self._shared)(hidden_TD)
        gate = getattr(self, SHARED_GATE, None)
        return shared_TD if gate is None else gate(hidden_TD).sigmoid() * shared_TD

    def call_experts(self, dispatched: Dispatched) -> Tensor:
        rows = dispatched.tokens_XD, dispatched.order, dispatched.weights_XK, dispatched.is_sorted
        reason = why_summed(self.experts)
        if packing_of(innermost(self.experts)) is not None:
            refuse_summed(reason)
        elif reason is not None:
            warnings.warn(f"{reason}: {SUMMED}", GraphWarning, stacklevel=2)
            return self.experts(*rows)
        return innermost(self.experts).with_lora(lora_of(self.experts), *rows)

    def _prepare(self, routed: Routed) -> PreparedRows:
        return PreparedRows(self.preprocess(routed), routed.hidden.dtype)

    def _run_rows(self, rows: PreparedRows) -> Tensor:
        return self.run_experts(rows.prepared).hidden.to(rows.dtype)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of ``module``, but for its mode."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, SETTINGS)}
    found.pop("training", None)
    return found


# Guards of graphs compare attributes whose names stand in the code that ran, as they do here.


def router_settings(router: nn.Module) -> dict[str, Any]:
    """The attributes that the forwards of transformers' routers read."""
    names = (
        "top_k", "norm_topk_prob", "routed_scaling_factor", "num_group", "topk_group",
        "topk_method", "num_experts", "hidden_dim",
    )  # fmt: skip
    return {name: getattr(router, name, None) for name in names}


def jitter_of(module: nn.Module) -> str | None:
    """The name of a noise that is not zero."""
    for name in ("jitter_noise", "input_jitter_noise", "router_jitter_noise"):
        if getattr(module, name, 0):
            return name
    return None
