"""Expert parallelism inside graphs, by all-gather and through peers' memory.

Scopes and whole steps are bitwise as eager training, and as each other. Each rank has its own data.
A step has two microbatches in flight, reduces the gradients that ranks share, clips, updates, and
moves the expert bias. Dropout, jitter and aux loss are in the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_graphs
from distributed import RANKS, run_distributed
from full_iterations import optimizer_of
from moe_graphs import GraphConfig
from moe_graphs.config import SCOPE_STAGES
from moe_graphs.dispatch import make_dispatcher
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.layers import LanguageModel
from training_runs import Trace, loss_of, microbatches, tiny_model

STEPS = 20
# These are some of the lists that hold a collective; --full-grids takes all of them.
FEW = ["moe_router,moe_preprocess", "attn,mlp,moe"]
NAMES = [name for name in SCOPE_STAGES if name != "full"]
LISTS = [
    "full",
    *(",".join(names) for n in range(1, 6) for names in itertools.combinations(NAMES, n)),
]


def _model(device: str, layers: str, dispatcher: str) -> LanguageModel:
    count = 1 if layers == "moe" else 2
    return tiny_model(device, layers, dispatcher=make_dispatcher(dispatcher), count=count)


def _reduce_shared(model: nn.Module) -> None:
    """Reduces gradients of all weights but the experts', which have seen every rank's tokens."""
    shared = [p.grad for name, p in model.named_parameters() if ".experts." not in name]
    together = torch.cat([grad.flatten() for grad in shared])
    dist.all_reduce(together)
    parts = together.split([grad.numel() for grad in shared])
    for grad, part in zip(shared, parts, strict=True):
        grad.copy_(part.view_as(grad))


def _make_step(model: LanguageModel, optimizer: torch.optim.Optimizer) -> Callable:
    def step(batch: dict) -> tuple:
        losses = [loss_of(model, tokens)[0] for tokens in batch["tokens"]]
        for loss in losses:
            loss.backward()
        _reduce_shared(model)
        counts = model.layers[-1].moe.router.tokens_per_expert.clone()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias(dist.group.WORLD)
        return losses, norm, counts

    return step


def _train(
    device: str,
    layers: str,
    dispatcher: str,
    scopes: str | None,
    steps: int,
) -> tuple:
    """Trains; returns the trace of every value, and the report.

    ``scopes`` is a list of scopes, "whole step", or None for eager training.
    """
    model = _model(device, layers, dispatcher)
    optimizer = optimizer_of(model, device)
    step = _make_step(model, optimizer)
    config = GraphConfig(impl="none")
    if scopes == "whole step":
        step = FullIteration(step, model=model, optimizer=optimizer, on_mismatch="error")
    elif scopes:
        config = GraphConfig(scopes, warmup_steps=2, on_mismatch="error")
    graphs = moe_graphs.graph(model, config)
    trace, routings = Trace(), set()
    torch.manual_seed(dist.get_rank())
    for index, tokens in enumerate(microbatches(device, steps, seed=10 + dist.get_rank())):
        with graphs.step():
            losses, norm, counts = step({"tokens": tokens})
        for name, values in (("loss", losses), ("norm", [norm]), ("routing", [counts])):
            for value in values:
                trace.note(f"step {index} {name}", value)
        routings.add(tuple(counts.tolist()))
        trace.note_state(model, f"step {index}")
    trace.note("random number", torch.rand(1, device=device))
    assert len(routings) == steps, "the routing is to change in every step"
    report = step.report() if scopes == "whole step" else graphs.report()
    for made in (step, graphs) if scopes == "whole step" else (graphs,):
        made.release()
    return trace, report


def _is_legal(device: str, scopes: str) -> bool:
    try:
        model = _model(device, "mixed", "all_gather")
        moe_graphs.graph(model, GraphConfig(scopes)).release()
    except ValueError:
        return False
    return True


def _compare(device: str, layers: str, dispatcher: str, lists: list[str], steps: int) -> None:
    """Compares with the eager training of all-gather."""
    expected, _ = _train(device, layers, "all_gather", None, steps)
    for scopes in lists:  # in the first of them peers' memory is made
        trace, report = _train(device, layers, dispatcher, scopes, steps)
        try:
            trace.assert_equal(expected)
        except AssertionError as error:
            raise AssertionError(f"{scopes}: {error}") from error
        if scopes == "whole step":
            assert (report.captures, report.matched) == (1, steps - 3), report
            assert report.eager_calls == {"warmup": 3}, report
            continue
        count = len(report.scopes)
        assert report.captured == 2 * count, (scopes, report)  # each for two slots
        assert report.matched == 2 * (steps - 2) * count, (scopes, report)
        assert report.eager_calls == {"warmup": 2 * 2 * count}, (scopes, report)
    if dispatcher != "all_gather":
        _train(device, layers, dispatcher, None, steps)[0].assert_equal(expected)


def _train_what_holds_all(rank: int, world_size: int, device: str, dispatcher: str) -> None:
    steps = 8 if device == "cpu" and world_size > 2 else STEPS
    _compare(device, "moe", dispatcher, ["full", "whole step"], steps)


def _train_lists(
    rank: int, world_size: int, device: str, dispatcher: str, lists: list[str]
) -> list[str]:
    legal = [scopes for scopes in lists if _is_legal(device, scopes)]
    _compare(device, "mixed", dispatcher, legal, 5)
    return legal


GLOO = [("gloo", "cpu", 2), ("gloo", "cpu", 4)]
NCCL = pytest.param("nccl", "cuda", RANKS, marks=pytest.mark.multigpu)
DISPATCHERS = pytest.mark.parametrize("dispatcher", ["all_gather", "symmetric"])


@pytest.mark.long
@DISPATCHERS
@pytest.mark.parametrize(("backend", "device", "ranks"), [*GLOO, NCCL])
def test_whole_layers_and_steps_are_bitwise_eager(backend, device, ranks, dispatcher):
    run_distributed(_train_what_holds_all, ranks, backend, arguments=(device, dispatcher))


@pytest.mark.parametrize(
    ("backend", "device", "dispatcher"),
    [
        pytest.param("gloo", "cpu", "all_gather", marks=pytest.mark.long),
        ("gloo", "cpu", "symmetric"),
        pytest.param("nccl", "cuda", "symmetric", marks=pytest.mark.multigpu),
    ],
)
def test_scope_lists_are_bitwise_eager(backend, device, dispatcher):
    found = run_distributed(_train_lists, RANKS, backend, arguments=(device, dispatcher, FEW))
    assert found == [FEW] * RANKS


@pytest.mark.parametrize(
    ("backend", "device", "ranks", "dispatcher"),
    [
        pytest.param(*GLOO[0], "all_gather", marks=pytest.mark.full),
        pytest.param(*GLOO[0], "symmetric", marks=pytest.mark.full),
        pytest.param("nccl", "cuda", RANKS, "all_gather", marks=pytest.mark.multigpu),
    ],
)
def test_every_scope_list_is_bitwise_eager(backend, device, ranks, dispatcher):
    """The model has dense layers, too, so lists that are legal without them are among these."""
    legal = run_distributed(_train_lists, ranks, backend, arguments=(device, dispatcher, LISTS))
    assert legal == [legal[0]] * ranks
    assert {"moe", "full", *FEW} <= set(legal[0])
    assert len(legal[0]) == 16
