"""Experts in few bits: those of dequantised weights, in graphs, with PEFT, saved, refused."""

from __future__ import annotations

import copy
import pickle
import weakref
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra peft")
import moe_graphs  # noqa: E402
from grids import by_pairs, by_turns  # noqa: E402
from hf_families import Texts, tiny, tokens  # noqa: E402
from moe_graphs.integrations.transformers import (  # noqa: E402
    GraphCallback,
    accelerate_model,
    quantize_experts,
    register,
    swap_moe_layers,
)
from moe_graphs.integrations.transformers.packing import WEIGHTS, packing_of  # noqa: E402
from moe_graphs.kernels.packed_weights import FORMATS  # noqa: E402

# PEFT 0.18 says so of every module whose parameters it targets.
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
WIDTHS = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
TARGETS = [f"mlp.experts.{name}" for name in WEIGHTS]
STEPS = 6


def built(family="qwen3_moe", lora=True, **options):
    """A model whose experts are frozen: with LoRA, or with embeddings that train."""
    model = tiny(family, "grouped_mm", **WIDTHS)
    if not lora:
        model.requires_grad_(False)
        model.get_input_embeddings().weight.requires_grad_(True)
        return model
    torch.manual_seed(1)
    given = dict(r=4, lora_alpha=8, target_modules=["o_proj"], target_parameters=TARGETS)
    given |= dict(task_type="CAUSAL_LM", init_lora_weights=False) | options
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def experts_of(model):
    return [m for m in model.modules() if hasattr(type(m), "_apply_gate")]


def dequantized(model, name):
    """The model whose experts have the values that the format leaves."""
    kind = FORMATS[name]
    for experts in experts_of(model):
        for each in WEIGHTS:
            weight = getattr(experts, each).data
            turned = kind.along_inputs and experts.is_transposed
            stored = weight.transpose(1, 2) if turned else weight
            values = kind.dequantize(kind.quantize(stored), weight.dtype)
            weight.copy_(values.transpose(1, 2) if turned else values)
    return model


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(
    ("name", "family", "lora"), by_pairs(list(FORMATS), list(FAMILIES), [False, True])
)
def test_losses_and_gradients_are_those_of_dequantised_weights(name, family, lora):
    expected, model = dequantized(built(family, lora), name), built(family, lora)
    quantize_experts(model, name)
    for each in (expected, model):
        accelerate_model(each, graphs=False)
    found, wanted = loss_and_gradients(model), loss_and_gradients(expected)
    if (name, family) == ("mxfp4", "gpt_oss"):  # whose dense weights lie the other way round
        torch.testing.assert_close(found, wanted)
    else:
        check_equal(found, wanted)
    assert len(found) == (13 if lora else 2)


@pytest.mark.parametrize("lora", [False, True], ids=["frozen", "LoRA"])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_accelerate_model_as_well(family, lora):
    expected, model = dequantized(built(family, lora), "nf4"), built(family, lora)
    quantize_experts(model)
    if lora:
        accelerate_model(expected, graphs=False)
        for name, value in loss_and_gradients(expected).items():
            torch.testing.assert_close(loss_and_gradients(model)[name], value)
        return
    expected.set_experts_implementation(register())
    check_equal(loss_and_gradients(model), loss_and_gradients(expected))


