"""A moving average of the parameters that a graph can update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class ExponentialMovingAverage:
    """Moving average of parameters: ``average = decay * average + (1 - decay) * parameter``.

    Skipped steps leave the averages alone. Buffers (BatchNorm's statistics) are not averaged.

    Args:
        parameters: averaged in this order, starting from their present values.
        dtype: dtype of the averages. bf16 would lose the small additions of ``1 - decay``.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        decay: float = 0.999,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay: {decay} must be at least 0 and below 1")
        if isinstance(parameters, nn.Module):
            raise ValueError(
                f"parameters: got a module ({type(parameters).__name__}): pass its parameters()"
            )
        self.decay = decay
        self.parameters = list(parameters)
        if not self.parameters:
            raise ValueError("parameters: none were given, so there is nothing to average")
        self.averages = [p.detach().to(dtype, copy=True) for p in self.parameters]

    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None) -> None:
        """Update the averages, unless ``found_inf`` is 1.0."""
        device = self.averages[0].device
        weight = torch.full((), 1 - self.decay, dtype=torch.float32, device=device)
        if found_inf is not None:
            weight = weight * (1 - found_inf)
        weights = {dtype: weight.to(dtype) for dtype in {a.dtype for a in self.averages}}
        torch._foreach_lerp_(
            self.averages,
            [p.to(a.dtype) for p, a in zip(self.parameters, self.averages, strict=True)],
            [weights[average.dtype] for average in self.averages],
        )

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the parameters hold the averages, at the addresses that graphs know."""
        with torch.no_grad():
            trained = [p.detach().clone() for p in self.parameters]
            torch._foreach_copy_(self.parameters, self.averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, trained)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Copy the averages, in the order of the parameters."""
        return {"averages": [average.clone() for average in self.averages]}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Copy saved averages in place, so that graphs go on with them."""
        saved = [tuple(average.shape) for average in state["averages"]]
        wanted = [tuple(average.shape) for average in self.averages]
        if saved != wanted:
            raise ValueError(
                f"averages: {len(saved)} tensors that do not match the {len(wanted)} parameters: "
                f"average the parameters in the order in which they were saved"
            )
        for average, value in zip(self.averages, state["averages"], strict=True):
            average.copy_(value)
