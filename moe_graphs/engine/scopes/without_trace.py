"""Running training steps so that nothing of them remains."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.preserve import preserved_hidden_state, preserved_values


@contextlib.contextmanager
def without_trace(
    model: nn.Module, backend: Backend, optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    """Parameters, their ``.grad``, buffers, random states and the optimizer stay as they are."""
    tensors = (*model.parameters(), *model.buffers())
    gradients = [(p, p.grad) for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict()) if optimizer is not None else None
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with preserved_values(tensors), preserved_hidden_state(backend.device, backend.generators):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if optimizer is not None:
            optimizer.load_state_dict(state)
