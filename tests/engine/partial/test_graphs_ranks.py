"""Ranks that communicate inside of a scope: if one of them cannot do something, none does it.

Otherwise one rank would run the scope once more than another one. The next collective of the other
rank would wait for it or, worse, take part in the wrong one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import moe_graphs
from distributed import RANKS, run_distributed
from full_iterations import optimizer_of
from moe_graphs import CaptureError, GraphConfig, GraphError, GraphWarning
from moe_graphs.dispatch import AllGatherDispatcher, Dispatcher, SymmetricDispatcher
from moe_graphs.engine import verify
from moe_graphs.engine.partial.capture import Recorder
from moe_graphs.engine.partial.verify import Expected
from moe_graphs.engine.report import Report
from moe_graphs.engine.verify import ByValue, Difference
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from training_runs import Trace, loss_of, microbatches, tiny_model

STEPS, WARMUP = 9, 2
SYMMETRIC = ("shape at capture", "capture of a backward", "difference in a forward")
WRONG = Difference("output 0", None, 1.0, 2.0, 1)


def _train(
    device: str,
    dispatcher: Dispatcher,
    config: GraphConfig,
    odd_step: int | None,
    errors: list[str],
) -> tuple[Trace, Report]:
    """Trains; in ``odd_step`` rank 1 has its tokens in another shape, with as many of them."""
    model = tiny_model(device, "moe", dispatcher=dispatcher, count=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    graphs, trace, rank = moe_graphs.graph(model, config), Trace(), dist.get_rank()
    torch.manual_seed(rank)
    for index, batches in enumerate(microbatches(device, STEPS, seed=10 + rank)):
        if rank == 1 and index == odd_step:
            batches = [torch.cat([b[:, :17], b[:, 16:]]) for b in batches]
        with _noting(errors), graphs.step():
            for tokens in batches:
                loss, _ = loss_of(model, tokens)
                loss.backward()
                trace.note(f"step {index} loss", loss)
        optimizer.step()
        optimizer.zero_grad()
        trace.note_state(model, f"step {index}")
    report = graphs.report()
    graphs.release()
    return trace, report


@contextlib.contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    try:
        yield
    except CaptureError as error:
        errors.append(str(error))


@contextlib.contextmanager
def _failing_behind(name: str) -> Iterator[None]:
    """A method of the recorder works on rank 1, and then finds no memory."""
    method = getattr(Recorder, name)

    def fails(self, *args, **kwargs):
        method(self, *args, **kwargs)
        raise CaptureError("no memory left")

    with patch.object(Recorder, name, fails) if dist.get_rank() == 1 else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _differing_forward() -> Iterator[None]:
    replayed = Expected.found

    def wrong(self, outputs):
        (name, output), *others = replayed(self, outputs)
        return [(name, output + 1), *others]

    with patch.object(Expected, "found", wrong):
        yield


@contextlib.contextmanager
def _differing_backward(found: Difference) -> Iterator[None]:
    compare = ByValue.replayed_once

    def wrong(self, *runs, **options):
        with patch.multiple(verify, difference=lambda *_: found, unexplained=lambda *_: found):
            return compare(self, *runs, **options)

    with patch.object(ByValue, "replayed_once", wrong):
        yield


def _on_one_rank(context: contextlib.AbstractContextManager) -> contextlib.AbstractContextManager:
    return context if dist.get_rank() == 1 else contextlib.nullcontext()


class Found(NamedTuple):
    errors: list[str]
    eager_calls: dict[str, int]
    matched: int


def run_cases(rank: int, world_size: int, device: str) -> dict[str, Found]:
    config = GraphConfig("attn,moe", warmup_steps=WARMUP)
    raising = dataclasses.replace(config, on_capture_error="error")
    recapture = GraphConfig("attn,moe", warmup_steps=WARMUP, on_mismatch="recapture")
    rounding = Difference("output 0", None, 1.0, 2.0, 1, only_order_of_sums=True)
    cases = {
        "shape at capture": (config, WARMUP, contextlib.nullcontext()),
        "shape at replay": (config, WARMUP + 1, contextlib.nullcontext()),
        "capture again": (recapture, WARMUP + 1, contextlib.nullcontext()),
        "capture of a forward": (raising, None, _failing_behind("record_forward")),
        "capture of a backward": (raising, None, _failing_behind("_record_backward")),
        "eager from a forward on": (config, None, _failing_behind("record_forward")),
        "eager from a backward on": (config, None, _failing_behind("_record_backward")),
        "difference in a forward": (config, None, _on_one_rank(_differing_forward())),
        "difference in a backward": (config, None, _on_one_rank(_differing_backward(WRONG))),
        "sums in another order": (config, None, _on_one_rank(_differing_backward(rounding))),
    }
    found = {}
    for name, (config, odd_step, trouble) in cases.items():
        # One dispatcher's groups are found by torch's operations, the other's by ours.
        dispatcher = SymmetricDispatcher() if name in SYMMETRIC else AllGatherDispatcher()
        expected, _ = _train(device, dispatcher, GraphConfig(impl="none"), odd_step, [])
        errors: list[str] = []
        warned = contextlib.nullcontext()
        if "difference" in name or "eager from" in name:
            warned = pytest.warns(GraphWarning)
        with trouble, warned:
            trace, report = _train(device, dispatcher, config, odd_step, errors)
        try:
            trace.assert_equal(expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        found[name] = Found(errors, report.eager_calls, report.matched)
    return found


BACKENDS = [
    ("gloo", "cpu"),
    pytest.param("nccl", "cuda", marks=pytest.mark.multigpu),
]


@pytest.mark.long
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_what_one_rank_cannot_do_none_does(backend, device):
    """Training is bitwise the eager one in every case (``run_cases``)."""
    first, second = run_distributed(run_cases, RANKS, backend, arguments=(device,))[:2]
    warm, calls = {"warmup": 2 * WARMUP}, 2 * (STEPS - WARMUP)
    # The odd step is the one that would have captured, so the next one captures.
    assert first["shape at capture"] == Found([], warm | {"another_rank": 2}, calls - 2)
    assert second["shape at capture"] == Found([], warm | {"shape": 2}, calls - 2)
    # After the capture each rank decides by itself: an eager call has the collectives of a replay.
    assert first["shape at replay"] == Found([], warm, calls)
    assert second["shape at replay"] == Found([], warm | {"shape": 2}, calls - 2)
    again = {"warmup": 4 * WARMUP}
    assert first["capture again"].eager_calls == again
    assert second["capture again"].eager_calls == again | {"shape": 2}
    for name in ("capture of a forward", "capture of a backward"):
        assert "it failed on another rank" in first[name].errors[0]
        assert "no memory left" in second[name].errors[0]
        assert first[name].eager_calls == second[name].eager_calls
        assert first[name].eager_calls["capture_failed"] >= calls - 2
    for name in ("eager from a forward on", "eager from a backward on"):
        assert first[name].errors == second[name].errors == []
        assert first[name].eager_calls == second[name].eager_calls
        assert first[name].eager_calls["capture_failed"] >= calls - 2
    for name in ("difference in a forward", "difference in a backward"):
        assert first[name] == second[name]
        assert first[name].eager_calls["differs_from_eager"] >= calls - 1
    assert first["sums in another order"] == second["sums in another order"]
    assert first["sums in another order"] == Found([], warm, calls)


def differ_in_a_whole_step(rank: int, world_size: int, device: str) -> list[int]:
    """The dispatcher shows that ranks communicate; there is no DDP."""
    model = tiny_model(device, "moe", dispatcher=AllGatherDispatcher(), count=1)
    optimizer = optimizer_of(model, device)

    def train_step(batch: dict) -> torch.Tensor:
        loss, _ = loss_of(model, batch["tokens"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    refused = []
    step = FullIteration(train_step, model=model, optimizer=optimizer, on_mismatch="error")
    for index, (tokens, _) in enumerate(microbatches(device, STEPS, seed=10 + rank)):
        if rank == 1 and index == 6:
            tokens = torch.cat([tokens[:, :17], tokens[:, 16:]])
        try:
            step({"tokens": tokens})
        except GraphError:
            refused.append(index)
            train_step({"tokens": tokens})
    step.release()
    return refused


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_ranks_of_a_dispatcher_agree_on_whole_steps(backend, device):
    found = run_distributed(differ_in_a_whole_step, RANKS, backend, arguments=(device,))
    assert found == [[6]] * RANKS
