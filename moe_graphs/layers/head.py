"""The output head of a language model: logits, or their cross entropy without the logits.

Shapes: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from moe_graphs.kernels import linear_cross_entropy
from moe_graphs.kernels.cross_entropy.loss_rule import PLAIN, LossRule


class Head(nn.Linear):
    """Projection onto the vocabulary, without bias.

    With targets it returns the loss. The logits are then computed chunk by chunk and never whole.
    """

    def __init__(self, hidden_size: int, vocab_size: int, **factory: object) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, **factory)

    def forward(
        self,
        hidden_BSD: Tensor,
        targets_BS: Tensor | None = None,
        reduction: str = "mean",
        rule: LossRule = PLAIN,
    ) -> Tensor:
        """Compute logits ``[B, S, V]``, or the loss in fp32 and in nats.

        Args:
            targets_BS: int64; targets of -100 do not count.
            reduction: "mean" over the targets that count, "sum" or "none" (``[B * S]``).
            rule: what the loss is besides cross entropy; logits that are returned know none of it.
        """
        if targets_BS is None:
            return functional.linear(hidden_BSD, self.weight)
        rows_ND, targets_N = hidden_BSD.flatten(0, -2), targets_BS.flatten()
        return linear_cross_entropy(rows_ND, self.weight, targets_N, reduction=reduction, rule=rule)
