"""One more choice of transformers' experts interface: grouped GEMMs, sizes on the device.

Source: ``transformers/integrations/moe.py`` (5.17 and 5.23), whose decorator tells how a family
lays its weights out. Shapes: T tokens, H hidden, K top-k, E experts, R = T*K rows, N any width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_graphs.dispatch.local_rows import local_rows
from moe_graphs.integrations.peft import beside_products
from moe_graphs.integrations.transformers.packing import WEIGHTS, weight_of
from moe_graphs.kernels import (
    RowOrder,
    grouped_gemm,
    permute,
    route_rows,
    swiglu,
    unpermute,
)
from moe_graphs.kernels.gemm import grouped_gemm_wgrad
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.packed_weights import PackedWeight
from moe_graphs.kernels.routed_experts.lora import (
    LoRA,
    down_projection_with_lora,
    up_projection_with_lora,
)
from moe_graphs.kernels.swiglu import NO_CLAMP, ClampedGate

NAME = "moe_graphs"
# Limited activations of transformers: by module and function the attributes with limit and alpha.
_CLAMPED: dict[tuple[str, str], tuple[str, str | None]] = {
    ("modeling_deepseek_v4", "DeepseekV4Experts._apply_gate"): ("limit", None),
    ("modeling_glm5_next", "Glm5NextTextExperts._apply_gate"): ("swiglu_limit", None),
    ("modeling_gpt_oss", "GptOssExperts._apply_gate"): ("limit", "alpha"),
    ("modeling_hy_v4", "HYV4Experts._apply_gate"): ("swiglu_limit", None),
    ("modeling_hy_v4_vl", "HYV4VLExperts._apply_gate"): ("swiglu_limit", None),
    ("modeling_minimax_m3_vl", "MiniMaxM3VLExperts._apply_gate"): ("swiglu_limit", "swiglu_alpha"),
    ("modeling_openai_privacy_filter", "OpenAIPrivacyFilterExperts._apply_gate"): (
        "limit",
        "alpha",
    ),
}


def register() -> str:
    """Makes ``experts_implementation="moe_graphs"`` known to transformers; returns that name.

    Raises:
        ImportError: there is no transformers with an experts interface (5.0 and later).
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "experts on moe_graphs' kernels need transformers 5 or later: pip install "
            "'moe_graphs[hf]'"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return NAME


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes what an experts module of transformers computes, dropless and without host syncs.

    Rows are summed in fp32 in the order of the experts' ranks, so every run gives the same bits.

    Args:
        self: a module with ``down_proj`` and ``gate_up_proj`` or ``up_proj``, whose layout its
            ``has_gate``, ``is_transposed``, ``is_concatenated`` and ``has_bias`` tell.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, K]``; with expert parallelism ids from E on are somebody else's.
        top_k_weights: ``[T, K]``.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: dtype or sizes that ``grouped_gemm`` does not take.
    """
    return experts_with_lora(self, hidden_states, top_k_index, top_k_weights, {})


def experts_with_lora(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: Mapping[str, LoRA],
) -> Tensor:
    """``experts_forward`` with factors beside the weights of these names, in their layout.

    Raises:
        ValueError: there are factors, and the experts' activation is not one of our kernels'.
    """
    experts, others = self.num_experts, _has_others(self)
    if others:  # whose pairs have no rows here
        order = local_rows(top_k_index, range(experts), experts + 1, top_k_index.numel()).order
    else:
        order = route_rows(top_k_index, experts)
    has_norm, gate = getattr(self, "has_post_expert_norm", False), _gate_of(self)
    if gate is not None and not has_norm:
        sums_TH = _sums(self, gate, hidden_states, order, top_k_index, top_k_weights, lora)
        return sums_TH.to(hidden_states.dtype)
    if lora:
        raise ValueError(f"{type(self).__name__}: {why_no_lora(self)}")
    up_proj = "gate_up_proj" if self.has_gate else "up_proj"
    rows_RH, ends_E = permute(hidden_states, order), order.offsets_E
    rows_RN = _linear(self, up_proj, rows_RH, ends_E, zero_tail=others)
    rows_RH = _linear(self, "down_proj", _activated(self, rows_RN), ends_E, zero_tail=others)
    if has_norm:
        rows_RH = self.post_expert_norm(rows_RH)
    return unpermute(rows_RH, order, top_k_weights).to(hidden_states.dtype)


def _sums(
    experts: Any,
    gate: ClampedGate,
    hidden_TH: Tensor,
    order: RowOrder,
    index_TK: Tensor,
    weights_TK: Tensor,
    lora: Mapping[str, LoRA],
) -> Tensor:
    """Each token's sum over its experts, of which tokens and one product are kept.

    A bias behind the second product is a bias of the sum, with the sum of its routing weights. It
    comes first: checkpointing repeats all up to the last tensor that is kept, and the sums keep
    none.
    """
    turned = experts.is_transposed
    w1, w2 = (weight_of(experts, name, is_transposed=turned) for name in WEIGHTS)
    tokens_TH, ends_E = _in_dtype_of(w1, hidden_TH), order.offsets_E
    first, second = beside_products(lora, is_transposed=experts.is_transposed)
    bias_E2F = experts.gate_up_proj_bias if experts.has_bias else None
    is_frozen = bias_E2F is None or not (bias_E2F.requires_grad or w1.requires_grad)
    within = bias_E2F if is_frozen else None
    given = tokens_TH, order, index_TK.shape[1], w1, first
    gate_up_R2F = up_projection_with_lora(*given, bias_E2F=within)
    if bias_E2F is not None and not is_frozen:
        gate_up_R2F = _AddBias.apply(gate_up_R2F, bias_E2F.to(gate_up_R2F.dtype), ends_E)
    bias_TH = _bias_of_sums(experts, index_TK, weights_TK, tokens_TH.dtype)
    sums_TH = down_projection_with_lora(gate_up_R2F, order, weights_TK, w2, second, gate=gate)
    return sums_TH if bias_TH is None else sums_TH + bias_TH


def _bias_of_sums(
    experts: Any, index_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype
) -> Tensor | None:
    if not experts.has_bias:
        return None
    count = len(experts.down_proj_bias)
    # The column behind the last expert is for experts of other ranks.
    weights_TE = weights_TK.new_zeros(len(weights_TK), count + 1)
    weights_TE = weights_TE.scatter(1, index_TK.clamp(max=count), weights_TK)[:, :count]
    return weights_TE.to(dtype) @ experts.down_proj_bias.to(dtype)


def why_no_lora(experts: Any) -> str | None:
    """The reason why ``experts_with_lora`` takes no factors for these experts; None if it does."""
    if getattr(experts, "has_post_expert_norm", False):
        return "there is a norm behind each expert"
    if _gate_of(experts) is None:
        return "their activation is not one of our kernels'"
    return None


def _gate_of(experts: Any) -> ClampedGate | None:
    """The activation of experts, if our kernels have it."""
    if is_swiglu(experts):
        return NO_CLAMP
    if not experts.has_gate:
        return None
    if type(experts)._apply_gate.__qualname__ == "FP8Experts._apply_gate":
        return _gate_of_fp8(experts)
    function = type(experts)._apply_gate
    names = _CLAMPED.get((function.__module__.rpartition(".")[2], function.__qualname__))
    if names is None:
        return None
    limit, alpha = (1.0 if name is None else getattr(experts, name) for name in names)
    if alpha is None or limit is None or not limit > 0:
        return None
    if names[1] is None:  # a SiLU, and no offset
        is_silu = isinstance(getattr(experts, "act_fn", None), (*_silu_classes(), type(None)))
        return ClampedGate(1.0, float(limit), 0.0, by_turns=False) if is_silu else None
    by_turns = not getattr(experts, "is_concatenated", True)
    return ClampedGate(float(alpha), float(limit), by_turns=by_turns)


def _gate_of_fp8(experts: Any) -> ClampedGate | None:
    """The activation that transformers' ``FP8Experts`` takes from the model's configuration."""
    if getattr(experts, "gate_softcap", None) is not None:
        return None
    alpha, limit = (getattr(experts, name, None) for name in ("swiglu_alpha", "swiglu_limit"))
    if alpha is not None and limit is not None and limit > 0:
        return ClampedGate(float(alpha), float(limit), by_turns=False)
    if alpha is not None or not isinstance(experts.act_fn, _silu_classes()):
        return None
    limit = getattr(experts, "limit", None)
    return NO_CLAMP if limit is None else ClampedGate(1.0, float(limit), 0.0, by_turns=False)


def _has_others(experts: Any) -> bool:
    """Whether ids may be other ranks'. Before 5.23 (or so) no attribute tells."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return getattr(experts, "_is_expert_parallel", distributed)


