"""The router: which experts each token goes to, and with what weight.

Everything here has static shapes and stays on the device: no ``.item()``, no branch on a tensor.

Shapes: T tokens, D model, E experts, K top-k, N groups of experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moe_graphs.capture.interrupt import record
from moe_graphs.kernels.reference import accumulation_dtype
from moe_graphs.layers.config import MoEConfig


@record
class Routing:
    """Attributes:
    weights_TK: fp32, what each chosen expert's output is multiplied by.
    experts_TK: int64, distinct within a token.
    aux_loss: 0-dim fp32, load-balancing loss plus z-loss, coefficients applied; add it to the loss.
    tokens_per_expert_E: int64, pairs of this call per expert.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    aux_loss: Tensor
    tokens_per_expert_E: Tensor


class TopKRouter(nn.Module):
    """Linear router with softmax or sigmoid scores; see ``MoEConfig`` for its options.

    Ties in the scores are broken as ``torch.topk`` breaks them: the same way on every run of a
    device, not the same on CPU and CUDA.

    Buffers: ``tokens_per_expert`` (int64) counts the pairs of all training forwards since the
    last ``update_expert_bias``; ``expert_bias`` (fp32), if configured. Both change in place only.
    """

    tokens_per_expert: Tensor
    expert_bias: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.num_experts, hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        counts_E = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts_E)
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias_E if config.expert_bias else None)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, std: float = 0.02) -> None:
        """Normal weights, zero counter and bias."""
        nn.init.normal_(self.weight, std=std)
        self.tokens_per_expert.zero_()
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, hidden_TD: Tensor) -> Routing:
        config = self.config
        if self.training and config.input_jitter:
            hidden_TD = _jitter(hidden_TD, config.input_jitter)
        logits_TE = _RouterLinear.apply(hidden_TD, self.weight)
        scores_TE = logits_TE.sigmoid() if self._is_sigmoid else logits_TE.softmax(-1)
        experts_TK = self._choose(scores_TE.detach())
        weights_TK = scores_TE.gather(1, experts_TK)
        if config.normalize_top_k:
            # The small constant is for sigmoid scores that are all zero.
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if config.scaling_factor != 1.0:
            weights_TK = weights_TK * config.scaling_factor
        counts_E = _count(experts_TK, config.num_experts)
        if self.training:
            self.tokens_per_expert.add_(counts_E)
        aux_loss = self._aux_loss(logits_TE, scores_TE, counts_E)
        return Routing(weights_TK, experts_TK, aux_loss, counts_E)

    @torch.no_grad()
    def update_expert_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Between steps: zeroes the counter, and moves a configured bias towards balance.

        ``bias += rate * sign(mean(counts) - counts)``, in place and without a host sync. Under
        data or expert parallelism every rank must pass the same ``group``: counts are summed
        over it, so that all ranks keep the same bias.

        Raises:
            ValueError: the bias is no longer fp32, in which its steps would round to nothing.
        """
        if self.expert_bias is not None:
            if self.expert_bias.dtype != torch.float32:
                raise ValueError(
                    f"expert_bias must stay float32, got {self.expert_bias.dtype}: build the "
                    f"model with dtype=... instead of casting it with model.to(dtype)"
                )
            counts_E = self.tokens_per_expert
            if group is not None:
                dist.all_reduce(counts_E, group=group)
            # mean - counts, times E to stay in whole numbers: the sign is exact.
            excess_E = counts_E.sum() - counts_E * counts_E.numel()
            self.expert_bias.add_(excess_E.sign().float(), alpha=self.config.bias_update_rate)
        self.tokens_per_expert.zero_()

    @property
    def _is_sigmoid(self) -> bool:
        return self.config.score_function == "sigmoid"

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """The best ``top_k`` experts by biased score, best first."""
        if self.expert_bias is not None:
            scores_TE = scores_TE + self.expert_bias
        if self.config.num_groups is not None:
            scores_TE = self._mask_groups(scores_TE)
        return scores_TE.topk(self.config.top_k, dim=-1).indices

    def _mask_groups(self, scores_TE: Tensor) -> Tensor:
        """Leaves only the best groups of a token (arXiv 2412.19437, section 2.1.2).

        A group is as good as the sum of its two best scores.
        """
        scores_TNe = scores_TE.unflatten(1, (self.config.num_groups, -1))
        best_two = scores_TNe.topk(min(2, scores_TNe.shape[-1]), dim=-1).values
        chosen_TN = best_two.sum(-1).topk(self.config.top_k_groups, dim=-1).indices
        group_N = torch.arange(self.config.num_groups, device=scores_TE.device)
        kept_TN = (chosen_TN.unsqueeze(-1) == group_N).any(1)
        return scores_TNe.masked_fill(~kept_TN.unsqueeze(-1), float("-inf")).flatten(1)

    def _aux_loss(self, logits_TE: Tensor, scores_TE: Tensor, counts_E: Tensor) -> Tensor:
        config, (num_tokens, num_experts) = self.config, logits_TE.shape
        loss = logits_TE.new_zeros(())
        if config.aux_loss_coef:
            probs_TE = scores_TE
            if self._is_sigmoid:
                probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
            # E * sum_e f_e * P_e / K: f_e tokens per expert and token, P_e mean probability.
            scale = config.aux_loss_coef * num_experts / (config.top_k * max(num_tokens, 1))
            loss = loss + scale * (counts_E * probs_TE.mean(0)).sum()
        if config.z_loss_coef:
            loss = loss + config.z_loss_coef * logits_TE.logsumexp(-1).square().mean()
        return loss


class _RouterLinear(torch.autograd.Function):
    """``hidden @ weight.T`` in fp32, whatever the operands and autocast say.

    Keeps the operands as they are for backward, not their fp32 copies.
    """

    @staticmethod
    def forward(ctx, hidden_TD, weight_ED):
        ctx.save_for_backward(hidden_TD, weight_ED)
        dtype = accumulation_dtype(hidden_TD)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            return functional.linear(hidden_TD.to(dtype), weight_ED.to(dtype))

    @staticmethod
    def backward(ctx, grad_TE):
        hidden_TD, weight_ED = ctx.saved_tensors
        grad_hidden = grad_weight = None
        with torch.autocast(grad_TE.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_hidden = (grad_TE @ weight_ED.to(grad_TE.dtype)).to(hidden_TD.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (grad_TE.t() @ hidden_TD.to(grad_TE.dtype)).to(weight_ED.dtype)
        return grad_hidden, grad_weight


def _jitter(hidden_TD: Tensor, amount: float) -> Tensor:
    noise = torch.empty_like(hidden_TD, dtype=accumulation_dtype(hidden_TD))
    return hidden_TD * noise.uniform_(1 - amount, 1 + amount)


def _count(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Pairs per expert. A mask and a sum: bincount synchronises, scatter_add uses atomics."""
    chosen_TE = experts_TK.new_zeros(experts_TK.shape[0], num_experts, dtype=torch.bool)
    return chosen_TE.scatter_(1, experts_TK, True).sum(0)
