"""Adversaries: torch's own layers, weights that are computed, checkpointing."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from programs.cases import WIDTH, Table, plain_loss
from programs.scripts import other_from_fourth, several, tanh

case = Table()
SCOPED = ("scopes", "callables")


@torch.inference_mode()
def _mean_for_inference(weight):
    return weight.mean()


def layer(make, call=lambda f, x: f(x)):
    """Case whose scope calls one of torch's layers, ``s.f``."""
    return dict(forward=lambda s, x: call(s.f, s.l(x)), init=lambda s: setattr(s, "f", make()))


# ---- torch's layers

case("BatchNorm with a cumulative average", **layer(lambda: nn.BatchNorm1d(4, momentum=None)))
case("BatchNorm is frozen later", **layer(lambda: nn.BatchNorm1d(4)),
     change=lambda m, e: m.sc.f.eval())  # fmt: skip
case("BatchNorm's running statistics are switched off", **layer(lambda: nn.BatchNorm1d(4)),
     change=lambda m, e: setattr(m.sc.f, "track_running_stats", False))  # fmt: skip
case("BatchNorm's statistics are set to None", **layer(lambda: nn.BatchNorm1d(4)),
     change=lambda m, e: (setattr(m.sc.f, "running_mean", None),
                          setattr(m.sc.f, "running_var", None)))  # fmt: skip
case("BatchNorm's statistics are reset", **layer(lambda: nn.BatchNorm1d(4)),
     change=lambda m, e: m.sc.f.reset_running_stats())  # fmt: skip
case("BatchNorm raises for one row", **layer(lambda: nn.BatchNorm1d(4)),
     batch=lambda g, i: torch.randn(1 if i >= 4 else 3, 4, generator=g))  # fmt: skip
case("an LSTM", **layer(lambda: nn.LSTM(4, 4), lambda f, x: f(x)[0]))
case("an LSTM of two layers, both ways, frozen in part", **layer(
    lambda: nn.LSTM(4, 2, 2, bidirectional=True), lambda f, x: f(x)[0]),
    start=lambda m, e: m.sc.f.weight_hh_l0.requires_grad_(False))  # fmt: skip
case("an LSTM whose weight is replaced", **layer(lambda: nn.LSTM(4, 4), lambda f, x: f(x)[0]),
     change=lambda m, e: setattr(
         m.sc.f, "weight_hh_l0", nn.Parameter(m.sc.f.weight_hh_l0.detach() * 2)))  # fmt: skip
case("a GRU", **layer(lambda: nn.GRU(4, 4), lambda f, x: f(x)[0]))
case("a GRU with dropout between layers", **layer(
    lambda: nn.GRU(4, 4, 2, dropout=0.5), lambda f, x: f(x)[0]))  # fmt: skip
case("a scripted module", **layer(lambda: torch.jit.script(nn.Tanh())))
case("a traced module", **layer(lambda: torch.jit.trace(nn.Tanh(), torch.ones(3, 4))))
case("a module becomes a scripted one", **layer(nn.Tanh),
     change=lambda m, e: setattr(m.sc, "f", torch.jit.script(nn.Tanh())))  # fmt: skip
case("inference mode within", lambda s, x: s.l(x) * _mean_for_inference(s.l.weight).clone())
case("a dictionary keyed by a parameter", lambda s, x: s.l(x) * s.gains[s.l.weight],
     lambda s: setattr(s, "gains", {s.l.weight: 2.0}))  # fmt: skip
case("a dictionary keyed by a parameter, with a default",
     lambda s, x: s.l(x) * s.gains.get(s.l.weight, 1.0),
     lambda s: setattr(s, "gains", {s.l.weight: 2.0}))  # fmt: skip
case("a GRU whose state the module keeps", lambda s, x: _keeps_state(s, x),
     lambda s: (setattr(s, "f", nn.GRUCell(4, 4)), setattr(s, "state", None)))  # fmt: skip


def _keeps_state(s, x):
    s.state = s.f(x, None if s.state is None else s.state.detach())
    return s.state


def _truncated(m, x, e):
    state = e.state if e.i else torch.zeros(3, 4)
    state = m.sc(m.pre(x), state)
    state.square().mean().backward()
    e.state = state.detach()
    return e.state.clone()


case("truncated backpropagation hands the state on", lambda s, x, state: s.f(x, state),
     lambda s: setattr(s, "f", nn.GRUCell(4, 4)), step=_truncated)  # fmt: skip


def _packed(f, x):
    lengths = torch.tensor([3, 2])
    packed = nn.utils.rnn.pack_padded_sequence(x[None].expand(2, 3, 4), lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(f(packed)[0])[0].mean(0)


case("an LSTM with packed sequences", **layer(lambda: nn.LSTM(4, 4, batch_first=True), _packed))


def _attention_weights(s, x):
    h = s.l(x)[:, None]
    y, weights = s.f(h, h, h)
    return y[:, 0], weights[0]


case("attention's weights are kept", _attention_weights,
     lambda s: setattr(s, "f", nn.MultiheadAttention(4, 2)),
     step=lambda m, x, e: (lambda y, w: (e.kept.append(w.detach()), y.mean().backward()))(
         *m.sc(m.pre(x))), engines=SCOPED)  # fmt: skip
case("a TransformerEncoder of two layers", **layer(
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2),
    lambda f, x: f(x[:, None])[:, 0]))  # fmt: skip
