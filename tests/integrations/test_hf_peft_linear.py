"""PEFT's LoRA on linear layers as one op: the numbers of PEFT's own forward, in graphs as well."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra peft")
from hf_families import tiny  # noqa: E402
from moe_graphs import GraphWarning  # noqa: E402
from moe_graphs.integrations.transformers import accelerate_model  # noqa: E402

TARGETS = ["q_proj", "v_proj", "o_proj"]


def with_lora(**options):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(tiny("llama", None), config)
    fill(model)
    return model.train()


def fill(model):
    """PEFT's B is zero at first, which would hide what it is multiplied by."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)


def loss_and_gradients(model, seed=2):
    tokens = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(seed))
    loss = model(input_ids=tokens, labels=tokens).loss
    trained = [p for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, trained, allow_unused=True)]


def check_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def of_linear_layers(accelerated):
    return [each for each in accelerated.changes if each.part == "lora"]


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_alpha": 3}])
def test_losses_and_gradients_are_those_of_peft(options):
    model = with_lora(**options)
    expected = loss_and_gradients(model)
    accelerated = accelerate_model(model, graphs=False)
    (change,) = of_linear_layers(accelerated)
    assert (change.done, change.count) == (True, 2 * len(TARGETS))
    check_close(loss_and_gradients(model), expected)
    accelerated.undo()
    assert all(map(torch.equal, loss_and_gradients(model), expected))


def test_they_can_be_left_to_peft():
    model = with_lora()
    assert not of_linear_layers(accelerate_model(model, adapters=False, graphs=False))


def test_dropout_draws_what_peft_draws():
    model = with_lora(lora_dropout=0.5)
    torch.manual_seed(5)
    expected = loss_and_gradients(model)
    accelerate_model(model, graphs=False)
    torch.manual_seed(5)
    check_close(loss_and_gradients(model), expected)


def test_several_adapters_add_up_and_switches_are_peft_s():
    model = with_lora()
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=TARGETS, lora_alpha=5))
    fill(model)
    states = [
        lambda: model.base_model.set_adapter(["default", "other"]),
        lambda: model.set_adapter("other"),
        model.disable_adapter_layers,
        model.enable_adapter_layers,
        model.merge_adapter,
        model.unmerge_adapter,
    ]
    plain = []
    for switch in states:
        switch()
        plain.append(model(input_ids=torch.arange(3, 19)[None]).logits.detach())
    accelerate_model(model, graphs=False)
    for switch, expected in zip(states, plain, strict=True):
        switch()
        found = model(input_ids=torch.arange(3, 19)[None]).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_no_plain_lora_stays_peft_s():
    model = with_lora(use_dora=True)
    expected = loss_and_gradients(model)
    (change,) = of_linear_layers(accelerate_model(model, graphs=False))
    assert not change.done
    assert "DoRA" in change.note
    check_close(loss_and_gradients(model), expected)


def test_a_hook_that_comes_later_runs_and_is_named():
    model = with_lora()
    accelerate_model(model, graphs=False)
    seen = []
    projection = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    projection.lora_A["default"].register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(GraphWarning, match="hooks or a forward on the layer within or on a factor"):
        loss_and_gradients(model)
    assert seen


def test_a_forward_of_others_on_the_layer_within_runs():
    """Accelerate replaces it for weights that lie elsewhere until they are needed."""
    model, seen = with_lora(), []
    projection = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    own = projection.base_layer.forward
    projection.base_layer.forward = lambda x: seen.append(1) or own(x)
    done, left = of_linear_layers(accelerate_model(model, graphs=False))
    assert (done.count, left.count, left.done) == (2 * len(TARGETS) - 1, 1, False)
    loss_and_gradients(model)
    assert seen


class Packed(torch.Tensor):
    """A weight of another library's class."""


def test_weights_that_are_no_plain_tensors_stay_peft_s():
    model = with_lora()
    base = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").base_layer
    packed = base.weight.detach().as_subclass(Packed)
    base.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert type(base.weight) is not torch.nn.Parameter
    (left,) = [each for each in of_linear_layers(accelerate_model(model, graphs=False))
               if not each.done]  # fmt: skip
    assert "no plain tensors" in left.note


def train(model, accelerated, between=lambda step: None):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(8):
        between(step)
        tokens = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(step))
        with accelerated.step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in trained)]


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.5}])
def test_graphs_change_no_bit(options):
    results = []
    for graphs in (False, True):
        model = with_lora(**options)
        torch.manual_seed(6)
        accelerated = accelerate_model(model, graphs=graphs)
        results.append(train(model, accelerated))
    assert all(map(torch.equal, *results))
    assert accelerated.graphs.report().eager_calls == {"warmup": 2 * 3}


@pytest.mark.filterwarnings("ignore::moe_graphs.errors.GraphWarning")
def test_an_adapter_that_is_switched_off_while_graphs_live_is_never_stale():
    def switching(model):
        return lambda step: step == 6 and model.disable_adapter_layers()

    results = []
    for graphs in (False, True):
        model = with_lora()
        accelerated = accelerate_model(model, graphs=graphs)
        model.get_base_model().enable_input_require_grads()
        results.append(train(model, accelerated, switching(model)))
    assert all(map(torch.equal, *results))
