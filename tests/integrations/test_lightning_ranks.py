"""Whole steps under Lightning's strategies of several ranks: bitwise the same training.

All ranks decide alike. gloo runs on the CPU recorder, NCCL on two GPUs.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from distributed import run_distributed
from lightning_ranks import (
    BATCHES,
    ROWS,
    Language,
    Replicated,
    Sharded,
    fit,
    pl,
    rows,
    trace_of,
)
from moe_graphs import GraphError
from moe_graphs.engine.backends.cpu import CpuRecorder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.tensor import DTensor

    from moe_graphs.integrations.lightning import GraphWholeSteps

RANKS = 2
FULL: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.1,
    "val_check_interval": 4,
    "num_sanity_val_steps": 2,
    "limit_train_batches": BATCHES,
    "limit_val_batches": 2,
}
EPOCHS = 3
SHORT = {"max_epochs": 1, "limit_val_batches": 0}
# Lightning refuses to clip gradients of fused optimizers in mixed precision.
MIXED = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, **SHORT}
TRUE = {"precision": "bf16-true", "gradient_clip_val": 0.1, **SHORT}
BEHIND = {"module": {"inside": False, "dropout": 0.25}}
Report = list[tuple[str, int, dict[str, int]]]


def reports_of(callback: GraphWholeSteps) -> Report:
    return [(each.state, each.matched, each.eager_calls) for each in callback.reports]


def compare(folder: str, device: str, kind: type, **options: Any) -> Report:
    """Trains without and with graphs."""
    again = copy.deepcopy(options)  # a scaler has a state
    expected = trace_of(*fit(folder, device, kind, **options))
    callback = GraphWholeSteps(warmup_steps=2)
    trace_of(*fit(folder, device, kind, callback, **again)).assert_equal(expected)
    return reports_of(callback)


def in_full(folder: str, device: str, kind: type) -> dict[str, Any]:
    """Twelve updates with everything: saved after each epoch, and gone on with from the first."""
    found: dict[str, Any] = {}
    given = {**FULL, "max_epochs": EPOCHS}
    ends = []
    for name in ("ungraphed", "graphed"):
        saves = ModelCheckpoint(f"{folder}/{name}", filename="{epoch}", save_top_k=-1)
        callback = GraphWholeSteps(warmup_steps=2)
        used = [saves, callback] if name == "graphed" else [saves]
        ends.append(fit(folder, device, kind, *used, enable_checkpointing=True, **given))
    found["full"] = reports_of(callback)
    trace_of(*ends[1]).assert_equal(trace_of(*ends[0]))
    dist.barrier()
    uninterrupted = trace_of(*ends[0], last=(EPOCHS - 1) * BATCHES)
    callback = GraphWholeSteps(warmup_steps=2)
    resumed = fit(folder, device, kind, callback, ckpt=f"{folder}/graphed/epoch=0.ckpt", **given)
    trace_of(*resumed, last=(EPOCHS - 1) * BATCHES).assert_equal(uninterrupted)
    found["resumed"] = reports_of(callback)
    found["from one process"] = far_from_one_process(ends[1][0], kind, device)
    return found


def far_from_one_process(trained: pl.LightningModule, kind: type, device: str) -> float:
    """The distance of the parameters from those of a plain loop over the batches of all ranks."""
    torch.manual_seed(0)
    model = kind().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data, ranks = rows(), dist.get_world_size()
    for number in range(EPOCHS * BATCHES):
        first = number % BATCHES * ROWS * ranks
        for rank in range(ranks):
            part = slice(first + rank, first + ROWS * ranks, ranks)
            batch = [tensor[part].to(device) for tensor in data.tensors]
            (model.loss(batch) / (ranks * 2)).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), FULL["gradient_clip_val"])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    distances = []
    for here, there in zip(model.parameters(), trained.parameters(), strict=True):
        whole = there.full_tensor() if isinstance(there, DTensor) else there
        distances.append((here.cpu() - whole.detach().cpu()).abs().max().item())
    return max(distances)


def differ_once(folder: str, device: str, kind: type, policy: str) -> list[Any]:
    """The sixth batch of rank 1 is shorter. Returns what was raised, if something was."""
    rank = dist.get_rank()
    own = [tensor[rank::RANKS].split(ROWS) for tensor in rows().tensors]
    batches = [[part.clone() for part in pair] for pair in zip(*own, strict=True)]
    if rank == 1:
        batches[5] = [part[:-1] for part in batches[5]]
    options = {"train": DataLoader(batches, batch_size=None), "use_distributed_sampler": False}
    options |= SHORT
    callback = GraphWholeSteps(warmup_steps=2, on_mismatch=policy)
    if policy == "error":
        try:
            fit(folder, device, kind, callback, **options)
        except GraphError as error:
            return [str(error)]
        return []
    expected = trace_of(*fit(folder, device, kind, **options))
    trace_of(*fit(folder, device, kind, callback, **options)).assert_equal(expected)
    return [reports_of(callback)]


def train_all(rank: int, world_size: int, folder: str, device: str, kind: type) -> dict[str, Any]:
    found = in_full(folder, device, kind)
    found["behind"] = compare(folder, device, kind, **{**FULL, **BEHIND, **SHORT})
    found["mixed"] = compare(folder, device, kind, **MIXED)
    found["true"] = compare(folder, device, kind, **TRUE)
    return found


def train_few(rank: int, world_size: int, folder: str, device: str, kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if kind is Sharded:
        found["language"] = compare(folder, device, Language, **SHORT)
    else:
        scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=4)
        plugins = (MixedPrecision("16-mixed", device, scaler=scaler),)
        found["half"] = compare(folder, device, kind, plugins=plugins, **SHORT)
    for policy in ("eager", "error"):
        found[f"differs, {policy}"] = differ_once(folder, device, kind, policy)
    return found


KINDS = {"DDP": Replicated, "FSDP2": Sharded}
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)]


@pytest.fixture(scope="module", params=BACKENDS)
def device(request) -> str:
    return "cuda" if request.param == "nccl" else "cpu"


def on_ranks(work: Callable[..., Any], kind: str, device: str, folder: Path) -> list[Any]:
    arguments = (str(folder), device, KINDS[kind])
    backend = "nccl" if device == "cuda" else "gloo"
    return run_distributed(work, RANKS, backend, arguments=arguments, timeout_seconds=280)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, device, tmp_path_factory) -> list[dict[str, Any]]:
    """The findings of each rank: bitwise differences have raised there."""
    return on_ranks(train_all, request.param, device, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module", params=KINDS)
def few(request, device, tmp_path_factory) -> list[dict[str, Any]]:
    """The findings of runs that do not take long."""
    return on_ranks(train_few, request.param, device, tmp_path_factory.mktemp("few"))


@pytest.mark.long
def test_ranks_train_as_lightning_does(trained):
    """Graphs ran, and did the same on both ranks; a difference has raised on the ranks."""
    first, second = trained
    for name in ("full", "resumed", "behind", "mixed", "true"):
        assert first[name] == second[name]
        assert all(state == "captured" for state, *_ in first[name]), name
        assert all(eager == {"warmup": 2} for *_, eager in first[name]), name
    steps = EPOCHS * BATCHES
    assert sum(replayed for _, replayed, _ in first["full"]) == steps - 2 * len(first["full"])


@pytest.mark.long
def test_other_models_and_precisions(few):
    for found in few:
        (report,) = found.get("half") or found["language"]
        assert report == ("captured", BATCHES - 2, {"warmup": 2})


@pytest.mark.long
def test_two_ranks_are_one_process_with_both_batches(trained, device):
    for found in trained:
        assert found["from one process"] < (1e-5 if device == "cpu" else 1e-3)


@pytest.mark.long
def test_a_batch_of_another_shape_on_one_rank(few):
    first, second = few
    eager = {"warmup": 2, "another_rank": 1}
    assert first["differs, eager"] == [[("captured", BATCHES - 3, eager)]]
    eager = {"warmup": 2, "shape": 1}
    assert second["differs, eager"] == [[("captured", BATCHES - 3, eager)]]
    assert "the call of another rank differs" in first["differs, error"][0]
    assert "batch" in second["differs, error"][0]


class OnRankOne(pl.Callback):
    """Hooks that only one rank has."""

    def on_before_backward(self, *_):
        pass


class StepsOnRankOne(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        trainer.optimizers[0].register_step_post_hook(lambda *_: None)


def fails(*_: Any) -> None:
    raise OSError("disk on fire")


def say(folder: str, kind: type, *callbacks: Any, **options: Any) -> tuple[list[str], Report]:
    """The warnings of a run, and its report."""
    callback = GraphWholeSteps(warmup_steps=2)
    options = {**SHORT, "limit_train_batches": 5, **options}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(folder, "cpu", kind, callback, *callbacks, **options)
    texts = [str(each.message) for each in said]
    return [text for text in texts if "GraphWholeSteps" in text], reports_of(callback)


def disagree(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    of_one = lambda kind: [kind()] if rank == 1 else []  # noqa: E731
    unused = DDPStrategy(find_unused_parameters=True)
    shards = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=world_size)
    told = {
        "unused": say(folder, Replicated, strategy=unused),
        "static": say(folder, Replicated, strategy=DDPStrategy(static_graph=True)),
        "tensor": say(folder, Sharded, strategy=shards),
        "a hook": say(folder, Replicated, *of_one(OnRankOne)),
        "a step hook": say(folder, Replicated, *of_one(StepsOnRankOne)),
    }
    if rank == 1:
        CpuRecorder.new_pool = fails  # type: ignore[method-assign]
    return {**told, "a capture": say(folder, Replicated)}


def test_what_is_refused_on_one_rank_is_on_all(tmp_path):
    first, second = run_distributed(
        disagree, RANKS, arguments=(str(tmp_path),), timeout_seconds=280
    )
    says = {
        "unused": r"training is eager: DDPStrategy\(find_unused_parameters=True\)",
        "static": r"training is eager: DDPStrategy\(static_graph=True\)",
        "tensor": "training is eager: .*tensor_parallel_size=2",
        "a hook": "training is eager: on rank 1: OnRankOne.on_before_backward would",
        "a capture": "on rank 1: capture of the step failed with OSError: disk on fire",
    }
    for name, text in says.items():
        (message,), reports = first[name]
        assert re.search(text, message, re.DOTALL), message
        assert second[name] == ([], reports)  # rank 0 speaks for all
        assert all(replayed == 0 for _, replayed, _ in reports)
    assert first["a step hook"] == second["a step hook"]
    messages, ((state, replayed, _),) = first["a step hook"]
    assert (messages, state, replayed) == ([], "captured", 3)
