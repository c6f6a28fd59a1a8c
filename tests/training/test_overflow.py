"""Rows without room: no rank updates, the step is counted, and its second run trains as usual."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_graphs
from distributed import run_distributed
from full_iterations import optimizer_of
from moe_graphs import GraphConfig
from moe_graphs.dispatch import make_dispatcher
from moe_graphs.dispatch.local_rows import room_for_rows
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.layers import LanguageModel
from moe_graphs.training.device_step import DeviceStep, StepResult
from moe_graphs.training.ema import ExponentialMovingAverage
from moe_graphs.training.grad_scaler import GradScaler
from moe_graphs.training.overflow import other_rows_factor
from training_runs import SEQUENCE, Trace, loss_of, microbatches, tiny_model

STEPS, SKEWED = 7, (1, 4, 5)  # in skewed steps all tokens go to experts of one rank
SMALL, LARGE = 1.5, 2.0


def _skew(model: LanguageModel, index: int) -> None:
    """Set the routers' biases between steps.

    In skewed steps the bias sends all tokens to two experts of the first or of the last rank.
    """
    for layer in model.layers:
        bias = layer.moe.router.expert_bias
        bias.zero_()
        if index in SKEWED:
            first = 0 if index % 2 else 2
            bias[first : first + 2] = 10.0


def _make_step(model: LanguageModel, step: DeviceStep) -> Callable[[dict], tuple]:
    def train(batch: dict) -> tuple:
        outputs = [loss_of(model, tokens) for tokens in batch["tokens"]]
        for loss, _ in outputs:
            step.scale(loss).backward()
        for name, parameter in model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(parameter.grad)
        dropped = sum(output.dropped_tokens for _, output in outputs)
        result = step(overflow=dropped)
        model.update_expert_bias(dist.group.WORLD, skipped=result.overflowed)
        return sum(loss for loss, _ in outputs), dropped, result

    return train


def _train(
    device: str, name: str, factor: float, scopes: str | None
) -> tuple[Trace, list, list, object]:
    """Train, and run steps that overflowed again.

    Returns:
        The trace of the runs that counted; per step the dropped pairs, this rank's first; the rows
        of the layers; and the report of the graphs.
    """
    model = tiny_model(device, "moe", dispatcher=make_dispatcher(name, rows_factor=factor), count=1)
    optimizer = optimizer_of(model, device)
    scaler = GradScaler(device, init_scale=64.0, growth_interval=4)
    ema = ExponentialMovingAverage(model.parameters(), 0.9)
    step = DeviceStep(
        optimizer, scaler=scaler, ema=ema, clip_norm=1.0, process_group=dist.group.WORLD
    )
    train = _make_step(model, step)
    config = GraphConfig(impl="none")
    if scopes == "whole step":
        train = FullIteration(train, model=model, optimizer=optimizer, state=[step])
    elif scopes:
        config = GraphConfig(scopes, warmup_steps=3)
    graphs = moe_graphs.graph(model, config)
    trace, dropped = Trace(), []
    torch.manual_seed(dist.get_rank())
    for index, tokens in enumerate(microbatches(device, STEPS, seed=10 + dist.get_rank())):
        _skew(model, index)
        batch, random = {"tokens": tokens}, Snapshot(graphs.backend)
        with graphs.step():
            loss, lost, result = train(batch)
        dropped.append((lost.item(), result.overflowed.item()))
        if result.overflowed:
            random.put_back()
            with other_rows_factor(model, LARGE), graphs.step():
                loss, lost, result = train(batch)
            assert not lost
            assert not result.overflowed
        trace.note(f"step {index} loss", loss)
        trace.note(f"step {index} norm", result.grad_norm)
        trace.note(f"step {index} scale", result.scale)
        trace.note(f"step {index} counts", model.layers[0].moe.router.tokens_per_expert)
        for which, parameter in model.named_parameters():
            trace.note(f"step {index} {which}", parameter)
        for number, average in enumerate(ema.averages):
            trace.note(f"step {index} average {number}", average)
    report = train.report() if scopes == "whole step" else graphs.report()
    rows = [layer.moe.row_statistics.most_rows.item() for layer in model.layers]
    for made in (train, graphs) if scopes == "whole step" else (graphs,):
        made.release()
    return trace, dropped, rows, report


def _runs(rank: int, world_size: int, device: str, name: str) -> list:
    # On GPUs the number of rows decides the GEMMs' tiles, and so the order of their sums.
    factor = LARGE if device == "cpu" else SMALL
    expected, dropped, rows, _ = _train(device, name, factor, None)
    assert device == "cuda" or dropped == [(0, 0.0)] * STEPS
    found = []
    for scopes in (None, "whole step", *(["full"] if name == "symmetric" else [])):
        trace, dropped, most, report = _train(device, name, SMALL, scopes)
        trace.assert_equal(expected)
        assert most == rows
        found.append(dropped)
        if scopes:  # the warm-up takes steps 0, 1 and 1 again
            calls = 1 if scopes == "whole step" else 2  # calls per step, one per microbatch
            again = sum(overflowed == 1.0 for _, overflowed in dropped[2:])
            assert report.eager_calls == {"warmup": 3 * calls, "attribute": again * calls}
            assert report.matched == (STEPS - 2) * calls
    assert found[1:] == [found[0]] * (len(found) - 1)
    return found[0]


@pytest.mark.parametrize(
    ("backend", "device", "name"),
    [
        ("gloo", "cpu", "all_gather"),
        ("gloo", "cpu", "symmetric"),
        pytest.param("nccl", "cuda", "symmetric", marks=pytest.mark.multigpu),
    ],
)
@pytest.mark.long
def test_run_again_it_is_training_with_room(backend, device, name):
    first, last = run_distributed(_runs, 2, backend, arguments=(device, name))
    skipped = [overflowed for _, overflowed in first]
    assert skipped == [overflowed for _, overflowed in last]
    assert {index for index in range(STEPS) if skipped[index]} >= set(SKEWED)
    for index in SKEWED:  # on both ranks, although only one had no room
        assert (first[index][0] > 0, last[index][0] > 0) == (index % 2 == 1, index % 2 == 0)
    tokens = 2 * SEQUENCE
    rows = room_for_rows(tokens, 2, range(2), 2, SMALL)
    assert first[1][0] == 2 * (4 * tokens - rows)  # summed over two microbatches


def test_an_overflow_moves_nothing():
    """Gradients that are not finite change nothing either, since the step does not count."""
    parameter = nn.Parameter(torch.ones(3))
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    ema = ExponentialMovingAverage([parameter], 0.5)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    step = DeviceStep(optimizer, scaler=scaler, ema=ema)

    def take(gradient: float, dropped: int | None) -> StepResult:
        parameter.grad = torch.full((3,), gradient)
        return step(overflow=None if dropped is None else torch.tensor(dropped))

    assert take(1.0, 0).overflowed == 0.0
    before = [
        parameter.clone(),
        ema.averages[0].clone(),
        optimizer.state[parameter]["step"].clone(),
    ]
    kept = scaler.state_dict()
    for gradient in (1.0, math.inf):
        result = take(gradient, 5)
        assert (result.overflowed, result.found_inf) == (1.0, float(gradient == math.inf))
        after = [parameter, ema.averages[0], optimizer.state[parameter]["step"]]
        assert all(map(torch.equal, before, after))
        assert scaler.state_dict() == kept
        assert not parameter.grad.any()
    result = take(math.inf, 0)
    assert (result.overflowed, result.found_inf) == (0.0, 1.0)
    assert scaler.state_dict() != kept
    assert take(1.0, None).overflowed is None
    assert not torch.equal(parameter, before[0])


def test_what_cannot_be_skipped_or_is_no_count_is_refused():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    plain = DeviceStep(torch.optim.SGD([parameter], lr=0.1))
    with pytest.raises(ValueError, match="skipped .by a scaler, or by overflow.: pass fused=True"):
        plain(overflow=torch.tensor(0))
    assert torch.equal(parameter, torch.ones(3))
    fused = DeviceStep(torch.optim.SGD([parameter], lr=0.1, fused=True))
    for wrong in (torch.tensor(0.0), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="pass the 0-dim count that the model returns"):
            fused(overflow=wrong)
    fused(overflow=torch.tensor(0))
    assert torch.equal(parameter, torch.full((3,), 0.9))


def test_models_without_a_bound_have_no_other_one():
    model = tiny_model("cpu", dispatcher=make_dispatcher("local"))
    with pytest.raises(ValueError, match="take symmetric or all_gather"):
        with other_rows_factor(model, None):
            pass


def test_another_factor_is_put_back():
    dispatcher = make_dispatcher("symmetric", rows_factor=1.0)
    model = tiny_model("cpu", "mixed", dispatcher=dispatcher)
    with pytest.raises(KeyError), other_rows_factor(model, None):
        assert model.layers[1].moe.dispatcher == make_dispatcher("symmetric")
        raise KeyError
    assert model.layers[1].moe.dispatcher is dispatcher
