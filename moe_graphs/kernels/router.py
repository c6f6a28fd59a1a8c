"""From tokens to experts and weights.

On CUDA a layer's router is one node of autograd with 10 to 13 kernels for forward and backward; the
plain torch path says the same in 66 to 91.

Shapes: T tokens, D model, E experts, K top-k, N groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.ops import wants_gradient
from moe_graphs.kernels.reference import accumulation_dtype

_HAS_FP32_OUTPUT = hasattr(torch.ops.aten.mm, "dtype")  # torch 2.8


class RoutingRule(NamedTuple):
    """The router's options; ``MoEConfig`` says what they mean. A tuple, the arguments of the op.

    Attributes:
        sigmoid: scores are the sigmoid of the logits, otherwise their softmax.
        num_groups: 1 for no groups.
    """

    top_k: int
    sigmoid: bool
    normalize: bool
    scaling: float
    num_groups: int
    top_k_groups: int
    aux_loss_coef: float
    z_loss_coef: float


class Choice(NamedTuple):
    """Attributes:
    weights_TK: fp32 (fp64 for fp64 operands).
    experts_TK: int64, distinct within a token, best first; the lowest number wins a tie in the
        kernels, whoever ``torch.topk`` prefers in plain torch.
    aux_loss: 0-dim, load-balancing loss plus z-loss, coefficients applied.
    counts_E: int64, pairs per expert.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    aux_loss: Tensor
    counts_E: Tensor


def route(hidden_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, rule: RoutingRule) -> Choice:
    """Scores ``hidden @ weight.T`` in fp32, whatever the operands and autocast say.

    ``bias_E`` takes part in the choice and in nothing else. Static shapes, no host sync. The
    kernels take up to 512 experts and 32 per token; beyond that CUDA runs the plain torch path.
    """
    if has_kernel(hidden_TD) and weight_ED.shape[0] <= 512 and rule.top_k <= 32:
        return Choice(*_Route.apply(hidden_TD, weight_ED, bias_E, rule))
    return choose(_Linear.apply(hidden_TD, weight_ED), bias_E, rule)


def choose(logits_TE: Tensor, bias_E: Tensor | None, rule: RoutingRule) -> Choice:
    """The part behind the logits in plain torch: what the kernels are held against."""
    scores_TE = logits_TE.sigmoid() if rule.sigmoid else logits_TE.softmax(-1)
    biased_TE = scores_TE.detach()
    if bias_E is not None:
        biased_TE = biased_TE + bias_E
    if rule.num_groups > 1:
        biased_TE = _mask_groups(biased_TE, rule)
    experts_TK = biased_TE.topk(rule.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if rule.normalize:
        # The small constant is for sigmoid scores that are all zero.
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    if rule.scaling != 1.0:
        weights_TK = weights_TK * rule.scaling
    counts_E = _count(experts_TK, logits_TE.shape[1])
    return Choice(weights_TK, experts_TK, _aux_loss(logits_TE, scores_TE, counts_E, rule), counts_E)


class _Route(torch.autograd.Function):
    """All of it, for tensors that have kernels. Keeps the operands, the logits and the ranks."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_ED, bias_E, rule):
        from moe_graphs.kernels import router_triton

        logits_TE = _logits(hidden_TD, weight_ED)
        *choice, ranks_TE = router_triton.choose_experts(logits_TE, bias_E, *rule)
        _, experts_TK, _, counts_E = choice
        ctx.save_for_backward(hidden_TD, weight_ED, logits_TE, ranks_TE, counts_E)
        ctx.mark_non_differentiable(experts_TK, counts_E)
        ctx.set_materialize_grads(False)
        ctx.rule = rule
        return tuple(choice)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_weights_TK, _experts, grad_loss, _counts):
        from moe_graphs.kernels import router_triton

        hidden_TD, weight_ED, logits_TE, ranks_TE, counts_E = ctx.saved_tensors
        if grad_weights_TK is None and grad_loss is None:
            return None, None, None, None
        rule = ctx.rule
        split = _has_exact_products(hidden_TD, weight_ED) and hidden_TD.dtype == torch.bfloat16
        grad_logits = router_triton.choose_experts_backward(
            logits_TE, ranks_TE, counts_E, grad_weights_TK, grad_loss, split, rule.top_k,
            rule.sigmoid, rule.normalize, rule.scaling, rule.aux_loss_coef, rule.z_loss_coef,
        )  # fmt: skip
        wanted = wants_gradient(ctx, 0), wants_gradient(ctx, 1)
        gradients = _split_gradients if split else _gradients
        return *gradients(grad_logits, hidden_TD, weight_ED, wanted), None, None


class _Linear(torch.autograd.Function):
    """Keeps the operands as they are for backward, not their fp32 copies."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_ED):
        ctx.save_for_backward(hidden_TD, weight_ED)
        return _logits(hidden_TD, weight_ED)

    @staticmethod
    def backward(ctx, grad_TE):
        return _gradients(grad_TE, *ctx.saved_tensors, ctx.needs_input_grad)


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
    return narrow and hidden_TD.is_cuda and _HAS_FP32_OUTPUT


def _gradients(
    grad_TE: Tensor, hidden_TD: Tensor, weight_ED: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Of hidden and weight, by products in the dtype of ``grad_TE``."""
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
    """The same by bf16 products: ``grad_T2E`` is high and low parts of the fp32 gradient.

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


def _mask_groups(scores_TE: Tensor, rule: RoutingRule) -> Tensor:
    """Leaves only the best groups of a token (arXiv 2412.19437, section 2.1.2).

    A group is as good as the sum of its two best scores.
    """
    scores_TNe = scores_TE.unflatten(1, (rule.num_groups, -1))
    best_two = scores_TNe.topk(min(2, scores_TNe.shape[-1]), dim=-1).values
    chosen_TN = best_two.sum(-1).topk(rule.top_k_groups, dim=-1).indices
    group_N = torch.arange(rule.num_groups, device=scores_TE.device)
    kept_TN = (chosen_TN.unsqueeze(-1) == group_N).any(1)
    return scores_TNe.masked_fill(~kept_TN.unsqueeze(-1), float("-inf")).flatten(1)


def _aux_loss(logits_TE: Tensor, scores_TE: Tensor, counts_E: Tensor, rule: RoutingRule) -> Tensor:
    num_tokens, num_experts = logits_TE.shape
    loss = logits_TE.new_zeros(())
    if rule.aux_loss_coef:
        probs_TE = scores_TE
        if rule.sigmoid:
            probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        # E * sum_e f_e * P_e / K: f_e tokens per expert and token, P_e mean probability.
        scale = rule.aux_loss_coef * num_experts / (rule.top_k * max(num_tokens, 1))
        loss = loss + scale * (counts_E * probs_TE.mean(0)).sum()
    if rule.z_loss_coef:
        loss = loss + rule.z_loss_coef * logits_TE.logsumexp(-1).square().mean()
    return loss


def _count(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Pairs per expert. A mask and a sum: bincount synchronises, scatter_add uses atomics."""
    chosen_TE = experts_TK.new_zeros(experts_TK.shape[0], num_experts, dtype=torch.bool)
    return chosen_TE.scatter_(1, experts_TK, True).sum(0)
