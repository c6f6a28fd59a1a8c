"""Expert parallelism with graphs: two ranks, gloo on the CPU and NCCL on two GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_graphs
from distributed import RANKS, run_distributed
from moe_graphs import GraphConfig
from moe_graphs import staged as interrupts
from moe_graphs.dispatch import AllToAllDispatcher
from training_runs import eager_trace, tiny_model, train

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)]
LISTS = [
    "attn",
    "moe_router",
    "attn,moe_router",
    "moe_router,moe_preprocess",
    "attn,moe_router,moe_preprocess",
    "attn,mlp,moe_router,moe_preprocess",
    "layers.*",
]


def device_of(backend: str) -> str:
    return "cuda" if backend == "nccl" else "cpu"


def train_every_list(rank: int, world_size: int, device: str) -> list[tuple[int, int]]:
    """Trains by every scope list; each rank has its own data.

    Returns captured and replayed per scope list.
    """
    options = {"dispatcher": AllToAllDispatcher(dist.group.WORLD)}
    expected = eager_trace(device, steps=5, **options)
    counted = []
    for scopes in LISTS:
        model = tiny_model(device, **options)
        config = GraphConfig(scopes, warmup_steps=2, on_mismatch="error")
        graphs = moe_graphs.graph(model, config)
        train(model, graphs, device, steps=5).assert_equal(expected)
        report = graphs.report()
        counted.append((report.captured, report.matched))
        graphs.release()
    return counted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.long
def test_graphed_training_over_two_ranks_is_bitwise_eager_training(backend):
    results = run_distributed(train_every_list, RANKS, backend, arguments=(device_of(backend),))
    for counted in results:
        # The model has two layers, one of them dense; each of three replayed steps has two
        # microbatches.
        captured = [1 if scopes.startswith("moe_router") else 2 for scopes in LISTS]
        assert counted == [(count, 2 * 3 * count) for count in captured]


def train_past_an_exception(rank: int, world_size: int, device: str) -> bool:
    """The experts fail on every rank in one step; the step after it goes on as in eager."""

    def run(scopes: str | None) -> list[torch.Tensor]:
        model = tiny_model(device, "moe", dispatcher=AllToAllDispatcher(dist.group.WORLD))
        config = GraphConfig(scopes, warmup_steps=2) if scopes else GraphConfig(impl="none")
        graphs = moe_graphs.graph(model, config)
        train(model, graphs, device, steps=3)
        experts = model.layers[1].moe.experts
        experts.forward = _fail
        with pytest.raises(ArithmeticError), graphs.step():
            model(torch.zeros(1, 8, dtype=torch.int64, device=device))
        del experts.forward
        assert interrupts._store.get() is None
        after = [value for _, value in train(model, graphs, device, steps=2).values]
        graphs.release()
        return after

    expected, found = run(None), run("attn,moe_router,moe_preprocess")
    return all(a is b or torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _fail(*arguments: torch.Tensor) -> None:
    raise ArithmeticError("inside the experts")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_in_the_experts_of_two_ranks(backend):
    device = device_of(backend)
    assert run_distributed(train_past_an_exception, RANKS, backend, arguments=(device,)) == (
        [True] * RANKS
    )


def leave_without_releasing(rank: int, world_size: int, device: str) -> int:
    """Graphs that nobody releases must not keep the process from ending."""
    model: nn.Module = tiny_model(device, dispatcher=AllToAllDispatcher(dist.group.WORLD))
    graphs = moe_graphs.graph(model, GraphConfig("attn,moe_router,moe_preprocess", warmup_steps=1))
    train(model, graphs, device, steps=2)
    return graphs.report().captured


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_end_without_releasing_their_graphs(backend):
    device = device_of(backend)
    assert run_distributed(leave_without_releasing, RANKS, backend, arguments=(device,)) == (
        [2] * RANKS
    )
