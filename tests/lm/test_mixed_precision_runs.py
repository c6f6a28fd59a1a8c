"""Runs with FSDP2's mixed precision: weights are gathered in bf16 and gradients reduced in fp32.

Everything that needs ranks is in one spawn.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import run_distributed
from fake_ranks import as_rank
from lm_runs import QUIET, advance, fresh_trainer, options, small_corpus
from moe_graphs.config import FullIterationConfig
from moe_graphs.kernels.local_part import local_part
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.checkpoint import Checkpoints, load_checkpoint
from moe_graphs.lm.compare import compare
from moe_graphs.lm.data import HeldOut
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.run import RunOptions, deterministic, run, with_graphs
from moe_graphs.lm.run_directory import find_checkpoint
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize, pipeline_stages
from moe_graphs.parallel.parallelize import MIXED_PRECISION

LAYOUTS = {
    "shard": ParallelConfig(dp_shard=2),
    "experts": ParallelConfig(dp_shard=2, ep=2),
    "stages": ParallelConfig(dp_shard=2, pp=2),
}
STEPS, SAVED = 4, 2
MORE = 5  # of which a comparison can time some
WHOLE = FullIterationConfig(optimizer_in_graph=True, warmup_steps=2)
CPU = torch.device("cpu")


def chosen(
    workers: Any, steps: int = STEPS, *, mixed_precision: bool = True, **changes: Any
) -> RunOptions:
    changes["mixed_precision"] = mixed_precision
    given = options(steps=steps, workers=workers, **changes)
    if workers is not None and workers.layout.ep > 1:
        given = dataclasses.replace(given, dispatcher="all_gather")
    training = dataclasses.replace(given.preset.training, batch_size=8, microbatches=2)
    preset = dataclasses.replace(given.preset, training=training)
    device = getattr(workers, "device", CPU)
    return dataclasses.replace(given, preset=preset, device=device)


class SeenOnTheWire(TorchDispatchMode):
    """Dtypes of the tensors that FSDP2 gathers, and of those that it reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: set[torch.dtype] = set()
        self.reduced: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        for words, seen in (("allgather_base", self.gathered), ("reduce_scatter", self.reduced)):
            if words in name:
                seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def trained(workers: Workers, graphs: Any, folder: Path | None = None) -> dict[str, Any]:
    """Trains with dropout, jitter and aux losses; evaluates and saves in the middle."""
    given = chosen(workers)
    check_options(dataclasses.replace(given, graph_config=graphs))
    trainer = fresh_trainer(given)
    trainer.run_id = workers.gather(trainer.run_id)[0]
    held_out = HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)
    with with_graphs(trainer, graphs):
        advance(trainer, SAVED)
        if folder is not None:
            checkpoints = Checkpoints(folder, trainer)
            checkpoints.save()
            checkpoints.finish()
        advance(trainer, STEPS - 1)
        nats = trainer.nats_per_token(held_out)
        advance(trainer, STEPS)
        report = trainer.report()
    assert graphs is None or report.matched == STEPS - 2, report
    return {**state_of(trainer), "nats": nats}


def state_of(trainer: Trainer) -> dict[str, Any]:
    trainer.settle()
    return {
        "losses": trainer.history.loss.clone(),
        "norms": trainer.history.grad_norm.clone(),
        "weights": [local_part(p.detach()).clone() for p in trainer.model.parameters()],
    }


def seen(workers: Workers, mixed_precision: bool) -> list[str]:
    trainer = fresh_trainer(chosen(workers, mixed_precision=mixed_precision))
    with SeenOnTheWire() as wire:
        trainer.train_step()
    state = {v.dtype for each in trainer.optimizer.state.values() for v in each.values()}
    return [str(found) for found in (wire.gathered, wire.reduced, state)]


