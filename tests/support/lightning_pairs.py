"""Trainings under Lightning, without and with graphs of whole steps, that must not differ."""

from __future__ import annotations

import contextlib
import re
import warnings

import pytest
import torch

from lightning_runs import Regression, assert_same, fit, pl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from moe_graphs.integrations.lightning import GraphWholeSteps


def halve(module: pl.LightningModule) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def both(
    folder,
    make=Regression,
    callbacks=lambda: [],
    says=None,
    warmup_steps=2,
    device="cpu",
    **options,
):
    """Trains without and with graphs, and compares. Returns the report of each graph.

    says: what is to be warned of, once; nothing is if it is None.
    """
    usual, _ = fit(folder, device, *callbacks(), make=make, **options)
    callback = GraphWholeSteps(warmup_steps=warmup_steps)
    expected = contextlib.nullcontext([])
    if says is not None:
        expected = pytest.warns(UserWarning, match=re.compile(says, re.DOTALL))
    with expected as said:
        graphed, _ = fit(folder, device, callback, *callbacks(), make=make, **options)
    assert sum("GraphWholeSteps" in str(each.message) for each in said) <= 1
    assert_same(usual, graphed)
    return callback.reports


def all_replayed(reports) -> bool:
    return all(r.matched > 0 and r.eager_calls.keys() == {"warmup"} for r in reports)


def fused(lr=0.01, schedule=None, kind=torch.optim.AdamW, base=Regression, **options):
    """A training whose update can be in the graph. A list of one rate stands for a tensor."""

    def configure_optimizers(self):
        rate = torch.tensor(lr[0], device=self.device) if isinstance(lr, list) else lr
        if kind is torch.optim.AdamW:
            options["capturable"] = True
        optimizer = kind(self.parameters(), lr=rate, fused=True, **options)
        if schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

    return type("Fused", (base,), {"configure_optimizers": configure_optimizers})


class HalvesAfterBackward(Regression):
    def on_after_backward(self):
        halve(self)


class StepsItself(Regression):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


class Halves(pl.Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._halve)

    def _halve(self, trainer, pl_module, *_):
        halve(pl_module)


def plain_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
