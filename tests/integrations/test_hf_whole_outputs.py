"""Every output flag of transformers in whole steps: bitwise as without a graph."""

from __future__ import annotations

import copy

import pytest
import torch

import moe_graphs
from moe_graphs.engine.guards.introspection import forward_hooks_of
from moe_graphs.integrations.transformers import accelerate_model

pytest.importorskip("transformers", reason="needs the extra hf")
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from grids import by_turns, longer
from hf_families import implementation_of, tiny, tokens

STEPS = 6
KEYS = ("router_logits", "hidden_states")
FLAGS = [(), ("output_router_logits",), ("output_hidden_states",), ("output_attentions",)]
FLAGS += [sum(FLAGS, ()), ("return_dict",)]
# transformers 5.17 counts tokens per expert by a function that reads its input on the host.
BALANCES_ON_THE_HOST = "bincount" in load_balancing_loss_func.__code__.co_names
NOTHING = dict(experts=False, norms=False, residuals=False, rotary=False, loss=False)


def run(flags, *, whole, family="qwen3_moe", between=None):
    """Losses that depend on all that is collected, and the parameters; the step's report."""
    model = tiny(family, implementation_of(family))
    accelerate_model(model, whole_steps=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)
    given = {flag: flag != "return_dict" for flag in flags}

    def step(ids):
        output = model(ids, labels=ids, **given)
        loss = output[0]
        if not isinstance(output, tuple):
            found = [tensor for key in KEYS for tensor in output.get(key) or ()]
            loss = loss + sum(tensor.square().mean() for tensor in found)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    called = moe_graphs.FullIteration(step, model=model, optimizer=optimizer) if whole else step
    losses = []
    for number in range(STEPS):
        if between is not None:
            between(model, number)
        losses.append(called(tokens().roll(number, 1)).clone())
    report = called.report() if whole else None
    return report, [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        ("+".join(sum(FLAGS[:4], ())), "qwen3_moe"),
        ("return_dict", "mixtral"),
        *longer(by_turns(["+".join(each) for each in FLAGS], ["qwen3_moe", "mixtral"])),
    ],
)
def test_a_flag_is_served_within_the_graph(flags, family):
    flags = tuple(filter(None, flags.split("+")))
    _, expected = run(flags, whole=False, family=family)
    if "output_router_logits" in flags and BALANCES_ON_THE_HOST:
        with pytest.warns(moe_graphs.GraphWarning, match="bincount reads values on the host"):
            run(flags, whole=True, family=family)
        return
    report, found = run(flags, whole=True, family=family)
    assert report.matched == STEPS - 3
    assert all(map(torch.equal, expected, found))


def test_a_flag_of_the_configuration_that_comes_and_goes():
    def between(model, number):
        model.config.output_router_logits = number == 4

    _, expected = run((), whole=False, between=between)
    report, found = run((), whole=True, between=between)
    assert all(map(torch.equal, expected, found))
    assert report.matched == 2


def test_hooks_are_there_while_they_collect_alone():
    model = tiny("qwen3_moe", "grouped_mm")
    flags = dict(output_router_logits=True, output_hidden_states=True)
    expected = model(tokens(), use_cache=False, **flags)
    accelerated = accelerate_model(model, **NOTHING, whole_steps=True)
    routers = [layer.mlp.gate for layer in model.model.layers]
    assert not any(map(forward_hooks_of, routers))
    copied = copy.deepcopy(model)
    now, of_copy = model(tokens(), **flags), copied(tokens(), **flags)
    assert not any(map(forward_hooks_of, routers))
    accelerated.undo()
    assert all(map(forward_hooks_of, routers))
    again = model(tokens(), use_cache=False, **flags)
    for key in KEYS:
        for found in (now, of_copy, again):
            assert len(found[key]) == len(expected[key])
            assert all(map(torch.equal, found[key], expected[key]))