def work(rank: int, world_size: int, folder: Path) -> None:
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        if layout.world_size != world_size:
            continue
        workers = Workers.on(layout, CPU)
        where = folder / name
        found[name] = trained(workers, None, where), trained(workers, WHOLE)
        again = fresh_trainer(chosen(workers))
        assert load_checkpoint(find_checkpoint(where), again) == []
        advance(again, STEPS)
        found[f"{name}, resumed"] = state_of(again)
        if name == "shard":
            found["seen"] = seen(workers, True), seen(workers, False)
            given = dataclasses.replace(chosen(workers, MORE), graph_config=WHOLE)
            compared = compare(given, small_corpus(), QUIET)
            found["compared"] = (
                compared.losses_bitwise_equal, compared.grad_norms_bitwise_equal,
                compared.parameters_bitwise_equal, compared.report.matched,
            )  # fmt: skip
            short = chosen(workers, 1, out=folder / "run", save=False)
            found["run"] = run(short, small_corpus(), QUIET).samples
    torch.save(
        found, folder / f"{world_size} {rank}.pt"
    )  # tensors do not outlive their process in a pipe


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> tuple[Path, dict[str, list]]:
    """The folder, a process alone, and by layout or another name the results of each rank."""
    folder, found = tmp_path_factory.mktemp("several"), defaultdict(list)
    for count in (2, 4):
        run_distributed(work, count, arguments=(folder,), timeout_seconds=60.0 * count)
        for rank in range(count):
            here = torch.load(folder / f"{count} {rank}.pt", weights_only=False)
            for name, value in here.items():
                found[name].append(value)
    return folder, found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    weights = zip(one["weights"], other["weights"], strict=True)
    named = all(torch.equal(one[name], other[name]) for name in ("losses", "norms"))
    return named and all(torch.equal(*pair) for pair in weights)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphed_and_resumed_runs_are_eager_ones_bit_for_bit(several, layout):
    found = several[1]
    pairs = zip(found[layout], found[f"{layout}, resumed"], strict=True)
    for (eager, graphed), resumed in pairs:
        assert len(set(eager["losses"].tolist())) == STEPS
        assert same(eager, graphed)
        assert eager["nats"] == graphed["nats"]
        assert same(eager, resumed)
        assert {w.dtype for w in eager["weights"]} == {torch.float32}


@pytest.mark.long
def test_bf16_is_gathered_and_fp32_reduced_and_kept(several):
    for mixed, plain in several[1]["seen"]:
        assert mixed == ["{torch.bfloat16}", "{torch.float32}", "{torch.float32}"]
        assert plain == ["{torch.float32}", "{torch.float32}", "{torch.float32}"]
    assert several[1]["compared"] == [(True, True, True, MORE - 2)] * 2
    assert [len(samples) for samples in several[1]["run"]] == [2, 2]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_alike_and_go_on_in_one_process(several, layout):
    """Results are near but no nearer: ranks draw other random numbers, and bf16 rounds."""
    losses = several[1][layout][0][0]["losses"]
    torch.testing.assert_close(losses, several[1]["shard"][0][0]["losses"], rtol=0.05, atol=0)
    alone = fresh_trainer(chosen(None, mixed_precision=False))
    said = load_checkpoint(find_checkpoint(several[0] / layout), alone)
    words = "mixed_precision: bfloat16, reductions in float32 in the checkpoint, nothing known now"
    assert words in said
    advance(alone, STEPS)
    torch.testing.assert_close(alone.history.loss, losses, rtol=0.05, atol=0)


def on_gpus(rank: int, world_size: int) -> list[bool]:
    found = []
    for name in ("shard", "experts"):
        workers = Workers.on(LAYOUTS[name], torch.device("cuda", rank))
        with deterministic(True):
            eager, graphed = trained(workers, None), trained(workers, WHOLE)
        found += [same(eager, graphed), eager["nats"] == graphed["nats"]]
    return found


@pytest.mark.multigpu
def test_graphed_is_eager_on_gpus():
    assert run_distributed(on_gpus, 2, "nccl", timeout_seconds=300) == [[True] * 4] * 2


@pytest.mark.parametrize("degrees", [None, {"tp": 2}, {"pp": 2}])
def test_where_fsdp2_shards_nothing_it_is_refused(degrees):
    workers: Any = degrees and SimpleNamespace(layout=ParallelConfig(**degrees), fsdp=True)
    with pytest.raises(ValueError, match="mixed_precision: it is FSDP2's, which shards nothing"):
        check_options(chosen(workers))


def test_what_is_in_which_dtype_is_said():
    mixed, plain = (chosen(None, mixed_precision=each).precision for each in (True, False))
    assert mixed.startswith("parameters, gradients and AdamW's state in float32; FSDP2 gathers")
    assert plain.startswith("parameters, gradients and AdamW's state in float32, gathered,")
    on_gpu = dataclasses.replace(chosen(None, mixed_precision=False), device=torch.device("cuda"))
    assert "matrix products and attention in bfloat16 by autocast" in on_gpu.precision


def test_the_weight_of_aux_losses_is_not_rounded_on_its_way_to_a_stage():
    """The weight is one over the number of microbatches, and a third is another number in bf16."""
    layout, seen = ParallelConfig(pp=2, dp_shard=2), []

    def look(module: Any, given: Any) -> None:
        seen.append([each.dtype for each in given])
        raise InterruptedError

    with as_rank(3, 4):
        mesh = make_mesh(layout, "cpu")
        model = LanguageModel(chosen(None).preset.model)
        (stage,) = pipeline_stages(model, layout, mesh, hidden_dtype=torch.bfloat16)
        parallelize(stage, layout, mesh, mixed_precision=MIXED_PRECISION)
        stage.register_forward_pre_hook(look)
        with pytest.raises(InterruptedError):
            stage(torch.zeros(1, 4, 16, dtype=torch.bfloat16), torch.ones(1))
    assert seen == [[torch.bfloat16, torch.float32]]
