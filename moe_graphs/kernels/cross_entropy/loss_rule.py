"""The rule by which a row's loss follows from its logits, besides plain cross entropy.

Shapes: N rows (tokens), V columns that are here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from moe_graphs.kernels.precision import accumulation_dtype


@dataclass(frozen=True)
class LossRule:
    """The rule by which a row's loss follows from its logits ``x``; by default their cross entropy.

        y = logit_cap * tanh(logit_scale * x / logit_cap), without a cap logit_scale * x
        loss = (1 - label_smoothing) * (logsumexp(y) - y[target])
             + label_smoothing * (logsumexp(y) - mean(y))
             + z_loss * logsumexp(y) ** 2

    Attributes:
        logit_scale: factor of the logits (Cohere's ``logit_scale``, 1 / Granite's
            ``logits_scaling``).
        logit_cap: soft cap (Gemma 2's ``final_logit_softcapping``).
        label_smoothing: share of the loss that all columns have alike, as in torch.
        z_loss: coefficient of the squared logsumexp (PaLM, arXiv 2204.02311: 1e-4).
    """

    logit_scale: float = 1.0
    logit_cap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale: {self.logit_scale} must be finite")
        if self.logit_cap is not None and not 0 < self.logit_cap < math.inf:
            raise ValueError(f"logit_cap: {self.logit_cap} must be above 0, or None for no cap")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: {self.label_smoothing} must be in [0, 1)")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss: {self.z_loss} must be at least 0")

    @property
    def is_plain(self) -> bool:
        return self == PLAIN

    def numbers(self, columns: int) -> list[float]:
        """The rule as kernels take it. ``columns``: of all ranks together."""
        alike = self.label_smoothing / columns
        rule = self.logit_scale, self.logit_cap or 0, self.label_smoothing, alike, self.z_loss
        return [float(number) for number in rule]

    def applied(self, logits: Tensor) -> Tensor:
        """``y`` in fp32 (fp64 for fp64 logits)."""
        logits = logits.to(accumulation_dtype(logits))
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.logit_cap is None:
            return logits
        return self.logit_cap * (logits / self.logit_cap).tanh()

    def slope(self, applied: Tensor) -> Tensor | float:
        """The derivative of ``y``, given ``y``."""
        if self.logit_cap is None:
            return self.logit_scale
        return self.logit_scale * (1 - (applied / self.logit_cap).square())

    def row_losses(self, losses_N: Tensor, logsumexp_N: Tensor, mean_N: Tensor | None) -> Tensor:
        """The losses, given the cross entropy of ``y``, its logsumexp and its mean.

        Rows that do not count have no meaning here. The mean is read for label smoothing only.
        """
        if self.label_smoothing:
            assert mean_N is not None
            losses_N = losses_N.lerp(logsumexp_N - mean_N, self.label_smoothing)
        if self.z_loss:
            losses_N = losses_N + self.z_loss * logsumexp_N.square()
        return losses_N


PLAIN = LossRule()
"""Cross entropy of the logits as they are."""
