"""What our AdamW does that torch's does not: states of a dtype of their own, stochastic rounding,
averages of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_DTYPES = (None, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class UpdateOptions:
    """As in ``AdamW``'s documentation.

    Raises:
        ValueError: naming an option that has no such value.
    """

    state_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        if self.state_dtype not in _DTYPES:
            raise ValueError(
                f"state_dtype: {self.state_dtype} is none of torch.float32, torch.bfloat16 and "
                f"None, the parameter's"
            )
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay: {self.ema_decay} must be at least 0 and below 1")

    @property
    def are_torchs(self) -> bool:
        """Whether torch's own update has them, too."""
        return self == UpdateOptions()

    def dtype_of(self, name: str, parameter: Tensor) -> torch.dtype:
        """Of the state ``name``, which is none of steps. Averages are at least of fp32: bf16 has
        no room for what ``1 - ema_decay`` adds."""
        if name == "ema":
            return torch.promote_types(parameter.dtype, torch.float32)
        return self.state_dtype or parameter.dtype

    def complete(self, state: dict[str, Any], parameter: Tensor) -> None:
        """Makes what a first step starts from; where there have been steps without an average,
        that starts from the present parameter."""
        averages = [] if self.ema_decay is None else ["ema"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq", *averages):
                dtype = self.dtype_of(name, parameter)
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        for name in averages:
            if name not in state:
                state[name] = parameter.detach().to(self.dtype_of(name, parameter), copy=True)

    def taken(self, saved: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Of a state that was saved, what torch would cast to the parameter's dtype."""
        names = [name for name in ("exp_avg", "exp_avg_sq", "ema") if name in saved]
        return {
            name: saved[name].to(device=parameter.device, dtype=self.dtype_of(name, parameter))
            for name in names
        }
