"""The choice of experts in plain torch: what the kernels are held against.

Shapes: T tokens, E experts, K top-k, N groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor


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
    """The experts and weights of all tokens, with the router's loss.

    Attributes:
        weights_TK: fp32 (fp64 for fp64 operands).
        experts_TK: int64, distinct within a token, best first. In the kernels the lowest number
            wins a tie; in plain torch the one that ``torch.topk`` prefers.
        aux_loss: 0-dim, load-balancing loss plus z-loss, coefficients applied.
        counts_E: int64, pairs per expert.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    aux_loss: Tensor
    counts_E: Tensor


def choose(
    logits_TE: Tensor, bias_E: Tensor | None, rule: RoutingRule, given_TK: Tensor | None = None
) -> Choice:
    """The choice, from the logits on, in plain torch: the kernels are tested against it.

    ``given_TK`` (int64) is a choice that was made before; weights and losses are computed for it.
    """
    scores_TE = logits_TE.sigmoid() if rule.sigmoid else logits_TE.softmax(-1)
    if given_TK is None:
        experts_TK = _best(scores_TE.detach(), bias_E, rule)
        weights_TK = scores_TE.gather(1, experts_TK)
    else:
        weights_TK, experts_TK = take_given(scores_TE, given_TK)
    if rule.normalize:
        # The small constant is for sigmoid scores that are all zero.
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    if rule.scaling != 1.0:
        weights_TK = weights_TK * rule.scaling
    counts_E = pairs_per_expert(experts_TK, logits_TE.shape[1])
    return Choice(weights_TK, experts_TK, _aux_loss(logits_TE, scores_TE, counts_E, rule), counts_E)


def take_given(scores_TE: Tensor, given_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of experts that were chosen before, and a copy of the choice, as ``topk``."""
    experts_TK = given_TK.clone()
    # The saved indices have three dimensions: torch's checkpoint raises an error if it runs this
    # again without the given choice.
    return scores_TE.unsqueeze(0).gather(2, experts_TK.unsqueeze(0)).squeeze(0), experts_TK


def _best(scores_TE: Tensor, bias_E: Tensor | None, rule: RoutingRule) -> Tensor:
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.num_groups > 1:
        biased_TE = _mask_groups(biased_TE, rule)
    return biased_TE.topk(rule.top_k, dim=-1).indices


def _mask_groups(scores_TE: Tensor, rule: RoutingRule) -> Tensor:
    """Leaves only the best groups of a token (arXiv 2412.19437, section 2.1.2).

    A group is as good as the sum of its two best scores.
    """
    scores_TNe = rearrange(scores_TE, "t (n e) -> t n e", n=rule.num_groups)
    best_two = scores_TNe.topk(min(2, scores_TNe.shape[-1]), dim=-1).values
    chosen_TN = best_two.sum(-1).topk(rule.top_k_groups, dim=-1).indices
    group_N = torch.arange(rule.num_groups, device=scores_TE.device)
    kept_TN = (chosen_TN.unsqueeze(-1) == group_N).any(1)
    masked_TNe = scores_TNe.masked_fill(~kept_TN.unsqueeze(-1), float("-inf"))
    return rearrange(masked_TNe, "t n e -> t (n e)")


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


def pairs_per_expert(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Pairs per expert. A mask and a sum: bincount synchronises, scatter_add uses atomics."""
    chosen_TE = experts_TK.new_zeros(experts_TK.shape[0], num_experts, dtype=torch.bool)
    return chosen_TE.scatter_(1, experts_TK, True).sum(0)
