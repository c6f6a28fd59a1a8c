"""A kernel that adds in any order makes no difference between replay and eager."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, make_graphed_callables
from moe_graphs.engine.backends.cpu import Tape
from moe_graphs.engine.verify import Difference, fingerprints, varies
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig

PERIOD = 5
# These counters are tensors, because the engine would find counters in Python.
CALLS, IN_REPLAY = torch.zeros(1), torch.zeros(1)


def rounded_otherwise(x: torch.Tensor) -> torch.Tensor:
    """Adds a few bits, as sums in another order have."""
    return x * (1.0 + 6 * torch.finfo(x.dtype).eps)


@torch.library.custom_op("moe_graphs_tests::now_and_then", mutates_args=())
def now_and_then(x: torch.Tensor) -> torch.Tensor:
    """Returns x, in one of five calls rounded otherwise, as atomics do."""
    CALLS.add_(1)
    return rounded_otherwise(x) if CALLS.item() % PERIOD == 0 else x.clone()


now_and_then.register_autograd(lambda ctx, gradient: now_and_then(gradient))


@torch.library.custom_op("moe_graphs_tests::replayed", mutates_args=())
def replayed(x: torch.Tensor) -> torch.Tensor:
    """Returns x, rounded otherwise in every replay."""
    return rounded_otherwise(x) if IN_REPLAY.item() else x.clone()


replayed.register_autograd(lambda ctx, gradient: gradient)


class Model(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.first, self.scope = nn.Linear(4, 4), Scope(op)

    def forward(self, x):
        return self.scope(self.first(x))


class Scope(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.linear, self.op = nn.Linear(4, 4), op

    def forward(self, x):
        return torch.tanh(self.op(self.linear(x)))


def report_of(engine: str, op):
    torch.manual_seed(0)
    model = Model(op)
    x = torch.randn(3, 4)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    if engine == "callables":
        make_graphed_callables(model.scope, (torch.ones(3, 4, requires_grad=True),))
        graphs = model.scope.graphs
    elif engine == "scopes":
        graphs = moe_graphs.graph(model, GraphConfig("scope*", warmup_steps=2))
    else:
        graphs = FullIteration(step, model=model, warmup_steps=2, on_mismatch="eager")
    for _ in range(5):
        if engine == "scopes":
            with graphs.step():
                step(x)
        else:
            (graphs if engine == "whole steps" else step)(x)
        model.zero_grad(set_to_none=False)
    report = graphs.report()
    graphs.release()
    return report


ENGINES = ("scopes", "callables", "whole steps")


@pytest.mark.parametrize("phase", range(PERIOD))
@pytest.mark.parametrize("engine", ENGINES)
def test_what_varies_in_replays_too_is_not_reproducible(engine, phase):
    CALLS.fill_(phase)
    report = report_of(engine, now_and_then)
    assert report.replayed > 0
    assert "differs_from_eager" not in report.eager_calls


@pytest.fixture
def replays(monkeypatch):
    """Number of replays of each tape. ``replayed`` knows when one is running."""
    original, counted = Tape.replay, Counter()

    def replay(self):
        counted[self] += 1
        IN_REPLAY.fill_(1)
        original(self)
        IN_REPLAY.fill_(0)

    monkeypatch.setattr(Tape, "replay", replay)
    return counted


@pytest.mark.filterwarnings("ignore::moe_graphs.GraphWarning")
@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_replays_always_compute_otherwise_differs(engine):
    report = report_of(engine, replayed)
    assert report.eager_calls["differs_from_eager"] > 0


@torch.library.custom_op("moe_graphs_tests::wrong_replay", mutates_args=())
def wrong_replay(x: torch.Tensor) -> torch.Tensor:
    """Returns x, in every second call rounded otherwise, and in replays one more."""
    CALLS.add_(1)
    varied = rounded_otherwise(x) if CALLS.item() % 2 == 0 else x.clone()
    return varied + IN_REPLAY


wrong_replay.register_autograd(lambda ctx, gradient: gradient)


class WrongInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return wrong_replay(gradient)


@pytest.mark.filterwarnings("ignore::moe_graphs.GraphWarning")
@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("op", [wrong_replay, WrongInBackward.apply])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_varies_eagerly_is_compared_all_the_same(engine, op):
    """A replay has to be about as near to eager runs as these are to one another."""
    CALLS.zero_()
    report = report_of(engine, op)
    assert report.eager_calls["differs_from_eager"] > 0


def test_fingerprints_tell_noise_from_errors():
    generator = torch.Generator().manual_seed(0)
    eager = torch.randn(300, 5000, generator=generator)

    def noisy(scale):
        return eager + scale * torch.randn(eager.shape, generator=generator)

    swapped = eager.clone()
    swapped[[0, 1]] = eager[[1, 0]]
    first, again, near, far, rows, nan = fingerprints(
        [eager, noisy(1e-4), noisy(1e-4), noisy(0.1), swapped, eager.log()]
    )
    assert first != again
    assert first.is_noise(again, near)
    assert not first.is_noise(again, far)
    assert not first.is_noise(again, rows)
    assert not first.is_noise(again, nan)
    assert first.is_noise(first, fingerprints([eager * (1 + 1e-7)])[0])
    assert first == fingerprints([eager.clone()])[0]


def test_fingerprints_of_counts():
    """Counts have to be the same even if eager runs of other tensors vary."""
    first, other, third = fingerprints([torch.arange(9), torch.arange(9) + 1, torch.zeros(9).int()])
    assert first != other
    assert not first.is_noise(first, other)
    assert first.is_noise(third, other)


class RoundedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return replayed(gradient)


@pytest.mark.filterwarnings("ignore::moe_graphs.GraphWarning")
def test_a_backward_is_replayed_once_for_its_forward(replays):
    """The backward works in the forward's memory, so another replay would prove nothing."""
    report = report_of("scopes", RoundedInBackward.apply)
    assert report.eager_calls["differs_from_eager"] > 0
    assert set(replays.values()) == {1}  # all that follow are eager