def _linear(
    experts: Any, name: str, rows_RK: Tensor, offsets_E: Tensor, *, zero_tail: bool
) -> Tensor:
    w_EKN = weight_of(experts, name, is_transposed=experts.is_transposed)
    assert isinstance(w_EKN, Tensor)  # experts in few bits have an activation of our kernels
    rows_RK = _in_dtype_of(w_EKN, rows_RK)
    rows_RN = grouped_gemm(rows_RK, w_EKN, offsets_E, zero_tail=zero_tail)
    if not experts.has_bias:
        return rows_RN
    bias_EN = getattr(experts, f"{name}_bias").to(rows_RN.dtype)
    return _AddBias.apply(rows_RN, bias_EN, offsets_E)


def _in_dtype_of(weight: Tensor | PackedWeight, rows: Tensor) -> Tensor:
    """Casts as the module does, unless autocast casts both."""
    return rows if torch.is_autocast_enabled(rows.device.type) else rows.to(weight.dtype)


def _activated(experts: Any, rows_RN: Tensor) -> Tensor:
    if not experts.has_gate:
        return experts.act_fn(rows_RN)
    return swiglu(rows_RN) if is_swiglu(experts) else experts._apply_gate(rows_RN)


def is_swiglu(experts: Any) -> bool:
    """Whether an experts module of transformers has nothing but ``silu(gate) * up`` in it."""
    from transformers.integrations.moe import _default_apply_gate

    is_plain = experts.has_gate and type(experts)._apply_gate is _default_apply_gate
    return is_plain and isinstance(experts.act_fn, _silu_classes())


