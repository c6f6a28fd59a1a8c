"""The study of experts' rows, and the check that benchmarks time only replayed graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import expert_rows
import timed_replays
from distributed import run_distributed
from lm_runs import small_corpus, small_preset
from moe_graphs.dispatch import SymmetricDispatcher
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig

STEPS = 3


def on_ranks(rank: int, world_size: int) -> tuple:
    """Run the study on a rank.

    Returns:
        Shares as the study counts them, the rows that came to this rank's experts, and the error if
        only the last rank ran eagerly.
    """
    received, dispatch = [], SymmetricDispatcher.dispatch

    def noting(self, plan):
        dispatched = dispatch(self, plan)
        received.append(int(dispatched.order.offsets_E[-1]))
        return dispatched

    SymmetricDispatcher.dispatch = noting  # in this process alone
    workers = Workers.on(ParallelConfig(dp_shard=world_size, ep=world_size), torch.device("cpu"))
    preset = small_preset(steps=STEPS, microbatches=2)
    shares = expert_rows.shares_of(preset, small_corpus(), workers, STEPS)
    eager = {"warmup": 3} | ({"attribute": 2} if rank else {})
    with pytest.raises(timed_replays.NotReplayed) as error:
        timed_replays.check_replayed(SimpleNamespace(replayed=5, eager_calls=eager))
    dist.barrier()
    return shares, received, str(error.value)


@pytest.mark.long
def test_shares_are_those_of_the_rows_that_arrive():
    ranks = run_distributed(on_ranks, 2)
    (shares, *_), received = ranks[0], torch.tensor([rows for _, rows, _ in ranks]).double()
    balanced = received.mean(0)  # mean over calls
    assert (balanced == 2 * 32 * 2 / 2).all()  # sequences, tokens, top-k; ranks
    highest = (received / balanced).amax(0).view(STEPS, 2).amax(1)  # a step has two microbatches
    assert shares[2] == pytest.approx(highest.tolist())
    assert list(shares) == [2, 4]
    assert all(four >= two for two, four in zip(shares[2], shares[4], strict=True))
    for _, _, said in ranks:
        assert said.startswith("rank 1: 5 replayed, eager calls {'warmup': 3, 'attribute': 2}")


def test_highest_shares_and_what_would_have_overflowed():
    counts_CE = torch.tensor([[3, 1, 2, 2], [2, 2, 2, 2]])
    assert [expert_rows.share(counts_CE, ranks) for ranks in (2, 4)] == [1.0, 1.5]
    found = expert_rows.summed_up([1.8] * 10 + [1.3] * 40 + [1.2, 1.6, 1.1])
    assert found["highest"] == {"1 to 10": 1.8, "11 to 50": 1.3, "after 50": 1.6}
    assert found["overflowed"]["1.5"] == {"1 to 10": 10, "11 to 50": 0, "after 50": 1}
    assert found["maximum"] == 1.8


@pytest.mark.parametrize("report", [(0, {"warmup": 3}), (7, {"warmup": 3, "shape": 1})])
def test_what_was_not_replayed_has_no_time(report):
    timed_replays.check_replayed(None)
    timed_replays.check_replayed(SimpleNamespace(replayed=1, eager_calls={"warmup": 9}))
    with pytest.raises(timed_replays.NotReplayed, match="no time of a graph"):
        timed_replays.check_replayed(SimpleNamespace(replayed=report[0], eager_calls=report[1]))
