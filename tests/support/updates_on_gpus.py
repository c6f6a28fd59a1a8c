"""Common parts of tests of updates on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def set_gradients(held: Sequence[Tensor], seed: int, factor: float = 1.0) -> None:
    """Numbers that bf16 holds, at the addresses where gradients are."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for p in held:
        numbers = torch.randn(p.shape, generator=generator, device="cuda").bfloat16()
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(factor * numbers)


def everything(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of the parameters, then of their states by parameter and name."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    values = [v for p in held for _, v in sorted(optimizer.state[p].items())]
    return [x.detach().clone() for x in (*held, *values)]