case("a TransformerEncoder goes to eval", **layer(
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
    lambda f, x: f(x[None])[0]), change=lambda m, e: m.eval())  # fmt: skip
case("a TransformerEncoder evaluates in between", **layer(
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
    lambda f, x: f(x[None])[0]), between=lambda m, e, i: _evaluate(m, e))  # fmt: skip


@torch.no_grad()
def _evaluate(m, e):
    m.eval()
    e.log.append(m.sc(torch.ones(3, 4)).clone())
    m.train()


case("an embedding with max_norm renormalises its weight", lambda s, x: s.f(s.index) + s.l(x),
     lambda s: (setattr(s, "f", nn.Embedding(5, 4, max_norm=0.5)),
                s.register_buffer("index", torch.tensor([1, 3, 3]))))  # fmt: skip
case("an embedding with sparse gradients", lambda s, x: s.f(s.index) + s.l(x),
     lambda s: (setattr(s, "f", nn.Embedding(5, 4, sparse=True)),
                s.register_buffer("index", torch.tensor([1, 3, 3]))))  # fmt: skip
case("an embedding that scales by frequency", lambda s, x: s.f(s.index) + s.l(x),
     lambda s: (setattr(s, "f", nn.Embedding(5, 4, scale_grad_by_freq=True)),
                s.register_buffer("index", torch.tensor([1, 3, 3]))))  # fmt: skip
case("an index out of range, later", lambda s, x, index: s.f(index) + s.l(x),
     lambda s: setattr(s, "f", nn.Embedding(5, 4)), loss=lambda m, x, e: m.sc(
         m.pre(x), torch.tensor([1, 7 if e.late else 2, 3])).mean())  # fmt: skip
case("a class out of range, later", lambda s, x, y: functional.cross_entropy(s.l(x), y),
     loss=lambda m, x, e: m.sc(m.pre(x), torch.tensor([1, 7 if e.late else 2, 3])))  # fmt: skip
case("RReLU draws slopes", **layer(nn.RReLU))
case("AlphaDropout", **layer(lambda: nn.AlphaDropout(0.3)))
case("dropout in place", **layer(lambda: nn.Dropout(0.5, inplace=True)))
case("ReLU in place first in the scope", lambda s, x: s.l(functional.relu_(x)),
     use=lambda m, x: m.sc(m.pre(x)))  # fmt: skip
case("gumbel softmax", lambda s, x: functional.gumbel_softmax(s.l(x), hard=True) * x)
case("a lazy layer", lambda s, x: s.f(s.l(x)), lambda s: setattr(s, "f", nn.LazyLinear(4)),
     start=lambda m, e: m.sc.f(torch.ones(1, 4)))  # fmt: skip
case("stochastic depth by torch.bernoulli",
     lambda s, x: x + torch.bernoulli(torch.full((), 0.5)) * s.l(x))  # fmt: skip
case("stochastic depth by a branch",
     lambda s, x: x + s.l(x) if torch.rand(()) < 0.5 else x * 1.0)  # fmt: skip
case("a traced function within", lambda s, x: s.f(s.l(x)),
     lambda s: setattr(s, "f", torch.jit.trace(torch.tanh, torch.ones(3, 4))))  # fmt: skip

# ---- weights that are computed, pruned, adapted


def _old_weight_norm(s):
    s.f = torch.nn.utils.weight_norm(nn.Linear(4, 4))


def _old_spectral_norm(s):
    s.f = torch.nn.utils.spectral_norm(nn.Linear(4, 4))


computed = dict(forward=lambda s, x: s.f(s.l(x)))
case("the old weight_norm, a hook", **computed, init=_old_weight_norm)
case("the old spectral_norm, a hook", **computed, init=_old_spectral_norm)
case("spectral_norm", **computed,
     init=lambda s: setattr(s, "f", parametrizations.spectral_norm(nn.Linear(4, 4))))  # fmt: skip
case("spectral_norm goes to eval", **computed, change=lambda m, e: m.eval(),
     init=lambda s: setattr(s, "f", parametrizations.spectral_norm(nn.Linear(4, 4))))  # fmt: skip
case("an orthogonal parametrization", **computed,
     init=lambda s: setattr(s, "f", parametrizations.orthogonal(nn.Linear(4, 4))))  # fmt: skip
case("a parametrization is removed", **computed,
     init=lambda s: setattr(s, "f", parametrizations.weight_norm(nn.Linear(4, 4))),
     change=lambda m, e: parametrize.remove_parametrizations(m.sc.f, "weight"))  # fmt: skip


class Halves(nn.Module):
    def forward(self, weight):
        return weight * 0.5


