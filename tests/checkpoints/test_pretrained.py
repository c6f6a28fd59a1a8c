"""A model of transformers becomes ours, is trained, and becomes one of transformers again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_directories import CASES, FAMILIES, difference, logits, loss, saved
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig

# transformers saves the experts of a layer as one stack ("fused") or one by one.
WAYS_TO_SAVE = {"whole": {}, "fused": dict(save_original_format=False)}
WAYS_TO_SAVE["shards"] = dict(max_shard_size=100_000)


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case, tmp_path):
    directory, model = saved(case, tmp_path)
    ours = LanguageModel.from_pretrained(directory)
    assert difference(logits(ours), logits(model)) < 1e-5
    loss(model).backward()
    loss(ours).backward()
    want = dict(model.named_parameters())
    layer = want["model.layers.1.input_layernorm.weight"], ours.layers[1].attention_norm.weight
    outer = want["model.embed_tokens.weight"], ours.embedding.weight
    out = want["model.layers.0.self_attn.o_proj.weight"], ours.layers[0].attention.out.weight
    pairs = [layer, outer, out]
    if ours.layers[1].is_moe:
        name, moe = "model.layers.1.mlp.", ours.layers[1].moe
        pairs.append((want[f"{name}gate.weight"], moe.router.weight))
        pairs.append((want[f"{name}experts.gate_up_proj"], moe.experts.w1.transpose(1, 2)))
    for theirs, mine in pairs:
        grad = mine.grad if mine.is_leaf else moe.experts.w1.grad.transpose(1, 2)
        assert difference(grad, theirs.grad) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_save_is_the_same_model(case, tmp_path):
    state = None
    for way, options in WAYS_TO_SAVE.items():
        directory, _ = saved(case, tmp_path / way, **options)
        read = LanguageModel.from_pretrained(directory).state_dict()
        state = read if state is None else state
        assert all(torch.equal(read[name], state[name]) for name in state), way


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_transformers_byte_for_byte(case, tmp_path):
    directory, _ = saved(case, tmp_path / "theirs")
    LanguageModel.from_pretrained(directory).save_pretrained(tmp_path / "ours")
    theirs, ours = files(directory), files(tmp_path / "ours")
    assert ours.keys() == {"config.json", "model.safetensors"}
    assert {name: theirs[name] for name in ours} == ours


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_and_back(family, tmp_path):
    directory, model = saved(family, tmp_path / "theirs")
    ours = LanguageModel.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(loss(ours))
        losses[-1].backward()
        optimizer.step()
        ours.update_expert_bias()
    assert losses[-1] < 0.5 * losses[0]
    ours.save_pretrained(tmp_path / "ours", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert difference(logits(back), logits(ours)) < 1e-5
    assert difference(logits(back), logits(model)) > 0.1
    size = sum(file.stat().st_size for file in (tmp_path / "ours").glob("*.safetensors"))
    assert 0.9 * size < index["metadata"]["total_size"] < size
    again = LanguageModel.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(again), logits(ours))
    model.save_pretrained(tmp_path / "sharded", max_shard_size=100_000)
    want = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    assert want["metadata"] == index["metadata"]
    assert list(want["weight_map"]) == list(index["weight_map"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_our_own_is_read_by_transformers(family, tmp_path):
    directory, _ = saved(family, tmp_path / "theirs")
    ours = LanguageModel.from_pretrained(directory)
    ours.hf_values = None
    ours.save_pretrained(tmp_path / "ours")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert difference(logits(back), logits(ours)) < 1e-5


def test_dtypes(tmp_path):
    directory, model = saved("mixtral", tmp_path / "fp32")
    model.bfloat16().save_pretrained(tmp_path / "bf16")
    kept = LanguageModel.from_pretrained(tmp_path / "bf16")
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    cast = LanguageModel.from_pretrained(directory, dtype=torch.bfloat16)
    for name, tensor in kept.state_dict().items():
        assert torch.equal(tensor, cast.state_dict()[name])
    wide = LanguageModel.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    assert torch.equal(wide.head.weight, kept.head.weight.float())
    cast.save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == "bfloat16"
    ours, theirs = files(tmp_path / "ours"), files(tmp_path / "bf16")
    assert all(theirs[name] == ours[name] for name in ours)


def test_fields_that_we_do_not_use_are_written_back(tmp_path):
    directory, _ = saved("llama", tmp_path / "theirs")
    values = json.loads((directory / "config.json").read_text())
    values |= {"eos_token_id": [2, 5], "torch_dtype": "float16", "made_up": {"a": 1}}
    values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    del values["dtype"]
    (directory / "config.json").write_text(json.dumps(values))
    ours = LanguageModel.from_pretrained(directory, max_sequence_length=16)
    assert ours.rope.cos_SQ.shape[0] == 16
    ours.save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours/config.json").read_text())
    assert written == {**values, "torch_dtype": "float32"}
    ours.config = replace(ours.config, rope_theta=5.0)
    with pytest.raises(ValueError, match="set model.hf_values = None"):
        ours.save_pretrained(tmp_path / "ours")


def test_buffers_are_complete(tmp_path):
    directory, model = saved("deepseek_v3", tmp_path)
    ours = LanguageModel.from_pretrained(directory)
    router = ours.layers[1].moe.router
    assert router.tokens_per_expert.eq(0).all()
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert router.expert_bias.ne(0).all()
    assert torch.equal(router.expert_bias, bias)
    fresh = LanguageModel(ours.config)
    assert torch.equal(fresh.rope.cos_SQ, ours.rope.cos_SQ)
    assert torch.equal(fresh.rope.sin_SQ, ours.rope.sin_SQ)


def test_what_transformers_has_no_model_for_is_not_saved(tmp_path):
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=8)
    config = TransformerConfig(hidden_size=8, num_layers=1, num_heads=2, vocab_size=8, moe=moe)
    with pytest.raises(ValueError, match="shared_ffn_hidden_size=8 cannot be said"):
        LanguageModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="nothing to save"):
        LanguageModel(replace(config, moe=replace(moe, shared_ffn_hidden_size=0)), device="meta"
                      ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ValueError, match="max_shard_bytes must be positive"):
        LanguageModel(config).save_pretrained(tmp_path, max_shard_bytes=0)
    assert not list(tmp_path.iterdir())
