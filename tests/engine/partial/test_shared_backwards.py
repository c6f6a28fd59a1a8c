"""Backwards of several microbatches in flight work in one pool, by turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import moe_graphs
from moe_graphs import GraphConfig
from moe_graphs.engine.partial.slots import BackwardPool
from training_runs import DEVICES
from two_scopes import build, data, scopes, update

# The orders of the first steps, and of the last two, in which autograd may hold one microbatch's
# gradients while others come.
ORDERS = {
    "gpipe": ("FFFBBB", "FFFS"),
    "1f1b": ("FFBFBB", "FFBFS"),
    "last in, first out": ("FFFRRR", "FFFRRR"),
}


def train(
    device: str, orders: tuple[str, str], graph: Callable
) -> tuple[list[Tensor], moe_graphs.Graphs]:
    """Trains six steps, every other one without zeroing, so that gradients are added to."""
    model, found = build(device), []
    graphs = graph(model)
    for step in range(6):
        if step % 2 == 0:
            model.zero_grad()
        with graphs.step():
            losses: list[Tensor] = []
            for action in orders[step >= 4]:
                if action == "F":
                    losses.append(model(data(device)).square().mean())
                elif action == "S":
                    sum(losses).backward()
                else:
                    losses.pop(0 if action == "B" else -1).backward()
        found += [p.grad.clone() for p in model.parameters()]
        update(model)
    return [*found, *(p.detach().clone() for p in model.parameters())], graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ORDERS)
def test_they_are_eagers_bit_for_bit(device, order, monkeypatch):
    def eager(model):
        return moe_graphs.graph(model, GraphConfig(impl="none"))

    def graphed(model):
        graphs = moe_graphs.graph(model, scopes(warmup_steps=2))
        if device == "cpu":
            monkeypatch.setattr(BackwardPool, "begin", lambda self: spoil(graphs))
        return graphs

    spoiled = []

    def spoil(graphs):
        """Overwrites the results of the backward before: on a GPU others use that memory now."""
        for site in graphs.captured.sites if graphs.captured else ():
            for gradient in site.backward.gradients if site.backward else ():
                if gradient is not None:
                    spoiled.append(gradient.fill_(torch.nan))

    expected, _ = train(device, ORDERS[order], eager)
    found, graphs = train(device, ORDERS[order], graphed)
    assert all(map(torch.equal, found, expected))
    report = graphs.report()
    assert set(report.eager_calls) == {"warmup"}, report
    assert report.slots[0] > 1
    assert len({id(slot.backward_pool) for slot in graphs.captured.slots}) == 1
    assert bool(spoiled) == (device == "cpu")
    if device == "cuda":
        pools = {slot.pool for slot in graphs.captured.slots}
        assert len({*pools, graphs.captured.slots[0].backward_pool.pool}) == len(pools) + 1
    graphs.release()
