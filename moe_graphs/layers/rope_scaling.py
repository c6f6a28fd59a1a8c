"""Rotary frequencies for sequences longer than those that a model was first trained with.

Shapes: Q rotated dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071), with the two magnitudes of DeepSeek-V3.

    Frequencies that turn more than ``beta_fast`` times within the original length stay as they
    are. Frequencies that turn less than ``beta_slow`` times are divided by ``factor``. Between the
    two is a ramp.

    Attributes:
        original_max_sequence_length: length of the sequences that the model was first trained with.
        mscale, mscale_all_dim: if both are not zero, the tables are multiplied by the ratio of the
            two magnitudes, otherwise by the magnitude of 1.
    """

    factor: float
    original_max_sequence_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "factor", "original_max_sequence_length", "beta_fast", "beta_slow")

    @property
    def table_factor(self) -> float:
        """Factor of cosines and sines."""
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor of latent attention's scores, besides ``1 / sqrt(Q)``."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def scaled(self, frequency_Q: Tensor, theta: float) -> Tensor:
        """The frequencies ``theta ** (-2 i / Q)`` as this scaling has them."""
        pairs = frequency_Q.numel()
        first, last = (
            pairs * math.log(self.original_max_sequence_length / (turns * 2 * math.pi))
            for turns in (self.beta_fast, self.beta_slow)
        )
        low = max(math.floor(first / math.log(theta)), 0)
        high = min(math.ceil(last / math.log(theta)), 2 * pairs - 1)
        index_Q = torch.arange(pairs, dtype=frequency_Q.dtype, device=frequency_Q.device)
        ramp_Q = ((index_Q - low) / max(high - low, 0.001)).clamp(0, 1)
        return frequency_Q * (1 - ramp_Q) + frequency_Q / self.factor * ramp_Q

    def _magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Scaling of Llama 3.1 (arXiv 2407.21783): long waves are stretched by ``factor``.

    Attributes:
        low_freq_factor: waves longer than the original length divided by this number are long.
        high_freq_factor: waves shorter than the original length divided by this number are short
            and stay as they are. Between the two is a ramp.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_sequence_length: int

    def __post_init__(self) -> None:
        check_positive(self, "factor", "low_freq_factor", "original_max_sequence_length")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor "
                f"({self.low_freq_factor})"
            )

    @property
    def table_factor(self) -> float:
        return 1.0

    @property
    def softmax_factor(self) -> float:
        return 1.0

    def scaled(self, frequency_Q: Tensor, theta: float) -> Tensor:
        """The frequencies ``theta ** (-2 i / Q)`` as this scaling has them."""
        turns_Q = self.original_max_sequence_length * frequency_Q / (2 * math.pi)
        between = self.high_freq_factor - self.low_freq_factor
        kept_Q = ((turns_Q - self.low_freq_factor) / between).clamp(0, 1)
        return frequency_Q * kept_Q + frequency_Q / self.factor * (1 - kept_Q)


def check_positive(config: object, *names: str) -> None:
    """Raise a ``ValueError`` for the first of these fields that is not above 0."""
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be positive, got {getattr(config, name)}")