ROUNDED = Difference("a", (0,), 1.0, 1.5, 1, only_order_of_sums=True)
WORSE = Difference("a", (0,), 1.0, 7.0, 1)


@pytest.mark.parametrize(
    ("here", "elsewhere", "expected"),
    [
        ([None, ROUNDED], [None, None], True),
        ([None, None], [None, ROUNDED], True),  # the same kernel, seen by another rank first
        ([None, WORSE], [None, ROUNDED], False),
        ([None, ROUNDED], [None, WORSE], False),
        ([], [], False),
    ],
)
def test_ranks_agree_on_what_varies(here, elsewhere, expected):
    def rank(own, others):
        """Asks, after each run, whether either differs, and whether either is worse."""
        answers = [
            flag
            for found in others
            for flag in (found is not None, found is WORSE)[: 1 if found is None else 2]
        ]
        runs = iter(own)

        def anywhere(mine: bool) -> bool:
            return bool(mine) | (answers.pop(0) if answers else False)

        return varies(lambda: next(runs, None), anywhere)

    assert rank(here, elsewhere) is expected
    assert rank(elsewhere, here) is expected


@pytest.mark.gpu
def test_attention_that_varies_beside_experts():
    """Flash attention's backward adds in any order, and a comparison uses up its memory."""
    moe = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=128, aux_loss_coef=0.01)
    config = TransformerConfig(
        hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, ffn_hidden_size=256,
        vocab_size=512, max_sequence_length=1024, moe=moe, moe_layers="all",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LanguageModel(config).to("cuda", torch.bfloat16)
    graphs = moe_graphs.graph(model, GraphConfig("attn,moe", warmup_steps=1))
    tokens = torch.randint(512, (4, 1025), device="cuda")
    for _ in range(5):
        with graphs.step():
            out = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(out.logits_BSV.float().flatten(0, 1),
                                               tokens[:, 1:].flatten())  # fmt: skip
            (loss + out.aux_loss).backward()
        model.zero_grad()
    report = graphs.report()
    graphs.release()
    assert loss.isfinite()
    assert report.captured == 6
    assert not report.eager_calls.get("differs_from_eager")
