"""Models whose experts are packed while they are loaded: those of `quantize_experts`."""

from __future__ import annotations

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra peft")
from safetensors.torch import load_file, save_file  # noqa: E402

from hf_families import tiny, tokens  # noqa: E402
from moe_graphs.integrations.transformers import (  # noqa: E402
    ExpertsInFewBits,
    accelerate_model,
    quantize_experts,
)
from moe_graphs.kernels.packed_weights import FORMATS  # noqa: E402

WIDTHS = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128)


def model_of(family="qwen3_moe", **sizes):
    return tiny(family, "grouped_mm", **{**WIDTHS, **sizes}).bfloat16().requires_grad_(False)


def load(directory, format="nf4", **options):
    given = dict(dtype=torch.bfloat16, quantization_config=ExpertsInFewBits(format), **options)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **given)


def load_whole(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model.requires_grad_(False)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_are_those_of_a_model_that_was_loaded_whole(name, family, tmp_path):
    model_of(family).save_pretrained(tmp_path)
    model = load_whole(tmp_path)
    loaded, record = load(tmp_path, name), quantize_experts(model, name)
    assert loaded.hf_quantizer.packed == record
    found, expected = loaded.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert not [n for n, each in expected.items() if not torch.equal(bits(found[n]), bits(each))]


def test_gpt_oss_is_read_as_it_is_published(tmp_path):
    model_of("gpt_oss").save_pretrained(tmp_path)
    model = load_whole(tmp_path)
    record = quantize_experts(model, "mxfp4")
    (file,) = tmp_path.glob("*.safetensors")
    weights = model.state_dict()
    blocks = {n: w.unflatten(2, (-1, 16)) for n, w in weights.items() if n.endswith("_blocks")}
    save_file({n: w.contiguous() for n, w in (weights | blocks).items()}, file, {"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = ExpertsInFewBits("mxfp4").to_dict()
    given = dict(config=config, dtype=torch.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    assert loaded.hf_quantizer.packed == record
    found = loaded.state_dict()
    assert found.keys() == weights.keys()
    assert not [n for n, each in weights.items() if not torch.equal(bits(found[n]), bits(each))]
    assert not any(p.requires_grad for n, p in loaded.named_parameters() if "_blocks" in n)
    logits = [
        accelerate_model(m, graphs=False).model(input_ids=tokens()).logits for m in (model, loaded)
    ]
    assert torch.equal(*logits)
    config.quantization_config = ExpertsInFewBits("nf4").to_dict()
    with pytest.raises(ValueError, match="only mxfp4 is read as it is"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **given)


def test_adapters_beside_them_train_in_graphs_and_are_saved(tmp_path):
    model_of().save_pretrained(tmp_path / "model")

    def train(model):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["o_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config).train()
        accelerated = accelerate_model(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for _ in range(6):
            with accelerated.step():
                losses.append(model(input_ids=tokens(), labels=tokens()).loss)
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert accelerated.graphs.report().matched
        accelerated.undo()
        return model, torch.stack(losses).detach()

    whole = load_whole(tmp_path / "model")
    quantize_experts(whole)
    (model, found), (_, expected) = train(load(tmp_path / "model")), train(whole)
    assert torch.equal(found, expected)
    model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(load(tmp_path / "model"), tmp_path / "adapters")
    logits = [each.eval()(input_ids=tokens()).logits for each in (model, again)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        (dict(moe_intermediate_size=72), {}, r"down_proj: nf4 packs blocks of 64"),
        ({}, dict(device_map={"model": "disk", "lm_head": "cpu"}), "leaves weights on a disk"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_anything_is_read(
    sizes, options, message, tmp_path
):
    model_of(**sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, **options)


def test_a_format_that_does_not_exist():
    with pytest.raises(ValueError, match="nf4, nf4_double, mxfp4"):
        ExpertsInFewBits("int3")


def test_files_without_the_weights_are_an_error(tmp_path):
    model_of().save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    weights = {
        n: w for n, w in load_file(file).items() if not ("layers.1" in n and "down_proj" in n)
    }
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"the files have no model.layers.1.mlp.experts.down_proj"):
        load(tmp_path)


def test_a_dense_model_is_refused(tmp_path):
    tiny("llama", None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ExpertsInFewBits: LlamaForCausalLM has no experts"):
        load(tmp_path)


def test_the_whole_model_cannot_be_saved(tmp_path):
    model_of().save_pretrained(tmp_path)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="not serializable"):
        load(tmp_path).save_pretrained(tmp_path / "again")
