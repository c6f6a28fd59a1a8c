"""Models whose experts are packed while they are loaded: those of `quantize_experts`."""

from __future__ import annotations

import gc
import json
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra peft")
import transformers.core_model_loading as loading  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.quantizers import HfQuantizer  # noqa: E402

from hf_families import tiny, tokens  # noqa: E402
from moe_graphs.integrations.transformers import (  # noqa: E402
    ExpertsInFewBits,
    accelerate_model,
    adaptable_experts,
    quantize_experts,
)
from moe_graphs.integrations.transformers.packed_files import stored_of  # noqa: E402
from moe_graphs.integrations.transformers.quantized_experts import Packer  # noqa: E402
from moe_graphs.kernels.packed_weights import FORMATS  # noqa: E402
from moe_graphs.kernels.packed_weights.reference import DYNAMIC_VALUES, NF4_VALUES  # noqa: E402

# PEFT 0.18 says so of every module whose parameters it targets.
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
READS_FP8 = hasattr(HfQuantizer, "get_new_dtype")
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
    config.quantization_config = ExpertsInFewBits("fp8").to_dict()
    match = (
        "the files have no model.layers.0.mlp.experts.gate_up" if READS_FP8 else "casts the codes"
    )
    with pytest.raises(ValueError, match=match):
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
    ("name", "family"), [*((name, "qwen3_moe") for name in FORMATS), ("mxfp4", "gpt_oss")]
)
def test_experts_that_are_packed_already_get_adapters(name, family, tmp_path):
    """Adapters are those of a model that was whole when PEFT came; files go both ways."""
    model_of(family).save_pretrained(tmp_path / "model")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    given = dict(r=4, lora_alpha=8, target_modules=["o_proj"], task_type="CAUSAL_LM")
    config = peft.LoraConfig(target_parameters=targets, init_lora_weights=False, **given)

    def made(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).train()

    def gradients(model):
        accelerate_model(model, graphs=False)
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return named | {"loss": loss.detach()}

    whole, packed = made(load_whole(tmp_path / "model")), load(tmp_path / "model", name)
    quantize_experts(whole, name)
    state = packed.state_dict().keys()
    with adaptable_experts(packed):
        model = made(packed)
    assert {n.removeprefix("base_model.model.").replace(".base_layer", "")
            for n in model.state_dict() if "lora" not in n} == state  # fmt: skip
    model.save_pretrained(tmp_path / "adapters")
    again = load(tmp_path / "model", name)
    with adaptable_experts(again):
        again = peft.PeftModel.from_pretrained(again, tmp_path / "adapters", is_trainable=True)
    expected = gradients(whole)
    assert len(expected) == 13
    for found in map(gradients, (model, again)):
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.pop("loss"), expected["loss"])
        assert not [n for n, each in found.items() if not torch.equal(expected[n], each)]
    with pytest.raises(ValueError, match="LlamaForCausalLM has no packed experts"):
        with adaptable_experts(tiny("llama", None)):
            pass


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


# ---- files of bitsandbytes


def packed_by_bitsandbytes(matrix, kind):
    """Tensors of a matrix by their ends, as bitsandbytes saves them."""
    codes, absmax, *nested = (each.flatten() for each in kind.quantize(matrix[None]))
    state = dict(quant_type="nf4", blocksize=64, dtype="bfloat16", shape=[*matrix.shape])
    found = {"": codes[:, None], ".absmax": absmax, ".quant_map": torch.tensor(NF4_VALUES)}
    if nested:
        offset = dict(nested_blocksize=256, nested_dtype="float32")
        state |= offset | dict(nested_offset=nested[1][0].item())
        found |= {".nested_absmax": nested[0], ".nested_quant_map": torch.tensor(DYNAMIC_VALUES)}
    record = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    return found | {".quant_state.bitsandbytes__nf4": record}


