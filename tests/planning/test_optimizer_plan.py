"""Plans of optimizers against their memory and traffic on real ranks."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from distributed import run_distributed
from moe_graphs.cli import build_app
from moe_graphs.kernels.local_part import local_part
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.optimizers import build_optimizer
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.plan_command import optimizer_costs
from moe_graphs.parallel import ParallelConfig
from moe_graphs.planning.laid_out import lay_out
from moe_graphs.planning.planned_step import OptimizerCosts, PlannedStep
from planned_layouts import MOE, laid_out

# The model is wide enough for 8-bit states.
CONFIG = replace(MOE, hidden_size=128, ffn_hidden_size=128)
STEP = PlannedStep(sequences=2, sequence_length=32, microbatches=2, on_gpus=False)
LAYOUTS: list[dict[str, int]] = [
    {"dp_shard": 2}, {"dp_shard": 2, "ep": 2}, {"dp_replicate": 2}, {"pp": 2}, {"tp": 2},
]  # fmt: skip
OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"optimizer_state": "8bit"},
    {"optimizer_state": "bfloat16", "ema_decay": 0.9},
    {"optimizer": "muon"},
]
CASES = [
    (degrees, options)
    for degrees, options in itertools.product(LAYOUTS, OPTIMIZERS)
    if not ("tp" in degrees and "optimizer" in options)
]


def settings(options: dict[str, Any]) -> TrainSettings:
    return TrainSettings(steps=1, batch_size=4, sequence_length=32, learning_rate=1e-3, **options)


class Arriving(TorchDispatchMode):
    """Mode that counts the bytes that all-to-alls bring from other ranks."""

    received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            assert func is torch.ops.c10d.alltoall_base_.default
            rows = args[3]
            others = sum(rows) - rows[torch.distributed.get_rank()]
            self.received += others * args[0].itemsize
        return func(*args, **(kwargs or {}))


def real_costs(rank: int, world_size: int) -> list[OptimizerCosts]:
    return [real_cost(ParallelConfig(**degrees), options) for degrees, options in CASES]


def real_cost(layout: ParallelConfig, options: dict[str, Any]) -> OptimizerCosts:
    model = LanguageModel(CONFIG)
    laid_out(model, "cpu", layout, STEP)
    optimizer = build_optimizer(model, settings(options))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Arriving() as arriving:
        optimizer.step()
    states = [local_part(v) for state in optimizer.state.values() for v in state.values()]
    held = {state.untyped_storage()._cdata: state.untyped_storage().nbytes() for state in states}
    return OptimizerCosts(sum(held.values()), arriving.received)


@pytest.mark.long
def test_what_two_ranks_hold_and_receive_is_what_was_planned():
    every = run_distributed(real_costs, 2)
    for number, (degrees, options) in enumerate(CASES):
        layout = ParallelConfig(**degrees)
        step = replace(STEP, optimizer=functools.partial(optimizer_costs, settings(options)))
        of_ranks = [lay_out(CONFIG, layout, step, rank) for rank in range(layout.pp)]
        for rank in range(2):
            mine, found = of_ranks[rank * layout.pp // 2], every[rank][number]
            assert found.states == mine.held["optimizer"], (degrees, options, rank)
            if rank == 0 or layout.pp > 1:  # without pp only rank 0 has a plan
                assert found == mine.update, (degrees, options, rank)
                by_rows = "muon" in options.values() and "dp_shard" in degrees
                assert (found.received > 0) == by_rows


def planned(*options: str) -> dict[str, Any]:
    arguments = ["plan", "--model", "tiny", "--gpus", "2", "--json", *options]
    found = CliRunner().invoke(build_app(), arguments)
    assert found.exit_code == 0, found.stderr
    return json.loads(found.stdout)


def test_options_are_those_of_train():
    plain, coded, muon = (
        planned(*options)
        for options in ([], ["--optimizer-state", "8bit", "--ema", "0.9"], ["--optimizer", "muon"])
    )
    of_averages = plain["exact"]["optimizer"]
    assert 0.75 < coded["exact"]["optimizer"] / of_averages < 0.8
    assert 0.5 < muon["exact"]["optimizer"] / of_averages < 0.7
    assert plain["memory"] - muon["memory"] == of_averages - muon["exact"]["optimizer"]
    assert muon["wire"].pop("matrices of the update") > 0
    assert muon["wire"] == plain["wire"]


@pytest.mark.parametrize(
    ("name", "copies"), [("NAdam", 2), ("SGD", 0), ("RMSprop", 1), ("Rprop", 2), ("Adagrad", 1)]
)
def test_states_of_torchs_optimizers_are_planned(name, copies):
    model = LanguageModel(MOE, device="meta")
    found = optimizer_costs(settings({"optimizer": f"torch.optim:{name}"}), model)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    counters = found.states - copies * sum(sizes)
    assert counters in {each * 4 * len(sizes) for each in (0, 1, 2)}


def test_an_optimizer_that_reads_values_cannot_be_planned():
    model = LanguageModel(MOE, device="meta")
    with pytest.raises(ValueError, match="optimizer: Adafactor reads values in its step, so that"):
        optimizer_costs(settings({"optimizer": "torch.optim:Adafactor"}), model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--optimizer", "muon", "--tp", "2", "--gpus", "2"], "optimizer: muon with tp=2"),
        (["--optimizer", "muon", "--ema", "0.9"], "muon has no optimizer_state"),
        (["--optimizer-state", "4bit"], "--optimizer-state: '4bit' is not one of"),
    ],
)
def test_what_train_refuses_is_refused(options, words):
    found = CliRunner().invoke(build_app(), ["plan", "--model", "tiny", "--gpus", "1", *options])
    assert found.exit_code == 1
    assert words in found.stderr
