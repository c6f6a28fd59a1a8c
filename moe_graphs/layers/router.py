"""The router, which chooses the experts of each token and their weights.

Everything here has static shapes and stays on the device: no ``.item()``, no branch on a tensor.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_graphs.kernels import RoutingRule, route
from moe_graphs.kernels.precision import accumulation_dtype
from moe_graphs.layers.model_config import MoEConfig
from moe_graphs.staged import record


@record
class Routing:
    """The router's choice for the tokens of a call.

    Attributes:
        weights_TK: fp32 factors of the chosen experts' outputs.
        experts_TK: int64 numbers of the chosen experts, distinct within a token.
        aux_loss: 0-dim fp32, load-balancing loss plus z-loss with their coefficients applied; add
            it to the loss.
        tokens_per_expert_E: int64, (token, expert) pairs of this call per expert.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    aux_loss: Tensor
    tokens_per_expert_E: Tensor


class TopKRouter(nn.Module):
    """Linear router with softmax or sigmoid scores; see ``MoEConfig`` for its options.

    Ties in the scores are broken the same way on every run: by the lowest expert number on CUDA, as
    ``torch.topk`` breaks them where ``kernels.route`` takes the plain torch path (CPU).

    Buffers, which change in place only: ``tokens_per_expert`` (int64) counts the (token, expert)
    pairs of all training forwards since the last ``update_expert_bias``. ``expert_bias`` (fp32) is
    there if configured.
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
        self.config, self.rule = config, rule_of(config)
        shape = (config.num_experts, hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        counts_E = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts_E)
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias_E if config.expert_bias else None)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, std: float = 0.02) -> None:
        """Draw normal weights, and zero the counter and the bias."""
        nn.init.normal_(self.weight, std=std)
        self.tokens_per_expert.zero_()
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    if TYPE_CHECKING:  # nn.Module's says Any

        def __call__(self, hidden_TD: Tensor, given_TK: Tensor | None = None) -> Routing: ...

    def forward(self, hidden_TD: Tensor, given_TK: Tensor | None = None) -> Routing:
        """Choose experts for tokens ``[T, D]``, or take those of ``given_TK`` (int64)."""
        if self.training and self.config.input_jitter:
            hidden_TD = _jitter(hidden_TD, self.config.input_jitter)
        weights_TK, experts_TK, aux_loss, counts_E = route(
            hidden_TD, self.weight, self.expert_bias, self.rule, given_TK
        )
        if self.training:
            self.tokens_per_expert.add_(counts_E)
        return Routing(weights_TK, experts_TK, aux_loss, counts_E)

    @torch.no_grad()
    def update_expert_bias(
        self, group: dist.ProcessGroup | None = None, *, skipped: Tensor | None = None
    ) -> None:
        """Zero the counter between steps, and move a configured bias towards balance.

        ``bias += rate * sign(mean(counts) - counts)``, in place and without a host sync.

        Args:
            group: the ranks whose counts are summed, so that all ranks keep the same bias. Under
                data or expert parallelism every rank must pass the same group.
            skipped: 0-dim, 1.0 or 0.0 on the device, the same on all ranks
                (``StepResult.overflowed``): if it is 1.0, only the counter is zeroed.

        Raises:
            ValueError: the bias is not fp32 any more; its steps would be lost in rounding.
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
            # E * (mean - counts) is a difference of whole numbers, so its sign is exact.
            excess_E = counts_E.sum() - counts_E * counts_E.numel()
            step_E = excess_E.sign().float()
            step_E = step_E if skipped is None else step_E * (1 - skipped)
            self.expert_bias.add_(step_E, alpha=self.config.bias_update_rate)
        self.tokens_per_expert.zero_()


def _jitter(hidden_TD: Tensor, amount: float) -> Tensor:
    noise = torch.empty_like(hidden_TD, dtype=accumulation_dtype(hidden_TD))
    return hidden_TD * noise.uniform_(1 - amount, 1 + amount)


def rule_of(config: MoEConfig) -> RoutingRule:
    return RoutingRule(
        top_k=config.top_k,
        sigmoid=config.score_function == "sigmoid",
        normalize=config.normalize_top_k,
        scaling=config.scaling_factor,
        num_groups=config.num_groups or 1,
        top_k_groups=config.top_k_groups or 1,
        aux_loss_coef=config.aux_loss_coef,
        z_loss_coef=config.z_loss_coef,
    )
