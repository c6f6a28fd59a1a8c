"""Capturing before training starts, on steps that leave no trace."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

from moe_graphs.config import GraphConfig
from moe_graphs.engine.backends.base import Backend
from moe_graphs.engine.preserve import preserved_rng, preserved_values
from moe_graphs.engine.scopes.graphs import Graphs, graph
from moe_graphs.errors import GraphError


def capture(
    model: nn.Module,
    step: Callable[[], object],
    config: GraphConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Graphs:
    """Like ``graph``, but runs ``step()`` itself, ``warmup_steps`` times, and captures.

    ``step`` does the forwards and backwards of one training step. Afterwards parameters, their
    ``.grad``, buffers, random states and the optimizer are as they were before.

    Raises:
        GraphError: if ``step`` updates parameters and ``optimizer`` is not given.
        CaptureError: if the capture fails; the model is eager and untouched then.
    """
    graphs = graph(model, config)
    try:
        with _without_trace(model, graphs.backend, optimizer):
            versions = [parameter._version for parameter in model.parameters()]
            for _ in range(graphs.config.warmup_steps):
                with graphs.step():
                    step()
            updated = versions != [parameter._version for parameter in model.parameters()]
            if updated and optimizer is None:
                raise GraphError(
                    "step() updates parameters: pass optimizer=..., so that its state can be put "
                    "back, or leave the update out of step()"
                )
    except BaseException:
        graphs.release()
        raise
    return graphs


@contextlib.contextmanager
def _without_trace(
    model: nn.Module, backend: Backend, optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    tensors = (*model.parameters(), *model.buffers())
    gradients = [(p, p.grad) for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict()) if optimizer is not None else None
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with preserved_values(tensors), preserved_rng(backend.device, backend.generators):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if optimizer is not None:
            optimizer.load_state_dict(state)
