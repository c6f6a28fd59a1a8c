"""A whole step as one graph trains bit for bit like the eager step."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from full_iterations import Run, batches, optimizer_of, train
from moe_graphs.capture.full_iteration import FullIteration
from training_runs import DEVICES, Trace, tiny_model

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("layers", ["dense", "moe", "mixed"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("inside", [True, False], ids=["optimizer inside", "optimizer outside"])
def test_twenty_steps_are_bitwise_eager(device, layers, microbatches, inside):
    """Dropout, jitter, clipping and a rate that changes every step; validation in between."""
    options = dict(layers=layers, microbatches=microbatches, inside=inside)
    expected, _ = train(Run(device, graphed=False, **options), steps=20)
    run = Run(device, graphed=True, **options)
    found, _ = train(run, steps=20)
    found.assert_equal(expected)
    report = run.step.report()
    assert (report.state, report.captures, report.replayed) == ("captured", 1, 17)
    assert report.eager_calls == {"warmup": 3}
    assert report.kernels is None or report.kernels > 50
    assert run.validate.report().replayed > 2
