"""Runs whose ranks share tensors: graphed training is eager training to the bit.

Graphs are of scopes and of steps. Options that cannot be used together are refused.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from distributed import run_distributed
from lm_runs import SCOPES, advance, fresh_trainer, options, small_corpus
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.data import HeldOut
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.run import with_graphs
from moe_graphs.lm.sample import continue_tokens
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig
from moe_graphs.training.grad_norm import local_part

SCOPED, WHOLE = GraphConfig(SCOPES), FullIterationConfig(optimizer_in_graph=True)


def train(rank: int, world_size: int) -> list[dict]:
    """Trains with dropout, jitter and aux losses, and an evaluation in the middle."""
    workers = Workers.on(ParallelConfig(tp=2), torch.device("cpu"))
    corpus, found = small_corpus(), []
    held_out = HeldOut.of(corpus.held_out_documents, sequence_length=32, context=16)
    for config in (None, SCOPED, WHOLE):
        given = options(steps=6, microbatches=2, workers=workers)
        check_options(dataclasses.replace(given, graph_config=config))
        trainer = fresh_trainer(given)
        with with_graphs(trainer, config):
            advance(trainer, 5)
            nats = [trainer.nats_per_token(held_out)]
            advance(trainer, 6)
            report = trainer.report()
        assert config is None or report.replayed > 0, report
        nats.append(trainer.nats_per_token(held_out))
        found.append(
            {
                "losses": trainer.history.loss.tolist(),
                "norms": trainer.history.grad_norm.tolist(),
                "nats": nats,
                "weights": [local_part(p).tolist() for p in trainer.model.parameters()],
                "written": continue_tokens(trainer.model, [1, 2, 3], 4, (0.0, 0.8), seed=0),
            }
        )
    return found


@pytest.mark.long
def test_graphed_is_eager():
    of_ranks = run_distributed(train, 2)
    for eager, *graphed in of_ranks:
        assert graphed == [eager, eager]
        assert len(set(eager["losses"])) == 6
    first, second = (found[0] for found in of_ranks)
    assert first.pop("weights") != second.pop("weights")
    assert first == second


@pytest.mark.parametrize(
    ("layout", "config", "words"),
    [
        ({"tp": 2, "dp_shard": 2}, SCOPED, "scopes on several ranks: .* or share by --tp"),
        ({"tp": 2}, FullIterationConfig(), "a part of the graph.*--optimizer-in-graph"),
        ({"tp": 4}, None, "tp: 4 ranks cannot share num_heads 2"),
    ],
)
def test_what_is_refused(layout, config, words):
    workers = SimpleNamespace(layout=ParallelConfig(**layout), fsdp=True)
    given = dataclasses.replace(options(), graph_config=config, workers=workers)
    with pytest.raises(ValueError, match=words):
        check_options(given)
