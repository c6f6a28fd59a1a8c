"""``--optimizer``: ours or torch's AdamW, one state and on the CPU one update to the bit; Muon."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from lm_runs import advance, fresh_trainer, options, save_checkpoint
from moe_graphs.config import FullIterationConfig
from moe_graphs.layers.expert_backends import ExpertsBackend
from moe_graphs.lm.checkpoint import load_checkpoint
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.optimizers import build_optimizer
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.run import RunOptions, with_graphs
from moe_graphs.lm.trainer import Trainer
from moe_graphs.optim import AdamW, Muon
from moe_graphs.parallel import ParallelConfig

WHOLE = FullIterationConfig(optimizer_in_graph=True, warmup_steps=2)


def choosing(optimizer: str, device: str = "cpu", **changes) -> RunOptions:
    given = options(**changes)
    training = dataclasses.replace(given.preset.training, optimizer=optimizer)
    preset = dataclasses.replace(given.preset, training=training)
    return dataclasses.replace(given, preset=preset, device=torch.device(device))


def everything(trainer: Trainer) -> list[torch.Tensor]:
    held = list(trainer.model.parameters())
    states = [trainer.optimizer.state[p] for p in held]
    return [*held, *(value for state in states for _, value in sorted(state.items()))]


def assert_same(one: Trainer, other: Trainer) -> None:
    for a, b in zip(everything(one), everything(other), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.history.loss[: one.step], other.history.loss[: one.step])


def trained(given: RunOptions, steps: int) -> Trainer:
    trainer = fresh_trainer(given)
    with with_graphs(trainer, given.graph_config):
        advance(trainer, steps)
    return trainer


def test_on_the_cpu_both_are_torchs_update():
    torchs, ours = (trained(choosing(name), 4) for name in ("torch_adamw", "adamw"))
    in_graph = trained(dataclasses.replace(choosing("adamw"), graph_config=WHOLE), 4)
    assert type(torchs.optimizer) is torch.optim.AdamW
    assert type(ours.optimizer) is AdamW
    assert_same(torchs, ours)
    assert_same(torchs, in_graph)


@pytest.mark.parametrize(("first", "second"), [("torch_adamw", "adamw"), ("adamw", "torch_adamw")])
def test_either_goes_on_from_the_others_checkpoint(tmp_path, first, second):
    path = save_checkpoint(tmp_path, trained(choosing(first), 3))
    settings = json.loads((path / "settings.json").read_text())
    assert settings["optimizer"] == first
    resumed = fresh_trainer(choosing(second))
    assert load_checkpoint(path, resumed) == [f"optimizer: {first} in the checkpoint, {second} now"]
    advance(resumed, 6)
    assert_same(resumed, trained(choosing(first), 6))


def test_another_is_refused():
    with pytest.raises(ValueError, match="'sgd' is unknown: choose one of adamw, torch_adamw"):
        TrainSettings(steps=1, batch_size=1, sequence_length=1, learning_rate=1.0, optimizer="sgd")


def test_muon_is_for_matrices_between_hidden_states():
    trainer = fresh_trainer(choosing("muon"))
    names = {p: name for name, p in trainer.model.named_parameters()}
    found = {
        names[p]: (group["muon"], group["split"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
        for p in group["params"]
    }
    assert found.keys() == set(names.values())
    assert {name: each[1] for name, each in found.items() if each[0]} == {
        **{f"layers.{i}.attention.qkv.weight": (16, 16, 16) for i in (0, 1)},
        **{f"layers.{i}.attention.out.weight": () for i in (0, 1)},
        "layers.0.mlp.w1.weight": (32, 32),
        "layers.0.mlp.w2.weight": (),
        "layers.1.moe.experts.w1": (16, 16),
        "layers.1.moe.experts.w2": (),
    }
    for name in ("embedding.weight", "head.weight", "layers.1.moe.router.weight"):
        assert found[name] == (False, (), 0.1)
    assert found["norm.weight"] == (False, (), 0.0)


def test_muon_learns_is_the_same_in_graphs_and_goes_on_where_it_was(tmp_path):
    eager = trained(choosing("muon"), 8)
    assert type(eager.optimizer) is Muon
    assert eager.history.loss[7] < eager.history.loss[0] - 0.3
    assert_same(eager, trained(dataclasses.replace(choosing("muon"), graph_config=WHOLE), 8))
    path = save_checkpoint(tmp_path, trained(choosing("muon"), 3))
    resumed = fresh_trainer(choosing("muon"))
    assert load_checkpoint(path, resumed) == []
    advance(resumed, 8)
    assert_same(eager, resumed)
    with pytest.raises(ValueError, match="has no 'optimizer.*--optimizer"):
        load_checkpoint(path, fresh_trainer(choosing("adamw")))


def test_muon_needs_whole_matrices():
    workers = SimpleNamespace(layout=ParallelConfig(tp=2), fsdp=True)
    with pytest.raises(ValueError, match="^optimizer: muon with tp=2, which cuts matrices"):
        check_options(dataclasses.replace(choosing("muon"), workers=workers))

    class Others(ExpertsBackend):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    with pytest.raises(ValueError, match="^optimizer: muon does not know how Others keeps"):
        build_optimizer(Others(), choosing("muon").preset.training)


@pytest.mark.gpu
def test_on_a_gpu_muon_in_graphs_is_eager_bit_by_bit(deterministic):
    given = choosing("muon", "cuda")
    eager = trained(given, 8)
    assert_same(eager, trained(dataclasses.replace(given, graph_config=WHOLE), 8))
    assert eager.history.loss[7] < eager.history.loss[0]


@pytest.mark.gpu
def test_on_a_gpu_checkpoints_go_both_ways_and_graphs_are_eager_bit_by_bit(
    tmp_path, monkeypatch, deterministic
):
    from moe_graphs.optim import adamw

    monkeypatch.setattr(adamw, "LARGE", 256)  # the model is small
    cuda = {name: choosing(name, "cuda") for name in ("adamw", "torch_adamw")}
    eager = trained(cuda["adamw"], 8)
    assert_same(eager, trained(dataclasses.replace(cuda["adamw"], graph_config=WHOLE), 8))
    torchs = trained(cuda["torch_adamw"], 8)
    pairs = zip(everything(eager), everything(torchs), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)  # our kernel was in use
    torch.testing.assert_close(eager.history.loss, torchs.history.loss, rtol=2e-2, atol=0)
    for first, second in (("adamw", "torch_adamw"), ("torch_adamw", "adamw")):
        path = save_checkpoint(tmp_path / first, trained(cuda[first], 3))
        resumed = fresh_trainer(cuda[second])
        load_checkpoint(path, resumed)
        advance(resumed, 8)
        assert resumed.history.loss[7].isfinite()
        same = fresh_trainer(cuda[first])
        assert load_checkpoint(path, same) == []
        advance(same, 8)
        assert_same(same, trained(cuda[first], 8))