def _silu_classes() -> tuple[type[nn.Module], ...]:
    from transformers.activations import ACT2CLS

    found = ACT2CLS["silu"]
    return nn.SiLU, found[0] if isinstance(found, tuple) else found


class _AddBias(torch.autograd.Function):
    """``rows + bias[expert of the row]``.

    The bias' gradient is a grouped GEMM with a column of ones: a gather's would be a scatter with
    atomics.
    """

    @staticmethod
    def forward(ctx: Any, rows_RN: Tensor, bias_EN: Tensor, offsets_E: Tensor) -> Tensor:
        ctx.save_for_backward(offsets_E)
        row_R = torch.arange(rows_RN.shape[0], device=rows_RN.device, dtype=torch.int32)
        expert_R = torch.searchsorted(offsets_E, row_R, right=True, out_int32=True)
        with_others_EN = F.pad(bias_EN, (0, 0, 0, 1))  # rows behind the last offset have no expert
        return rows_RN + with_others_EN[expert_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (offsets_E,) = ctx.saved_tensors
        grad_bias = None
        if wants_gradient(ctx, 1):
            ones_R8 = grad_RN.new_ones(grad_RN.shape[0], 8)  # 16 bytes, what the kernel reads
            grad_bias = grouped_gemm_wgrad(ones_R8, grad_RN, offsets_E)[:, 0]
        return grad_RN, grad_bias, None
