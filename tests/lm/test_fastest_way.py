"""The way that ``moe-graphs train`` takes by default, and its dispatcher."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from distributed import run_distributed
from lm_runs import fresh_trainer, options, small_preset
from moe_graphs.cli import build_app
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.checkpoint import read_model
from moe_graphs.lm.fastest_way import (
    Situation,
    Way,
    choose,
    default_scopes,
    no_peers,
    tried_peers,
)
from moe_graphs.lm.options import GraphOptions, TrainOptions
from moe_graphs.lm.train_command import train
from moe_graphs.lm.workers import Workers, layout_of
from moe_graphs.option_tree import tree_of
from moe_graphs.parallel import ParallelConfig

WHOLE = FullIterationConfig(optimizer_in_graph=True)
OUTSIDE = FullIterationConfig(optimizer_in_graph=False)
NO_PEERS = "it is for GPUs"
SYNC = "moe_router,moe_preprocess"
LAYOUTS = {
    "one process": ({}, True),
    "dp_shard": ({"dp_shard": 2}, True),
    "dp_replicate": ({"dp_replicate": 2}, True),
    "tp": ({"tp": 2}, True),
    "cp": ({"cp": 2}, True),
    "pp": ({"pp": 2}, True),
    "pp, dp_shard": ({"pp": 2, "dp_shard": 2}, True),
    "ep": ({"dp_shard": 2, "ep": 2}, True),
    "no-fsdp": ({"dp_shard": 2}, False),
    "no-fsdp, ep": ({"dp_shard": 2, "ep": 2}, False),
}
# The layouts in which FSDP2 gathers parameters, so that scopes are not legal.
GATHERING = {"dp_shard", "dp_replicate", "cp", "pp, dp_shard", "ep"}


def situation(layout: str, *, peers: bool = False, experts: str = "moe_graphs") -> Situation:
    model = small_preset().model
    moe = dataclasses.replace(model.moe, experts=experts)
    degrees, fsdp = LAYOUTS[layout]
    return Situation(
        model=dataclasses.replace(model, moe=moe),
        layout=ParallelConfig(**degrees),
        fsdp=fsdp,
        no_peers="" if peers else NO_PEERS,
    )


def chosen(layout: str, **asked: Any) -> Way:
    way = choose(GraphOptions(**asked), situation(layout))
    assert way.problems == ()
    return way


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_takes_whole_steps_with_the_update_by_default(layout):
    for peers in (True, False):
        way = choose(GraphOptions(), situation(layout, peers=peers))
        assert way.graph_config == WHOLE
        between = "symmetric" if peers else "all_gather"
        assert way.dispatcher == (between if "ep" in layout.split(", ") else "local")
        assert "the fastest way" in str(way)
        assert "\n" not in str(way)
        assert (NO_PEERS in str(way)) == (way.dispatcher == "all_gather")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_named_dispatcher_with_host_reads_leaves_scopes_or_eager(layout):
    way = chosen(layout, dispatcher="all_to_all")
    assert way.dispatcher == "all_to_all"
    assert "whole steps are not, since dispatcher all_to_all reads sizes on the host" in way.why
    if layout in GATHERING:
        assert way.graph_config is None
        assert "scopes are not, since FSDP2 gathers" in way.why
    else:
        assert way.graph_config == GraphConfig(f"attn,mlp,{SYNC}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_outside_of_the_graph_is_never_taken_in(layout):
    way = chosen(layout, optimizer_in_graph=False)
    if layout in ("one process", "pp"):
        assert way.graph_config == OUTSIDE
    elif layout in GATHERING:
        assert way.graph_config is None
        assert "the update of sharded gradients" in way.why
    else:
        assert way.graph_config == GraphConfig("attn,mlp,moe")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("asked", "config"),
    [
        ({"impl": "none"}, None),
        ({"impl": "full_iteration"}, WHOLE),
        ({"impl": "full_iteration", "optimizer_in_graph": False}, OUTSIDE),
        ({"impl": "local"}, GraphConfig("attn,mlp,moe")),
        ({"impl": "local", "scopes": "attn"}, GraphConfig("attn")),
        ({"scopes": "attn"}, GraphConfig("attn")),
        ({"optimizer_in_graph": True}, WHOLE),
    ],
    ids=str,
)
def test_what_is_named_is_never_changed(layout, asked, config):
    assert chosen(layout, **asked).graph_config == config


@pytest.mark.parametrize("experts", ["transformer_engine", "megablocks"])
def test_experts_of_other_libraries_leave_scopes(experts):
    way = choose(GraphOptions(), situation("one process", experts=experts))
    assert way.graph_config == GraphConfig(f"attn,mlp,{SYNC}")
    assert f"experts {experts} take their sizes from the host" in way.why


def test_default_scopes_are_all_that_can_be_captured():
    model = small_preset().model
    assert default_scopes(model, "local") == "attn,mlp,moe"
    assert default_scopes(model, "all_to_all") == f"attn,mlp,{SYNC}"
    assert default_scopes(dataclasses.replace(model, moe_layers="all"), "padded") == "attn,moe"
    dense = dataclasses.replace(model, moe=None, moe_layers="all")
    assert default_scopes(dense, "all_to_all") == "attn,mlp"


def test_options_that_contradict_each_other_are_all_named():
    asked = GraphOptions(impl="none", scopes="attn", optimizer_in_graph=True)
    problems = choose(asked, situation("one process")).problems
    assert [each.split(":")[0] for each in problems] == ["scopes", "optimizer_in_graph"]


def options_of(*arguments: object) -> TrainOptions:
    command = typer.main.get_command(build_app()).commands["train"]
    values = dict(command.make_context("train", list(map(str, arguments))).params)
    del values["config"]
    return tree_of(TrainOptions, values)


def work(rank: int, world_size: int, text: Path, folder: Path) -> None:
    """Trains by each layout's default and eagerly, as the command does after its start."""
    common = ["--device", "cpu", "--data", text, "--batch-size", 2, "--sequence-length", 32,
              "--steps", 5, "--deterministic"]  # fmt: skip
    for layout in ("ep", "dp-shard"):
        degrees = {"dp_shard": 2, **({"ep": 2} if layout == "ep" else {})}
        workers = Workers.on(layout_of(2, **degrees), torch.device("cpu"))
        for way in ([], ["--impl", "none"]):
            out = folder / f"{layout} {' '.join(way)}"
            train(workers, options_of(*common, f"--{layout}", 2, *way, "--out", out), None)


