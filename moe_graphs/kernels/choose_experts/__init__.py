"""The router: experts and weights of each token.

On CUDA a layer's router is one node of autograd with 10 to 13 kernels for forward and backward; the
plain torch path says the same in 66 to 91.

Shapes: T tokens, D model, E experts, K top-k, N groups of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.choose_experts.reference import Choice, RoutingRule, choose
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.precision import accumulation_dtype


def route(
    hidden_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    given_TK: Tensor | None = None,
) -> Choice:
    """Scores ``hidden @ weight.T`` in fp32, whatever the operands and autocast say.

    ``bias_E`` takes part in the choice and in nothing else. Static shapes, no host sync. The
    kernels take up to 512 experts and 32 per token; beyond that CUDA runs the plain torch path.

    Args:
        given_TK: int64, experts of each token in place of the best ones, distinct within a token
            and in the range of the experts, which nobody checks here. Weights and losses are
            computed for them.
    """
    if has_kernel(hidden_TD) and weight_ED.shape[0] <= 512 and rule.top_k <= 32:
        return Choice(*_Route.apply(hidden_TD, weight_ED, bias_E, rule, given_TK))
    return choose(_Linear.apply(hidden_TD, weight_ED), bias_E, rule, given_TK)


class _Route(torch.autograd.Function):
    """All of it, for tensors that have kernels. Keeps the operands, the logits and the choice."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_ED, bias_E, rule, given_TK):
        from moe_graphs.kernels.choose_experts import triton_kernels as choose_experts_triton

        logits_TE = _logits(hidden_TD, weight_ED)
        given_TK = None if given_TK is None else given_TK.contiguous()
        *choice, chosen_TK = choose_experts_triton.choose_experts(
            logits_TE, bias_E, *rule, given_TK
        )
        _, experts_TK, _, counts_E = choice
        # torch's checkpoint raises an error if it runs this again without the given choice: it
        # would save one tensor less.
        given = () if given_TK is None else (experts_TK,)
        ctx.save_for_backward(hidden_TD, weight_ED, logits_TE, chosen_TK, counts_E, *given)
        ctx.mark_non_differentiable(experts_TK, counts_E)
        ctx.set_materialize_grads(False)
        ctx.rule = rule
        return tuple(choice)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_weights_TK, _experts, grad_loss, _counts):
        from moe_graphs.kernels.choose_experts import triton_kernels as choose_experts_triton

        hidden_TD, weight_ED, logits_TE, chosen_TK, counts_E = ctx.saved_tensors[:5]
        if grad_weights_TK is None and grad_loss is None:
            return None, None, None, None, None
        rule = ctx.rule
        split = _has_exact_products(hidden_TD, weight_ED) and hidden_TD.dtype == torch.bfloat16
        grad_logits = choose_experts_triton.choose_experts_backward(
            logits_TE, chosen_TK, counts_E, grad_weights_TK, grad_loss, split, rule.top_k,
            rule.sigmoid, rule.normalize, rule.scaling, rule.aux_loss_coef, rule.z_loss_coef,
        )  # fmt: skip
        wanted = wants_gradient(ctx, 0), wants_gradient(ctx, 1)
        gradients = _split_gradients if split else _gradients
        return *gradients(grad_logits, hidden_TD, weight_ED, wanted), None, None, None


class _Linear(torch.autograd.Function):
    """Keeps the operands as they are for backward, not their fp32 copies."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_ED):
        ctx.save_for_backward(hidden_TD, weight_ED)
        return _logits(hidden_TD, weight_ED)

    @staticmethod
    def backward(ctx, grad_TE):
        hidden_TD, weight_ED = ctx.saved_tensors
        return _gradients(grad_TE, hidden_TD, weight_ED, ctx.needs_input_grad)


def _logits(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    dtype = accumulation_dtype(hidden_TD)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        if _has_exact_products(hidden_TD, weight_ED):
            return _tensor_core_logits(hidden_TD, weight_ED)
        return functional.linear(hidden_TD.to(dtype), weight_ED.to(dtype))


def _tensor_core_logits(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """16-bit operands, fp32 logits, in pieces of at most 1024 of D that are added up in fp32.

    Products are exact, but tensor cores cut sums off where fp32 units round them: 1e-6 of the
    logits per 1024 of D, always towards zero (H200; fp32 units: 1e-7 to 6e-7 in all).
    """
    hidden_size = hidden_TD.shape[1]
    least = -(-hidden_size // 1024)
    pieces = next((n for n in range(least, 2 * least + 1) if hidden_size % (8 * n) == 0), 1)
    if pieces == 1:
        return torch.mm(hidden_TD, weight_ED.t(), out_dtype=torch.float32)
    hidden_nTd = hidden_TD.unflatten(1, (pieces, -1)).transpose(0, 1)
    weight_ndE = weight_ED.unflatten(1, (pieces, -1)).permute(1, 2, 0)
    return torch.bmm(hidden_nTd, weight_ndE, out_dtype=torch.float32).sum(0)


def _has_exact_products(hidden_TD: Tensor, weight_ED: Tensor) -> bool:
    """Whether the operands can be multiplied as they are, with an fp32 result."""
    narrow = hidden_TD.dtype == weight_ED.dtype and hidden_TD.element_size() == 2
    return narrow and hidden_TD.is_cuda


def _gradients(
    grad_TE: Tensor, hidden_TD: Tensor, weight_ED: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and weight, by products in the dtype of ``grad_TE``."""
    grad_hidden = grad_weight = None
    with torch.autocast(grad_TE.device.type, enabled=False):
        if wanted[0]:
            grad_hidden = (grad_TE @ weight_ED.to(grad_TE.dtype)).to(hidden_TD.dtype)
        if wanted[1]:
            grad_weight = (grad_TE.t() @ hidden_TD.to(grad_TE.dtype)).to(weight_ED.dtype)
    return grad_hidden, grad_weight


def _split_gradients(
    grad_T2E: Tensor, hidden_TD: Tensor, weight_ED: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """``_gradients`` by bf16 products: ``grad_T2E`` has high and low parts of the fp32 gradient.

    Together they have 16 bits: errors were 2e-6 to 9e-6 of the result (H200), where rounding it
    to bf16 has 2e-3. Not for fp16, in whose range small gradients have no such parts.
    """
    grad_hidden = grad_weight = None
    with torch.autocast(grad_T2E.device.type, enabled=False):
        if wanted[0]:
            grad_hidden = torch.mm(grad_T2E, torch.cat((weight_ED, weight_ED)))
        if wanted[1]:
            high_low = torch.mm(grad_T2E.t(), hidden_TD, out_dtype=torch.float32)
            high_ED, low_ED = high_low.chunk(2)
            grad_weight = torch.add(high_ED, low_ED, out=torch.empty_like(weight_ED))
    return grad_hidden, grad_weight
