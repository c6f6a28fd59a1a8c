"""`accelerate_model(precision=, dense_precision=)`: transformers' models in FP8."""

from __future__ import annotations

import contextlib

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from hf_families import loss_and_gradients, tiny, tokens, trained
from moe_graphs.errors import GraphWarning
from moe_graphs.integrations.transformers import accelerate_model
from training_runs import DEVICES

SIZES = dict(hidden_size=128, head_dim=32, moe_intermediate_size=128, intermediate_size=128)
EXPERTS = "mlp.experts."


def built(precision="fp8", graphs=False, device="cpu", **sizes):
    model = tiny("qwen3_moe", "grouped_mm", **{**SIZES, **sizes}).to(device)
    if device == "cuda":
        model = model.to(torch.bfloat16)
    return model, accelerate_model(model, precision=precision, graphs=graphs)


def relative(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("precision", ["fp8", "fp8_rows"])
def test_gradients_are_those_of_the_model_to_the_precision_of_fp8(precision):
    expected = loss_and_gradients(tiny("qwen3_moe", "grouped_mm", **SIZES), tokens())
    model, accelerated = built(precision)
    (line,) = (each for each in accelerated.changes if each.part == "fp8")
    assert line.done
    assert line.count == 2
    found = loss_and_gradients(model, tokens())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(found[name], value) < 0.15, name
    of_experts = [name for name in expected if EXPERTS in name]
    assert len(of_experts) == 4
    assert all(relative(found[name], expected[name]) > 1e-3 for name in of_experts)
    accelerated.undo()
    again = loss_and_gradients(model, tokens())
    assert all(torch.equal(again[name], value) for name, value in expected.items())


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_are_bitwise_eager(device):
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("waits for a Hopper GPU")
    model, accelerated = built(graphs=True, device=device)
    found = trained(model, accelerated.step)
    assert accelerated.graphs.report().matched > 0
    expected = trained(built(device=device)[0], contextlib.nullcontext)
    assert all(map(torch.equal, found, expected))


def test_who_cannot_take_it_is_named():
    with pytest.raises(ValueError, match="has no experts to take it: .*128 must divide ffn_hidden"):
        built(moe_intermediate_size=96)
    with pytest.raises(ValueError, match="no MoE block of this model is on our stages"):
        accelerate_model(tiny("gpt_oss", "grouped_mm"), precision="fp8")
    with pytest.raises(ValueError, match="precision 'fp4' is unknown"):
        built("fp4")
    model = tiny("qwen3_moe", "grouped_mm", **SIZES)
    assert not any(each.part == "fp8" for each in accelerate_model(model, graphs=False).changes)


def test_adapters_on_experts_are_left_or_told():
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    lora = peft.LoraConfig(r=4, target_modules=["o_proj"], task_type="CAUSAL_LM",
                           target_parameters=["mlp.experts.down_proj"])  # fmt: skip
    model = peft.get_peft_model(tiny("qwen3_moe", "grouped_mm", **SIZES), lora)
    with pytest.raises(ValueError, match="LoRA beside them has products in the dtype"):
        accelerate_model(model, precision="fp8")
    model = peft.get_peft_model(built()[0], lora)
    with pytest.warns(GraphWarning, match="LoRA is beside experts that .* has put in FP8"):
        model(input_ids=tokens(), labels=tokens()).loss.backward()


# ---- projections

# All experts are chosen, so that no rounding decides between them.
DENSE = dict(**SIZES, num_hidden_layers=4, num_key_value_heads=4, num_experts=4,
             num_experts_per_tok=4)  # fmt: skip
INNER = ("layers.1.", "layers.2.")


def with_projections(family="llama", dense_precision="fp8", device="cpu", **options):
    model = tiny(family, None if family == "llama" else "grouped_mm", **DENSE).to(device)
    if device == "cuda":
        model = model.to(torch.bfloat16)
    return model, accelerate_model(model, dense_precision=dense_precision, **options)


@pytest.mark.parametrize("precision", ["fp8", "fp8_rows"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_projections_between_the_first_and_the_last_layer(family, precision):
    expected = loss_and_gradients(with_projections(family, "weights")[0], tokens())
    model, accelerated = with_projections(family, precision, graphs=False)
    (line,) = (each for each in accelerated.changes if each.part == "fp8")
    assert line.done
    assert line.count == 2 * (7 if family == "llama" else 4)  # projections of a layer
    found = loss_and_gradients(model, tokens())
    assert found.keys() == expected.keys()
    bound = 0.15 if family == "llama" else 0.35  # gradients of routers are small differences
    for name, value in expected.items():
        assert relative(found[name], value) < bound, name
    weights = [n for n in expected if "_proj" in n and ".experts." not in n]
    inner = [n for n in weights if any(each in n for each in INNER)]
    assert all(relative(found[name], expected[name]) > 1e-3 for name in inner)
    accelerated.undo()
    assert all(type(m) is torch.nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_of_projections_are_bitwise_eager(device):
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("waits for a Hopper GPU")
    model, accelerated = with_projections(device=device)
    found = trained(model, accelerated.step)
    assert accelerated.graphs.report().matched > 0
    model, _ = with_projections(device=device, graphs=False)
    expected = trained(model, contextlib.nullcontext)
    assert all(map(torch.equal, found, expected))


def test_generation_leaves_fp8():
    plain = tiny("llama", None, **DENSE).eval()
    model, _ = with_projections(graphs=False)
    model.eval()
    given = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, use_cache=True)
    prompt = tokens()[:, :1]  # nothing is computed before the first token
    assert torch.equal(model.generate(prompt, **given), plain.generate(prompt, **given))


def test_a_bias_is_added_and_trained():
    model = tiny("llama", None, **DENSE, attention_bias=True)
    accelerate_model(model, dense_precision="fp8", graphs=False)
    linear = model.model.layers[1].self_attn.q_proj
    rows = torch.randn(2, 3, 128)
    linear.bias.data.fill_(7.0)
    torch.testing.assert_close(linear(rows).mean(), torch.tensor(7.0), rtol=0.05, atol=0)
    loss_and_gradients(model, tokens())
    assert linear.bias.grad.abs().sum() > 0


def test_projections_with_adapters_and_odd_sizes_are_left():
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("llama", None, **DENSE), lora)
    accelerated = accelerate_model(model, dense_precision="fp8", graphs=False)
    (line,) = (each for each in accelerated.changes if each.part == "fp8")
    assert line.count == 2 * 6  # all but q_proj
    narrow = tiny("llama", None, **{**DENSE, "intermediate_size": 96})
    changes = accelerate_model(narrow, dense_precision="fp8", graphs=False).changes
    lines = [each for each in changes if each.part == "fp8"]
    counts = {(each.done, each.count) for each in lines}
    assert counts == {(True, 2 * 4), (False, 2 * 2), (False, 2)}
    assert any("128 must divide" in each.note for each in lines)


def test_a_model_without_inner_layers_is_an_error():
    for layers, why in ((2, "no linear layer between two others"), (3, "128 must divide")):
        sizes = dict(hidden_size=96, head_dim=24, intermediate_size=96) if layers == 3 else {}
        model = tiny("llama", None, **{**DENSE, "num_hidden_layers": layers, **sizes})
        with pytest.raises(ValueError, match=f"has no projection to take it: .*{why}"):
            accelerate_model(model, dense_precision="fp8")
    with pytest.raises(ValueError, match="precision 'fp4' is unknown"):
        with_projections(dense_precision="fp4")
