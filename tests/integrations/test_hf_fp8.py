"""`accelerate_model(precision=)`: experts of transformers' models in FP8."""

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