@pytest.mark.long
def test_two_ranks_replay_without_a_flag_bitwise_as_eager(text, tmp_path):
    """Compares losses and parameters of the last step, for ``--ep 2`` and ``--dp-shard 2``."""
    run_distributed(work, 2, arguments=(text, tmp_path), timeout_seconds=200)
    for layout in ("ep", "dp-shard"):
        runs = [tmp_path / f"{layout} {way}" for way in ("", "--impl none")]
        graphed, eager = (json.loads((run / "summary.json").read_text()) for run in runs)
        assert graphed["report"]["replayed"] + graphed["report"]["audited"] == 2
        assert eager["report"] is None
        assert graphed["train_loss"] == eager["train_loss"]
        assert graphed["held_out_bits_per_byte"] == eager["held_out_bits_per_byte"]
        models = [read_model(run / "checkpoints" / "step_000005") for run in runs]
        assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def reach(rank: int, world_size: int, device: str, hidden_size: int) -> tuple[str, int]:
    """Tries peers' memory, then lays out and trains a model."""
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    workers = Workers.on(layout_of(2, ep=2), where)
    model = dataclasses.replace(small_preset().model, hidden_size=hidden_size, num_heads=1)
    ask = no_peers if device == "cuda" else tried_peers
    said = ask(workers, model, torch.float32)
    given = options(workers=workers, dispatcher="all_gather" if said else "symmetric", steps=1)
    trainer = fresh_trainer(dataclasses.replace(given, device=where))
    trainer.train_step()
    return said, trainer.step


@pytest.mark.parametrize(("size", "said"), [(16, ""), (12, "hidden sizes divisible by 8")])
def test_peers_memory_is_tried_before_it_is_chosen(size, said):
    for found, steps in run_distributed(reach, 2, arguments=("cpu", size)):
        assert said in found
        assert (bool(found), steps) == (bool(said), 1)


@pytest.mark.multigpu
def test_gpus_of_one_host_use_each_others_memory():
    found = run_distributed(reach, 2, "nccl", arguments=("cuda", 16), timeout_seconds=200)
    assert found == [("", 1)] * 2
