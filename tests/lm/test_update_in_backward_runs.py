"""``moe-graphs train --update-in-backward``: the bits of its graphs, and of a run that goes on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lm_runs import advance, fresh_trainer, options, saved_on_the_way
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.checkpoint import load_checkpoint
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.run import with_graphs
from moe_graphs.lm.run_directory import find_checkpoint

STEPS = 6
WHOLE = FullIterationConfig(optimizer_in_graph=True, warmup_steps=2)
GRAPHS = {"scopes": GraphConfig("attn,moe", warmup_steps=2), "whole steps": WHOLE}


def updating(**changes):
    given = options(**changes)
    training = dataclasses.replace(given.preset.training, update_in_backward=True, clip_norm=0.2)
    preset = dataclasses.replace(given.preset, training=training)
    return dataclasses.replace(given, preset=preset)


def trained(given):
    trainer = fresh_trainer(given)
    with with_graphs(trainer, given.graph_config):
        advance(trainer, STEPS)
    trainer.settle()
    history = trainer.history.loss[:STEPS], trainer.history.grad_norm[:STEPS]
    return [*history, *trainer.model.parameters()]


@pytest.mark.parametrize("graphs", GRAPHS.values(), ids=GRAPHS)
def test_graphs_change_no_bit(graphs):
    expected = trained(updating())
    found = trained(dataclasses.replace(updating(), graph_config=graphs))
    assert all(map(torch.equal, found, expected))
    assert (expected[1] > 0.2).all()  # so that each step clips


def test_a_run_goes_on_with_the_same_bits(tmp_path):
    whole = fresh_trainer(updating())
    saved_on_the_way(whole, tmp_path, 3, STEPS)
    again = fresh_trainer(updating())
    load_checkpoint(find_checkpoint(tmp_path), again)
    advance(again, STEPS)
    again.settle()
    assert torch.equal(again.history.grad_norm[:STEPS], whole.history.grad_norm[:STEPS])
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


def test_what_does_not_fit_is_an_error():
    base = dict(steps=1, batch_size=2, sequence_length=1, learning_rate=1.0)
    with pytest.raises(ValueError, match="2 microbatches cannot add up"):
        TrainSettings(**base, update_in_backward=True, microbatches=2)
    with pytest.raises(ValueError, match="torch_adamw updates all weights together"):
        TrainSettings(**base, update_in_backward=True, optimizer="torch_adamw")
    graphs = FullIterationConfig(optimizer_in_graph=False)
    with pytest.raises(ValueError, match="drop --update-outside"):
        check_options(dataclasses.replace(updating(), graph_config=graphs))
