"""``moe-graphs train --z-loss`` and ``--label-smoothing``: the training loss, and that alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

from lm_runs import advance, fresh_trainer, options, small_corpus, small_preset
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.data import HeldOut
from moe_graphs.lm.run import RunOptions, with_graphs
from moe_graphs.lm.trainer import Trainer

STEPS = 6
RULE = {"label_smoothing": 0.2, "z_loss": 0.01}
GRAPHS = {
    "scopes": GraphConfig("attn,moe", warmup_steps=2),
    "whole steps": FullIterationConfig(optimizer_in_graph=True, warmup_steps=2),
}


def with_rule(**rule: float) -> RunOptions:
    return dataclasses.replace(options(), preset=small_preset(**rule))


def expected_loss(trainer: Trainer) -> torch.Tensor:
    """The loss of the first step, of whole logits by torch."""
    windows = trainer.batches.batch(0).long()
    with torch.random.fork_rng(), torch.no_grad():
        logits_NV = trainer.model.train()(windows[:, :-1]).logits_BSV.flatten(0, 1)
    targets_N, smoothing = windows[:, 1:].flatten(), trainer.settings.label_smoothing
    plain = functional.cross_entropy(logits_NV, targets_N, label_smoothing=smoothing)
    return plain + trainer.settings.z_loss * logits_NV.logsumexp(1).square().mean()


@pytest.mark.parametrize("rule", [RULE, {}], ids=["both", "none"])
def test_the_loss_is_that_of_the_rule(rule):
    trainer = fresh_trainer(with_rule(**rule))
    expected = expected_loss(trainer)
    advance(trainer, 1)
    torch.testing.assert_close(trainer.history.loss[0], expected)


def test_held_out_text_is_measured_without_it():
    held_out = HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)
    found = [fresh_trainer(with_rule(**rule)).nats_per_token(held_out) for rule in (RULE, {})]
    assert found[0] == found[1]


@pytest.mark.parametrize("graphs", GRAPHS.values(), ids=GRAPHS)
def test_graphs_change_no_bit(graphs):
    found = []
    for config in (None, graphs):
        trainer = fresh_trainer(with_rule(**RULE))
        with with_graphs(trainer, config):
            advance(trainer, STEPS)
            report = trainer.report()
        assert config is None or report.replayed > 0
        found.append([trainer.history.loss[:STEPS], *trainer.model.parameters()])
    assert all(map(torch.equal, *found))