def saved_by_bitsandbytes(directory, kind, **sizes):
    """A checkpoint whose linear layers are in NF4, but for the head and routers."""
    model_of(**sizes).save_pretrained(directory)
    (file,) = directory.glob("*.safetensors")
    weights, found = load_file(file), {}
    for name, each in weights.items():
        is_packed = name.endswith("_proj.weight")
        parts = packed_by_bitsandbytes(each, kind) if is_packed else {"": each}
        found |= {name + end: part.contiguous() for end, part in parts.items()}
    save_file(found, file, {"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(directory)
    config.quantization_config = ExpertsInFewBits(kind.name).to_dict()
    return config, weights


@pytest.mark.parametrize("name", ["nf4", "nf4_double"])
def test_files_of_bitsandbytes_are_read_code_for_code(name, tmp_path):
    kind = FORMATS[name]
    config, weights = saved_by_bitsandbytes(tmp_path, kind)
    given = dict(config=config, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    assert model.hf_quantizer.packed.layers == 2
    found = model.state_dict()

    def whole(name):
        return kind.dequantize(kind.quantize(weights[name][None]), torch.bfloat16)[0]

    for layer, decoder in enumerate(model.model.layers):
        prefix = f"model.layers.{layer}"
        q_proj = f"{prefix}.self_attn.q_proj.weight"
        assert torch.equal(found[q_proj], whole(q_proj))
        experts = [f"{prefix}.mlp.experts.{number}" for number in range(8)]
        joined = [
            torch.cat([whole(f"{each}.{part}_proj.weight") for part in ("gate", "up")])
            for each in experts
        ]
        packed = decoder.mlp.experts
        for full, expected in (
            ("gate_up_proj", torch.stack(joined)),
            ("down_proj", torch.stack([whole(f"{each}.down_proj.weight") for each in experts])),
        ):
            stored = [getattr(packed, full + end) for end in kind.suffixes]
            assert torch.equal(kind.dequantize(stored, torch.bfloat16), expected)
            assert not any(each.requires_grad for each in stored)
    assert torch.equal(found["lm_head.weight"], weights["lm_head.weight"])
    assert accelerate_model(model, graphs=False).model(input_ids=tokens()).logits.isfinite().all()


def test_files_of_bitsandbytes_that_say_otherwise_are_errors(tmp_path):
    config, _ = saved_by_bitsandbytes(tmp_path, FORMATS["nf4"])
    config.quantization_config = ExpertsInFewBits("nf4_double").to_dict()
    given = dict(config=config, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="conversion"):  # transformers logs what ours says
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    nf4, double = FORMATS["nf4"], FORMATS["nf4_double"]
    matrix = packed_by_bitsandbytes(torch.randn(8, 64), nf4)
    with pytest.raises(ValueError, match="the files have no nf4_double, but quant_type nf4, block"):
        stored_of(matrix, double)
    with pytest.raises(ValueError, match="another quant_map"):
        stored_of(matrix | {".quant_map": torch.zeros(16)}, nf4)


@pytest.mark.parametrize("name", ["nf4", "nf4_double"])
def test_records_are_those_that_bitsandbytes_saves(name):
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    kind, matrix = FORMATS[name], torch.randn(96, 192).bfloat16()
    options = dict(blocksize=64, quant_type="nf4", compress_statistics=name == "nf4_double")
    codes, state = functional.quantize_4bit(matrix, **options)
    saved = {f".{end}": each for end, each in state.as_dict(packed=True).items()} | {"": codes}
    found = kind.dequantize(stored_of(saved, kind), matrix.dtype)
    assert torch.equal(found[0], functional.dequantize_4bit(codes, state))


# ---- memory


def most_alive(monkeypatch, load):
    """The most bytes of weights in 16 bits that are alive whenever one has found its place."""
    most = 0

    def look():
        nonlocal most
        alive = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (torch.Tensor, torch.nn.Parameter)
            and each.device.type == "cpu"
            and each.dtype == torch.bfloat16
        }
        most = max(most, sum(alive.values()))

    def looking(function):
        def call(*args, **options):
            look()
            found = function(*args, **options)
            look()
            return found

        return call

    monkeypatch.setattr(loading, "set_param_for_module", looking(loading.set_param_for_module))
    monkeypatch.setattr(Packer, "place", looking(Packer.place))
    gc.collect()
    look()
    before, most = most, 0
    load()
    return most - before


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_never_there_in_16_bits(name, tmp_path, monkeypatch):
    """All layers but the one that is read: their experts are 24 of 25 parts of the model."""
    large = dict(num_hidden_layers=12, hidden_size=128, num_experts=16, vocab_size=128)
    model = model_of(**large)
    sizes = {n: p.nbytes for n, p in model.named_parameters()}
    experts = sum(size for n, size in sizes.items() if "experts" in n)
    model.save_pretrained(tmp_path)
    del model
    most = most_alive(monkeypatch, lambda: load(tmp_path, name))
    # A weight as it is read, as it is joined, and the scales of a whole layer.
    allowed = sum(sizes.values()) - experts + 4 * experts // 12
    assert most < allowed < experts / 2


@pytest.mark.parametrize("name", ["nf4", "nf4_double"])
def test_experts_of_bitsandbytes_are_never_there_in_16_bits(name, tmp_path, monkeypatch):
    config, weights = saved_by_bitsandbytes(tmp_path, FORMATS[name], num_hidden_layers=4)
    others = sum(each.nbytes for n, each in weights.items() if "experts" not in n)
    del weights
    given = dict(config=config, dtype=torch.bfloat16)
    auto = transformers.AutoModelForCausalLM
    most = most_alive(monkeypatch, lambda: auto.from_pretrained(tmp_path, **given))
    assert most <= others


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
reads_fp8 = pytest.mark.skipif(not READS_FP8, reason="needs transformers with get_new_dtype")
FP8_SIZES = dict(num_hidden_layers=2, hidden_size=128, moe_intermediate_size=128)


def in_blocks(matrix):
    """Codes and scales of a matrix as DeepSeek-V3 has them: blocks at the edges are cut off."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % 128, 0, -rows % 128))
    codes, scales = FORMATS["fp8"].quantize(padded[None])
    return codes[0, :rows, :columns].contiguous(), scales[0]


def saved_in_fp8(directory, family):
    """A directory whose projections are in FP8, and its configuration and tensors."""
    model_of(family, **FP8_SIZES).save_pretrained(directory)
    (file,) = directory.glob("*.safetensors")
    weights, found = load_file(file), {}
    for name, each in weights.items():
        is_packed = "_proj" in name and each.dim() == 2
        parts = in_blocks(each) if is_packed else (each,)
        found |= dict(zip((name, f"{name}_scale_inv"), parts, strict=False))
    save_file(found, file, {"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(directory)
    config.quantization_config = ExpertsInFewBits("fp8").to_dict()
    return config, found


@reads_fp8
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_in_fp8_files_are_read_code_for_code_and_the_rest_is_dequantised(family, tmp_path):
    config, files = saved_in_fp8(tmp_path, family)
    given = dict(config=config, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    assert model.hf_quantizer.packed.layers > 0
    found, prefix = model.state_dict(), "model.layers.1"
    whole_ones = [n for n in found if f"{n}_scale_inv" in files]
    assert any("self_attn" in name for name in whole_ones)
    for full in whole_ones:
        scales = torch.kron(files[f"{full}_scale_inv"], torch.ones(128, 128))
        codes = files[full].float()
        whole = codes * scales[: codes.shape[0], : codes.shape[1]]
        assert torch.equal(found[full], whole.bfloat16())
    for end in ("", "_scale_inv"):
        one = f"{prefix}.mlp.experts.5."
        parts = [files[f"{one}{name}_proj.weight{end}"] for name in ("gate", "up", "down")]
        joined = torch.cat([bits(each) for each in parts[:2]])
        assert torch.equal(bits(found[f"{prefix}.mlp.experts.gate_up_proj{end}"][5]), joined)
        assert torch.equal(bits(found[f"{prefix}.mlp.experts.down_proj{end}"][5]), bits(parts[2]))
    assert torch.equal(found["lm_head.weight"], files["lm_head.weight"])
    assert accelerate_model(model, graphs=False).model(input_ids=tokens()).logits.isfinite().all()


def test_fp8_files_in_other_blocks_are_errors():
    matrix = {"": torch.zeros(128, 256).to(torch.float8_e4m3fn), "_scale_inv": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"the files have no fp8, but weight torch.float8_e4m3fn"):
        stored_of(matrix, FORMATS["fp8"])
    with pytest.raises(ValueError, match=r"the files have no nf4, but weight torch.float8_e4m3fn"):
        stored_of(matrix, FORMATS["nf4"])
    half = {"": matrix[""][:64], "_scale_inv": torch.ones(1, 2)}
    with pytest.raises(ValueError, match=r"\(1, 64, 256\) does not divide by"):
        stored_of(half, FORMATS["fp8"])


def test_transformers_that_casts_the_codes_is_refused(tmp_path, monkeypatch):
    config, _ = saved_in_fp8(tmp_path, "qwen3_moe")
    monkeypatch.delattr(HfQuantizer, "get_new_dtype", raising=False)
    with pytest.raises(ValueError, match="casts the codes of files in FP8 .*: take a newer one"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


@reads_fp8
@pytest.mark.parametrize(
    "scales", [{}, {f"{Q_PROJ}_scale_inv": torch.ones(2, 2)}], ids=["none", "of other blocks"]
)
def test_fp8_files_whose_scales_do_not_fit_are_errors(scales, tmp_path):
    """The weight of an attention would otherwise be codes without their scales."""
    config, files = saved_in_fp8(tmp_path, "qwen3_moe")
    del files[f"{Q_PROJ}_scale_inv"]
    (file,) = tmp_path.glob("*.safetensors")
    save_file(files | scales, file, {"format": "pt"})
    with pytest.raises(RuntimeError, match="conversion"):  # transformers logs what ours says
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


@pytest.mark.filterwarnings("ignore:.*CUDA.*:UserWarning")
def test_fp8_files_are_read_as_they_are(tmp_path, monkeypatch):
    """Transformers itself reads them, on a GPU of today, which this machine only says to have."""
    model_of(num_hidden_layers=4).save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    weights, kind = load_file(file), FORMATS["fp8"]
    found, others = {}, 0
    for name, each in weights.items():
        is_packed = ".experts." in name
        parts = kind.quantize(each[None]) if is_packed else [each[None]]
        others += 0 if is_packed else each.nbytes
        found |= {name + end: part[0] for end, part in zip(kind.suffixes, parts, strict=False)}
    save_file(found, file, {"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    left = ["self_attn", "mlp.gate", "lm_head"]
    config.quantization_config = dict(
        quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=left
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model, auto = None, transformers.AutoModelForCausalLM
    given = dict(config=config, dtype=torch.bfloat16, device_map={"": "cpu"})

    def read():
        nonlocal model
        model = auto.from_pretrained(tmp_path, **given)

    assert most_alive(monkeypatch, read) <= others
    monkeypatch.undo()
    for layer, decoder in enumerate(model.model.layers):
        name = f"model.layers.{layer}.mlp.experts.5.down_proj.weight"
        assert torch.equal(bits(decoder.mlp.experts.down_proj[5]), bits(found[name]))
    report = str(accelerate_model(model.requires_grad_(False), graphs=False))
    assert "changed     4 FP8Experts: grouped GEMMs of weights dequantised" in report
