"""Experts shared by ranks that replicate all other weights: no FSDP2, so scopes are legal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_graphs
from distributed import RANKS, run_distributed
from full_iterations import batches
from moe_graphs import GraphConfig
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.layers import LanguageModel
from moe_graphs.optim import AdamW
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize, replicate
from moe_graphs.parallel.mesh import data_mesh
from moe_graphs.parallel.replicated import sum_gradients
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_norm import clip_grad_norm, local_part
from parallel_runs import told, without_noise
from training_runs import Trace, loss_of, tiny_model

STEPS = 8


def ranks_mesh(device: str) -> Any:
    return data_mesh(make_mesh(ParallelConfig(dp_shard=dist.get_world_size()), device))


def train(device: str, dispatcher: str, graphed: str | None, steps: int) -> Trace:
    """Train with two microbatches, dropout, aux losses and clipping.

    Args:
        graphed: scopes, "whole step", or None for eager.
    """
    mesh = ranks_mesh(device)
    model = replicate(tiny_model(device, "mixed"), mesh, dispatcher=dispatcher)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    update = DeviceStep(optimizer, clip_norm=0.5, set_to_none=True)
    scopes = graphed if graphed != "whole step" else None

    def step(batch: dict[str, Any]) -> tuple:
        losses = [loss_of(model, tokens)[0] for tokens in batch["tokens"]]
        for loss in losses:
            (loss * batch["scale"] / mesh.size()).backward()
        sum_gradients(model, mesh)
        norm = update().grad_norm
        model.update_expert_bias(mesh.get_group())
        return [loss.detach() for loss in losses], norm

    whole: Any = step
    if graphed == "whole step":
        whole = FullIteration(
            step, model=model, optimizer=optimizer, state=[update], on_mismatch="error"
        )
    config = GraphConfig(scopes, warmup_steps=2, on_mismatch="error") if scopes else None
    graphs = moe_graphs.graph(model, config or GraphConfig(impl="none"))
    trace, part = Trace(), mesh.get_local_rank()
    torch.manual_seed(part)
    for index, batch in enumerate(batches(device, steps, 2, seed=10 + part)):
        with graphs.step():
            losses, norm = whole(batch)
        for value in (*losses, norm):
            trace.note(f"step {index}", value)
    for name, parameter in model.named_parameters():
        trace.note(name, local_part(parameter))
    report = graphs.report() if scopes else whole.report() if graphed else None
    if report is not None:
        assert report.state == "captured", report
        assert report.replayed, report
        assert set(report.eager_calls) == {"warmup"}, report
    for made in (graphs, whole):
        if hasattr(made, "release"):
            made.release()
    return trace


def compare(rank: int, world_size: int, device: str, dispatchers: list[str], steps: int) -> None:
    for dispatcher in dispatchers:
        expected = train(device, dispatcher, None, steps)
        for graphed in ("attn,mlp,moe", "whole step"):
            train(device, dispatcher, graphed, steps).assert_equal(expected)


@pytest.mark.parametrize("dispatcher", ["all_gather", "symmetric"])
@pytest.mark.long
def test_graphed_is_eager_bit_for_bit(dispatcher):
    run_distributed(compare, 2, arguments=("cpu", [dispatcher], STEPS))


@pytest.mark.multigpu
def test_graphed_is_eager_bit_for_bit_on_gpus():
    arguments = ("cuda", ["all_gather", "symmetric"], 20)
    run_distributed(compare, RANKS, "nccl", arguments=arguments, timeout_seconds=180)


def _quiet_model() -> LanguageModel:
    model = tiny_model("cpu", "mixed", dropout=0.0)
    without_noise(model)
    return model


def with_one_process(rank: int, world_size: int) -> tuple[float, float, list[str]]:
    """Compare gradients and their norm with one process on all ranks' batches."""
    mesh = ranks_mesh("cpu")
    model, alone = replicate(_quiet_model(), mesh), _quiet_model()
    for each in range(world_size):
        for tokens in next(batches("cpu", 1, seed=10 + each))["tokens"]:
            (loss_of(alone, tokens)[0] / world_size).backward()
            if each == rank:
                (loss_of(model, tokens)[0] / world_size).backward()
    sum_gradients(model, mesh)
    found = {n: p.grad for n, p in model.named_parameters()}
    found = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
    furthest = max((found[n] - p.grad).abs().max().item() for n, p in alone.named_parameters())
    norms = [clip_grad_norm(each.parameters(), 1.0).item() for each in (model, alone)]
    sharded = parallelize(_quiet_model(), ParallelConfig(dp_shard=2), make_mesh_of(world_size))
    loss_of(sharded, tokens)[0].backward()
    flat = make_mesh_of(world_size)
    refused = [
        told(lambda: sum_gradients(sharded, mesh)),
        told(lambda: replicate(_quiet_model(), flat)),
    ]
    return furthest, abs(norms[0] - norms[1]), refused


def make_mesh_of(ranks: int) -> Any:
    return make_mesh(ParallelConfig(dp_shard=ranks), "cpu")


def test_gradients_are_those_of_one_process_and_misuse_is_told():
    for furthest, norm, refused in run_distributed(with_one_process, 2):
        assert max(furthest, norm) < 1e-6
        assert "FSDP2 sums its gradients itself" in refused[0]
        assert refused[1].startswith("a mesh of 5 dimensions")