def train(model, accelerated):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(STEPS):
        with accelerated.step():
            loss = model(input_ids=tokens(), labels=tokens()).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("checkpointing", "family"), by_turns([False, True], ["qwen3_moe", "gpt_oss"])
)
def test_graphs_change_no_bit(family, checkpointing):
    results = []
    for graphs in (False, True):
        model = built(family)
        print(quantize_experts(model))
        if checkpointing:
            model.enable_input_require_grads()
            options = {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        accelerated = accelerate_model(model, graphs=graphs)
        results.append(train(model, accelerated))
    assert all(map(torch.equal, *results))
    report = accelerated.graphs.report()
    assert report.matched == 2 * (STEPS - 3)
    assert set(report.eager_calls) <= {"warmup", "recompute"}, report.eager_calls


def test_memory_of_the_weights_is_free_and_what_is_printed_is_what_is_there():
    model = built()
    weights = [getattr(each, name) for each in experts_of(model) for name in WEIGHTS]
    before, gone = sum(w.nbytes for w in weights), list(map(weakref.ref, weights))
    del weights
    done = quantize_experts(model)
    assert not [each for each in gone if each() is not None]
    packed = [p for each in experts_of(model) for p in each.parameters()]
    assert done.bytes_before == before
    assert done.bytes_after == sum(p.nbytes for p in packed)
    assert done.bytes_after == before * 4.5 / 32  # of fp32
    assert done.scratch_bytes == before / 2 * 2 / 3  # one layer's gate and up
    assert "experts of 2 layers in nf4" in str(done)
    loss_and_gradients(model)
    (scratch,) = {packing_of(each).scratch for each in experts_of(model)}
    assert [m.nbytes for made in scratch._memory.values() for m in made] == [done.scratch_bytes]


def test_state_is_saved_packed_and_loaded():
    model, other = built(), built()
    other_experts = experts_of(other)
    for each in other_experts:
        each.gate_up_proj.data.normal_()
    for each in (model, other):
        quantize_experts(each)
    state = model.state_dict()
    assert {state[n].dtype for n in state if n.endswith("gate_up_proj_codes")} == {torch.uint8}
    assert not [n for n in state if n.endswith(WEIGHTS)]
    other.load_state_dict(state)
    check_equal(loss_and_gradients(other), loss_and_gradients(model))
    with pytest.raises(RuntimeError, match="Missing key.*gate_up_proj_absmax"):
        other.load_state_dict({n: t for n, t in state.items() if "absmax" not in n})


def test_a_model_without_memory_takes_a_packed_state():
    model = built(lora=False)
    expected = loss_and_gradients(quantized(copy.deepcopy(model)))
    state = quantized(copy.deepcopy(model)).state_dict()
    empty = quantized(copy.deepcopy(model).to("meta"))
    assert all(each.is_meta for each in empty.parameters())
    empty.load_state_dict(state, assign=True)
    empty.model.rotary_emb = model.model.rotary_emb  # its buffers are in no state
    empty.get_input_embeddings().weight.requires_grad_(True)
    check_equal(loss_and_gradients(empty), expected)


def quantized(model, name="nf4", **options):
    quantize_experts(model, name, **options)
    return model


def test_copies_and_pickles_have_a_scratch_of_their_own():
    model = quantized(built(lora=False))
    expected = loss_and_gradients(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        numbers = {packing_of(each).scratch.number for each in experts_of(made)}
        assert len(numbers) == 1
        assert numbers != {packing_of(each).scratch.number for each in experts_of(model)}
        check_equal(loss_and_gradients(made), expected)


def test_undo_leaves_packed_experts_that_work():
    model = quantized(built())
    before = loss_and_gradients(model)
    accelerated = accelerate_model(model, graphs=False)
    assert len(list(swap_moe_layers(model).changes)) == 1
    accelerated.undo()
    check_equal(loss_and_gradients(model), before)


def test_adapters_are_switched_off_and_saved_as_those_of_peft(tmp_path):
    model, plain = quantized(built()), built()
    accelerate_model(model, graphs=False)
    with torch.no_grad(), model.disable_adapter():
        without = model(input_ids=tokens(), labels=tokens()).loss
    expected = accelerated_loss(dequantized(built(), "nf4"))
    assert torch.equal(without, expected)
    for each, name in ((model, "ours"), (plain, "plain")):
        each.save_pretrained(tmp_path / name)
    load = pytest.importorskip("safetensors.torch").load_file
    found, theirs = (load(tmp_path / n / "adapter_model.safetensors") for n in ("ours", "plain"))
    check_equal(found, theirs)


def accelerated_loss(model):
    accelerate_model(model, graphs=False)
    with torch.no_grad(), model.disable_adapter():
        return model(input_ids=tokens(), labels=tokens()).loss


def test_what_needs_a_sum_of_weights_is_an_error():
    model = quantized(built())
    with pytest.raises(AttributeError, match="cannot merge .* load them beside experts in bf16"):
        model.merge_adapter()
    for accelerate in (False, True):
        if accelerate:
            accelerate_model(model, graphs=False)
        handle = next(m for m in model.modules() if packing_of(m)).register_forward_hook(print)
        with pytest.raises(ValueError, match="hooks .* experts in few bits have no weights to add"):
            loss_and_gradients(model)
        handle.remove()


def test_a_cast_of_the_model_that_rounds_scales_is_an_error():
    model = quantized(built())
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="choose the dtype before quantize_experts"):
        loss_and_gradients(model)


def test_what_cannot_be_packed_is_an_error_and_changes_nothing():
    model = built(lora=False)
    with pytest.raises(
        ValueError, match="no format 'int8' .* known are nf4, nf4_double, mxfp4, fp8"
    ):
        quantize_experts(model, "int8")
    model.model.layers[1].mlp.experts.requires_grad_(True)
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts .* requires gradients.* PEFT"):
        quantize_experts(model)
    assert not [m for m in model.modules() if packing_of(m)]
    model.requires_grad_(False)
    quantize_experts(model)
    with pytest.raises(ValueError, match="are in few bits already"):
        quantize_experts(model)
    narrow = tiny("qwen3_moe", "grouped_mm").requires_grad_(False)
    with pytest.raises(ValueError, match=r"down_proj: nf4 packs blocks of 64 .*\(8, 64, 32\)"):
        quantize_experts(narrow)
    with pytest.raises(ValueError, match="fp8 packs blocks of 128x128"):
        quantize_experts(narrow, "fp8")
    swapped = built(lora=False)
    accelerate_model(swapped, graphs=False)
    with pytest.raises(ValueError, match="accelerated already"):
        quantize_experts(swapped)
    with pytest.raises(ValueError, match="no experts of transformers' interface"):
        quantize_experts(torch.nn.Linear(2, 2))
    other = tiny("nemotron_h", "grouped_mm", **WIDTHS).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameters gate_up_proj and down_proj|activation"):
        quantize_experts(other)


@pytest.mark.filterwarnings("ignore:target_parameters:RuntimeWarning")  # PEFT says so as well
def test_adapters_on_experts_that_are_packed_already_are_an_error():
    model = quantized(built(lora=False))
    options = dict(r=4, target_modules=["o_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, peft.LoraConfig(target_parameters=TARGETS, **options))
    with pytest.raises(ValueError, match="apply PEFT before quantize_experts"):
        accelerate_model(model)
    model = peft.get_peft_model(quantized(built(lora=False)), peft.LoraConfig(**options))
    accelerated = accelerate_model(model)
    train(model, accelerated)
    assert accelerated.graphs.report().matched == 2 * (STEPS - 3)


def test_weights_in_fp8_have_their_names_so_peft_may_come_later():
    model = quantized(built(lora=False), "fp8")
    torch.manual_seed(1)
    options = dict(r=4, target_modules=["o_proj"], target_parameters=TARGETS)
    options |= dict(task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    if any(p.dtype == torch.float8_e4m3fn for n, p in model.named_parameters() if "lora" in n):
        pytest.skip(f"PEFT {peft.__version__} makes adapters in the dtype of the weights")
    accelerate_model(model, graphs=False)
    expected = dequantized(built(), "fp8")
    expected.load_state_dict({n: p for n, p in model.state_dict().items() if "lora" in n}, False)
    accelerate_model(expected, graphs=False)
    check_equal(loss_and_gradients(model), loss_and_gradients(expected))
    with pytest.raises(RuntimeError, match="Float8"):
        model.merge_adapter()


def replaced(experts):
    doubled = experts.gate_up_proj_absmax * 2
    experts.gate_up_proj_absmax = torch.nn.Parameter(doubled, requires_grad=False)


def multiplied(experts):
    experts.gate_up_proj_absmax.data.mul_(2)


def in_another_dtype(experts):
    experts.packing = replace(experts.packing, dtype=torch.bfloat16)


def assigned(experts):
    state = {n: t * 2 if n.endswith("absmax") else t for n, t in experts.state_dict().items()}
    experts.load_state_dict(state, assign=True)


@pytest.mark.filterwarnings("ignore::moe_graphs.errors.GraphWarning")  # says what was replaced
@pytest.mark.parametrize(
    "change",
    [
        replaced,  # what loading assigns is replaced as well
        multiplied,
        pytest.param(in_another_dtype, marks=pytest.mark.long),
        pytest.param(assigned, marks=pytest.mark.long),
    ],
)
def test_packed_weights_that_change_while_graphs_live_are_never_stale(change):
    results = []
    for graphs in (False, True):
        model = quantized(built())
        accelerated = accelerate_model(model, graphs=graphs)
        before = train(model, accelerated)
        for experts in [m for m in model.modules() if packing_of(m)]:
            change(experts)
        results.append([*before, *train(model, accelerated)])
    assert all(map(torch.equal, *results))
    assert accelerated.graphs.report().matched == 2 * (STEPS - 3) + (2 * STEPS) * (
        change is multiplied
    )


def test_whole_steps_change_no_bit():
    def trained(graphed):
        model = quantized(built())
        accelerate_model(model, whole_steps=True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

        def step(ids):
            optimizer.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            return loss

        run = moe_graphs.FullIteration(step, model=model, optimizer=optimizer) if graphed else step
        return [run(tokens()).detach().clone() for _ in range(STEPS)], run

    losses, run = trained(True)
    assert all(map(torch.equal, losses, trained(False)[0]))
    assert run.report().replayed


@pytest.mark.filterwarnings("ignore:.*use_cache")
def test_trainer_trains_adapters_beside_packed_experts(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    options = dict(max_steps=STEPS, save_steps=STEPS, per_device_train_batch_size=2, use_cpu=True)
    options |= dict(report_to="none", disable_tqdm=True, logging_steps=1, learning_rate=1e-3)
    results = []
    for graphs in (False, True):
        model, callback = quantized(built()), GraphCallback(graphs=graphs)
        arguments = transformers.TrainingArguments(str(tmp_path), **options)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Texts(20), callbacks=[callback]
        )
        trainer.train()
        results.append([p.detach() for p in model.parameters() if p.requires_grad])
        assert bool(callback.report.replayed) == graphs
    assert all(map(torch.equal, *results))
    saved = {path.name for path in (tmp_path / f"checkpoint-{STEPS}").iterdir()}
    assert "adapter_model.safetensors" in saved
    assert not [name for name in saved if name.startswith(("model", "pytorch_model"))]


# ---- experts that transformers has quantised


def with_fp8_experts(model, **options):
    """The model with transformers' ``FP8Experts`` of the same values in place of its experts."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
        pytest.skip(f"transformers {transformers.__version__} has no interface of FP8Experts")
    from transformers.integrations.moe import use_experts_implementation

    interface = fp8.ALL_FP8_EXPERTS_FUNCTIONS
    kind = use_experts_implementation(experts_class=fp8.FP8Experts, experts_interface=interface)
    for layer in model.model.layers:
        block = layer.mlp
        made = kind(config=model.config, **{"block_size": (128, 128), **options})
        for name in WEIGHTS:
            weight, scales = getattr(made, name), getattr(made, f"{name}_scale_inv")
            codes, scale_inv = FORMATS["fp8"].quantize(getattr(block.experts, name).data)
            weight.data = codes
            scales.data = scale_inv if "block_size" not in options else scales.data
        block.experts = made.requires_grad_(False)
    return model


def test_fp8_experts_of_transformers_are_read_as_they_are():
    expected = dequantized(built(lora=False), "fp8")
    expected.set_experts_implementation(register())
    model = with_fp8_experts(built(lora=False))
    accelerated = accelerate_model(model, graphs=False)
    assert "changed     2 FP8Experts: grouped GEMMs of weights dequantised" in str(accelerated)
    found = loss_and_gradients(model)
    torch.testing.assert_close(found, loss_and_gradients(expected))
    model.zero_grad()
    again = with_fp8_experts(built(lora=False))
    results = [train(again, accelerate_model(again)), train(model, accelerated)]
    assert all(map(torch.equal, *results))
    accelerated.undo()
    assert not [m for m in model.modules() if packing_of(m)]


def test_fp8_experts_of_another_block_are_left_by_name():
    model = with_fp8_experts(built(lora=False), block_size=(64, 64))
    accelerated = accelerate_model(model, graphs=False)
    assert "left        2 FP8Experts: fp8: scales" in str(accelerated)
    with pytest.raises(ValueError, match=r"gate_up_proj is a Parameter of torch.float8_e4m3fn"):
        quantize_experts(model)


def test_swizzled_mxfp4_experts_are_left_by_name():
    model = built(lora=False)

    class Mxfp4GptOssExperts(torch.nn.Module):
        pass

    model.beside = Mxfp4GptOssExperts()
    accelerated = accelerate_model(model, graphs=False)
    assert "Mxfp4GptOssExperts: its weights lie as triton_kernels swizzles them" in str(accelerated)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu_graphs_replay_over_a_poisoned_scratch(name, deterministic):
    """bf16 with LoRA: losses and parameters with graphs, without, and of dequantised weights."""
    results = []
    for kind in ("dense", "eager", "graphs"):
        model = built().to("cuda", torch.bfloat16)
        if kind == "dense":
            dequantized(model, name)
        else:
            quantize_experts(model, name)
        accelerated = accelerate_model(model, graphs=kind == "graphs")
        results.append(train_on_gpu(model, accelerated))
    assert all(map(torch.equal, *results[1:]))
    assert all(map(torch.equal, *results[:2]))
    report = accelerated.graphs.report()
    assert report.matched == 2 * (STEPS - 3), str(report)


def train_on_gpu(model, accelerated):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scratches = {p.scratch for m in model.modules() if (p := packing_of(m))}
    losses, ids = [], tokens("cuda")
    for _ in range(STEPS):
        for scratch in scratches:
            scratch.at((scratch.nbytes,), torch.uint8, ids.device).fill_(255)
        with accelerated.step():
            loss = model(input_ids=ids, labels=ids).loss
            for scratch in scratches:
                scratch.at((scratch.nbytes,), torch.uint8, ids.device).fill_(255)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    trained = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    return [*losses, *trained]


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, "cuda"], ids=["there", "from the CPU"])
def test_on_a_gpu_the_memory_of_the_weights_is_free(device):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = built(lora=False).to(torch.bfloat16)
    if device is None:
        model.cuda()
    done = quantize_experts(model, device=device)
    model.cuda()
    others = sum(p.nbytes for n, p in model.named_parameters() if ".experts." not in n)
    taken = torch.cuda.memory_allocated() - before
    assert taken <= done.bytes_after + others + (1 << 16)
    assert all(p.is_cuda for each in experts_of(model) for p in each.parameters())