case("a parametrization is registered", tanh,
     change=lambda m, e: parametrize.register_parametrization(
         m.sc.l, "weight", Halves()))  # fmt: skip
case("weights are pruned", tanh,
     change=lambda m, e: prune.l1_unstructured(m.sc.l, "weight", amount=0.5))  # fmt: skip


def _prune_again(m, e):
    prune.l1_unstructured(m.sc.l, "weight", amount=0.25)


case("pruned weights are pruned more", tanh,
     start=lambda m, e: prune.l1_unstructured(m.sc.l, "weight", amount=0.25),
     change=_prune_again)  # fmt: skip


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.scale, self.is_merged = base, 1.0, False
        self.a, self.b = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(4, 2))

    def forward(self, x):
        y = self.base(x)
        return y if self.is_merged else y + self.scale * (x @ self.a.t() @ self.b.t())

    def merge(self):
        with torch.no_grad():
            self.base.weight += self.scale * self.b @ self.a
        self.is_merged = True


case("an adapter is put around a layer", tanh,
     change=lambda m, e: setattr(m.sc, "l", LowRank(m.sc.l)))  # fmt: skip
case("an adapter's scale changes", lambda s, x: s.f(s.l(x)),
     lambda s: setattr(s, "f", LowRank(nn.Linear(4, 4))),
     change=lambda m, e: setattr(m.sc.f, "scale", 3.0))  # fmt: skip
case("an adapter is merged", lambda s, x: s.f(s.l(x)),
     lambda s: setattr(s, "f", LowRank(nn.Linear(4, 4))),
     change=lambda m, e: m.sc.f.merge())  # fmt: skip
case("weights are initialised again", tanh, change=lambda m, e: m.sc.l.reset_parameters())
case("all weights are frozen", tanh, change=lambda m, e: m.sc.requires_grad_(False))
case("weights go to bfloat16", lambda s, x: s.l(x.to(s.l.weight.dtype)).float(),
     change=lambda m, e: m.sc.bfloat16())  # fmt: skip
case("weights go to bfloat16 and back", tanh, change=lambda m, e: m.sc.bfloat16().float())
case("weights are tied to the eager layer's", tanh,
     change=lambda m, e: setattr(m.sc.l, "weight", m.pre.weight))  # fmt: skip
case("weights have always been tied to the eager layer's", tanh,
     start=lambda m, e: setattr(m.sc.l, "weight", m.pre.weight))  # fmt: skip


def _penalised(m, x, e):
    return plain_loss(m, x, e) + 0.1 * sum(p.square().sum() for p in m.parameters())


case("a penalty on weights, three microbatches", tanh, loss=_penalised, step=several(3))
case("a penalty on weights that ends", tanh, step=several(2),
     loss=lambda m, x, e: (_penalised if not e.late else plain_loss)(m, x, e))  # fmt: skip
case("a bias that only the loss uses", lambda s, x: x * s.l.weight.mean(),
     loss=lambda m, x, e: plain_loss(m, x, e) + m.sc.l.bias.sum(), step=several(2))  # fmt: skip

# ---- checkpointing


def _around(**options):
    return lambda m, x: checkpoint(m.sc, m.pre(x), **options)


case("checkpoint around the scope", tanh, use=_around(use_reentrant=False))
case("reentrant checkpoint around the scope", tanh, use=_around(use_reentrant=True))
case("checkpoint with dropout around the scope", lambda s, x: functional.dropout(s.l(x), 0.5),
     use=_around(use_reentrant=False))  # fmt: skip


def _checkpointed(m, x, e):
    return checkpoint(m.sc, m.pre(x), use_reentrant=False).mean()


def _mean(m, x, e):
    return m.sc(m.pre(x)).mean()


case("checkpoint begins at the fourth step", tanh,
     loss=other_from_fourth(_checkpointed, _mean))  # fmt: skip
case("checkpoint ends at the fourth step", tanh,
     loss=other_from_fourth(_mean, _checkpointed))  # fmt: skip
case("checkpoint inside the scope", lambda s, x: checkpoint(s.l, x, use_reentrant=False))
case("reentrant checkpoint inside the scope", lambda s, x: checkpoint(s.l, x, use_reentrant=True))
case("checkpoint with dropout inside the scope", lambda s, x: checkpoint(
    lambda y: functional.dropout(s.l(y), 0.5), x, use_reentrant=False))  # fmt: skip
case("checkpoint_sequential over scope and eager layer", tanh, use=lambda m, x: (
    checkpoint_sequential([m.pre, m.sc], 2, x, use_reentrant=False)))  # fmt: skip


# ---- statistics that a replay writes while an eager call waits for its backward


def _two_calls(m, x, e):
    first = m.sc(m.pre(x[:2] if e.late else x))
    return (first + m.sc(m.pre(x)).mean()).square().mean()


case("batch norm runs eagerly, and is replayed before the eager backward",
     lambda s, x: s.norm(s.l(x)), lambda s: setattr(s, "norm", nn.BatchNorm1d(WIDTH)),
     loss=_two_calls)  # fmt: skip
