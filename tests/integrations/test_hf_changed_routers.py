"""A router that is changed after the swap: the change takes effect, and somebody says so."""

from __future__ import annotations

import pytest
import torch

from moe_graphs import GraphConfig, GraphWarning
from moe_graphs.integrations.transformers import accelerate_model, swap_moe_layers
from moe_graphs.integrations.transformers.swapped_block import router_settings, settings_of
from moe_graphs.integrations.transformers.swapped_layers import _KINDS

pytest.importorskip("transformers", reason="needs the extra hf")
from transformers.models.qwen3_moe import modeling_qwen3_moe

from grids import by_turns
from hf_families import FAMILIES, loss_and_gradients, skip_unknown, tiny, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*chooses experts from now on")


def top_k(router):
    router.top_k = 1


def normalized(router):
    router.norm_topk_prob = not router.norm_topk_prob


def another_forward(router):
    forward = type(router).forward
    router.forward = lambda hidden: forward(router, 2 * hidden)


def another_class(router):
    class Doubled(type(router)):
        def forward(self, hidden):
            return super().forward(2 * hidden)

    router.__class__ = Doubled


def hook(router):
    router.register_forward_hook(lambda _, given, found: (found[0], found[1] / 2, found[2]))


def hook_before(router):
    router.register_forward_pre_hook(lambda _, given: (2 * given[0],))


PARTS = GraphConfig("moe_router,moe_preprocess")
CHANGES = {
    top_k: "its router's top_k is 1 now, not 2",
    normalized: "its router's norm_topk_prob is",
    another_forward: "its router has another forward now",
    another_class: "its router has another forward now",
    hook: "its router has hooks",
    hook_before: "its router has hooks",
}


def router_of(model):
    return model.model.layers[0].mlp.gate


def check_close(found, expected):
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-12)
        assert (found[name] - value).abs().max() <= 2e-5 * scale, name


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_router_that_is_changed_after_the_swap_takes_effect(change):
    model = tiny("qwen3_moe", "eager")
    before = loss_and_gradients(model, tokens())["logits"]
    change(router_of(model))
    expected = {n: v.clone() for n, v in loss_and_gradients(model, tokens()).items()}
    assert not torch.allclose(before, expected["logits"])
    model = tiny("qwen3_moe", "eager")
    changes = swap_moe_layers(model)
    assert changes.since() == []
    change(router_of(model))
    with pytest.warns(GraphWarning, match=CHANGES[change]):
        found = loss_and_gradients(model, tokens())
    check_close(found, expected)
    (line,) = changes.since()
    assert CHANGES[change] in line.note
    assert line.count == 1
    assert str(line) in str(changes)
    changes.undo()
    check_close(loss_and_gradients(model, tokens()), expected)


@pytest.mark.parametrize(
    ("change", "at", "scopes"),
    [
        *by_turns((top_k, normalized, another_forward, another_class), (0, 4), (True, PARTS)),
        (hook, 4, True),  # graphs hold no hooks: a capture says so
        pytest.param(hook, 4, PARTS, marks=pytest.mark.long),
    ],
)
def test_with_graphs_it_is_bitwise_the_same(change, scopes, at):
    runs = []
    for graphs in (False, scopes):
        model = tiny("qwen3_moe", "grouped_mm")
        accelerated, found = accelerate_model(model, graphs=graphs), []
        for number in range(6):
            if number == at:
                change(router_of(model))
            with accelerated.step():
                results = loss_and_gradients(model, tokens())
            found += [value.clone() for value in results.values()]
        runs.append(found)
    assert all(map(torch.equal, *runs))
    report = accelerated.graphs.report()
    counted = report.eager_calls.get("hooks" if change is hook else "attribute", 0)
    assert counted == (2 if at else 0)  # calls of one layer
    assert report.matched == 6 - counted


@pytest.mark.parametrize("graphs", [False, True])
def test_lora_on_routers_after_the_swap_has_an_effect_and_a_gradient(graphs):
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    runs = []
    for order in ("plain", "before", "after"):
        model = tiny("qwen3_moe", "eager")
        if order == "after":
            accelerated = accelerate_model(model, graphs=graphs)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_parameters=["mlp.gate.weight"], init_lora_weights=False
        )
        model = peft.get_peft_model(model, config)
        if order == "before":
            accelerated = accelerate_model(model, graphs=graphs)
        found = loss_and_gradients(model, tokens())
        runs.append({name: value.clone() for name, value in found.items()})
    expected, *others = runs
    gradients = [value for name, value in expected.items() if "lora" in name]
    assert len(gradients) == 4
    assert all(value.abs().max() > 0 for value in gradients)
    for found in others:
        assert found.keys() == expected.keys()
        check_close(found, expected)
    assert "its router is a ParamWrapper now" in str(accelerated)
    accelerated.undo()
    check_close(loss_and_gradients(model, tokens()), expected)


def test_a_forward_that_is_patched_in_the_class_takes_effect(monkeypatch):
    model = tiny("qwen3_moe", "eager")
    swap_moe_layers(model)
    before = loss_and_gradients(model, tokens())["logits"]
    kind = modeling_qwen3_moe.Qwen3MoeTopKRouter
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden: forward(self, 2 * hidden))
    assert not torch.allclose(model(tokens()).logits, before)


def test_noise_that_is_set_after_the_swap_is_an_error():
    model = tiny("mixtral", "eager")
    swap_moe_layers(model)
    block = model.model.layers[1].mlp
    assert block.jitter_noise == 0
    block.jitter_noise = 0.1
    with pytest.raises(ValueError, match="jitter_noise was set"):
        model(tokens())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_router_reads_is_compared(family):
    """A setting that the forward of a router names and that nobody compares would be ignored."""
    skip_unknown(family)
    for module in tiny(family, "eager").modules():
        if type(module).__name__ in _KINDS:
            router = getattr(module, "gate", None) or module.router
            code = getattr(type(router).forward, "__wrapped__", type(router).forward).__code__
            assert set(settings_of(router)) & set(code.co_names) <= set(router_settings(router))
