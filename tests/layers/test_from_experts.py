"""A user's MoE block becomes a MoELayer and back; other blocks are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from moe_graphs.layers import MoELayer

D, F, E, K = 8, 12, 4, 2
NAMES = [
    ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate", "up", "down"),
    ("w_gate", "w_up", "w_down"), ("gate_up_proj", "down_proj"), ("gate_up", "down"),
]  # fmt: skip


class Expert(nn.Module):
    def __init__(
        self, names=("gate_proj", "up_proj", "down_proj"), bias=False, act=functional.silu
    ):
        super().__init__()
        self.names, self.act = names, act
        for name in names[:-1]:
            setattr(self, name, nn.Linear(D, 2 * F // (len(names) - 1), bias=bias))
        setattr(self, names[-1], nn.Linear(F, D, bias=bias))

    def forward(self, x):
        *gate_up, down = (getattr(self, name) for name in self.names)
        gate, up = torch.cat([each(x) for each in gate_up], -1).chunk(2, -1)
        return down(self.act(gate) * up)


class Stacked(nn.Module):
    def __init__(self, w1_E2FD, w2_EDF):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(w1_E2FD), nn.Parameter(w2_EDF)


def experts(**kwargs) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Expert(**kwargs) for _ in range(E))


def router() -> nn.Linear:
    return nn.Linear(D, E, bias=False)


def by_hand(experts, router, x, top_k=K):
    weights, chosen = router(x).softmax(-1).topk(top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    output = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for slot in range(top_k):
            output[token] += weights[token, slot] * experts[chosen[token, slot]](x[token])
    return output


@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_a_module_list_computes_the_same_and_comes_back(names):
    theirs, gate, x = experts(names=names), router(), torch.randn(9, D)
    before = torch.get_rng_state()
    layer = MoELayer.from_experts(theirs, gate, top_k=K)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(layer(x).hidden, by_hand(theirs, gate, x))
    others, other_gate = experts(names=names), router()
    for parameter in others.parameters():
        nn.init.zeros_(parameter)
    layer.copy_to_experts(others, other_gate)
    for copied, original in zip(others.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(copied, original)
    assert torch.equal(other_gate.weight, gate.weight)


def test_gradients_are_those_of_the_block():
    theirs, gate, x = experts(), router(), torch.randn(9, D)
    layer = MoELayer.from_experts(theirs, gate, top_k=K)
    layer(x).hidden.square().sum().backward()
    by_hand(theirs, gate, x).square().sum().backward()
    torch.testing.assert_close(layer.router.weight.grad, gate.weight.grad)
    gates = torch.stack([each.gate_proj.weight.grad.T for each in theirs])
    torch.testing.assert_close(layer.experts.w1.grad[..., :F], gates)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_stacked_weights(transposed, as_module, apart):
    theirs, gate, x = experts(), router(), torch.randn(9, D)
    stacks = {
        name: torch.stack([getattr(each, name).weight.detach() for each in theirs])
        for name in NAMES[0]
    }
    if not apart:
        both = torch.cat([stacks.pop("gate_proj"), stacks.pop("up_proj")], dim=1)
        stacks = {"gate_up_proj": both, **stacks}
    if transposed:
        stacks = {name: stack.transpose(1, 2).contiguous() for name, stack in stacks.items()}
    given = nn.ParameterDict(stacks) if as_module else stacks
    layer = MoELayer.from_experts(given, gate.weight, top_k=K)
    torch.testing.assert_close(layer(x).hidden, by_hand(theirs, gate, x))
    with torch.no_grad():
        layer.experts.w2.mul_(2)
    layer.copy_to_experts(given)
    doubled = torch.stack([2 * each.down_proj.weight.detach() for each in theirs])
    assert torch.equal(given["down_proj"], doubled.mT if transposed else doubled)


def test_options_dtypes_and_names_of_ones_own():
    theirs = experts(names=("inner_gate", "inner", "outer")).to(torch.bfloat16)
    names = ("inner_gate", "inner", "outer")
    layer = MoELayer.from_experts(
        theirs, router(), top_k=1, names=names, normalize_top_k=False, aux_loss_coef=0.1
    )
    assert layer.config.normalize_top_k is False
    assert layer.experts.w1.dtype == torch.bfloat16
    assert layer.router.weight.dtype == torch.float32
    assert layer(torch.randn(5, D, dtype=torch.bfloat16)).aux_loss > 0
    layer.copy_to_experts(theirs, names=names)


REFUSED = {
    "has a bias": lambda: (experts(bias=True), router()),
    "the router has a bias": lambda: (experts(), nn.Linear(D, E)),
    "expert 0 .Expert. does not compute down": lambda: (experts(act=functional.gelu), router()),
    "'gate', 'up', 'down'.* cannot be converted": lambda: (experts(names=(*"abc",)), router()),
    "4 experts, but the router scores 5": lambda: (experts(), nn.Linear(D, 5, bias=False)),
    "has weights of shapes": lambda: (experts(), nn.Linear(D + 1, E, bias=False)),
    "no weight of shape": lambda: (experts(), nn.ReLU()),
    "does not say which dimension": lambda: (
        Stacked(torch.randn(E, 2 * D, D), torch.randn(E, D, D)), router()
    ),
    "stacked weights have shapes": lambda: (
        Stacked(torch.randn(2 * F, D), torch.randn(D, F)), router()
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_swiglu_expert_is_refused(message):
    theirs, gate = REFUSED[message]()
    with pytest.raises(ValueError, match=message):
        MoELayer.from_experts(theirs, gate, top_k=K)
