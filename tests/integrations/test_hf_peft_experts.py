"""PEFT's LoRA on experts: in either order PEFT's numbers, adapters switched, merged and saved."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra peft")
from hf_families import tiny  # noqa: E402
from moe_graphs.errors import GraphWarning  # noqa: E402
from moe_graphs.integrations.peft import lora_of, wrappers_around  # noqa: E402
from moe_graphs.integrations.transformers import accelerate_model  # noqa: E402
from moe_graphs.integrations.transformers.swapped_block import SwappedMoE  # noqa: E402

# PEFT 0.18 says so of every module whose parameters it targets.
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STEPS = 6


def with_lora(model, targets=TARGETS, **options):
    torch.manual_seed(1)
    given = dict(r=4, lora_alpha=8, target_modules=["o_proj"], target_parameters=targets)
    given |= dict(task_type="CAUSAL_LM", init_lora_weights=False) | options
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def built(family, order, graphs=False, **options):
    """The model, and what accelerates it: before PEFT, behind it, or nothing."""
    model, accelerated = tiny(family, "grouped_mm"), None
    if order == "lora last":
        accelerated = accelerate_model(model, graphs=graphs)
    model = with_lora(model, **options)
    if order == "lora first":
        accelerated = accelerate_model(model, graphs=graphs)
    return model, accelerated


def tokens(seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (2, 16), generator=generator)


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), **found}


def check_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        apart = (found[name] - value).norm() / value.norm()
        assert apart < 1e-5, f"{name}: {apart:.2g}"


def blocks(model):
    return [module for module in model.modules() if isinstance(module, SwappedMoE)]


@pytest.mark.parametrize("order", ["lora first", "lora last"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_peft(family, order):
    expected = loss_and_gradients(built(family, None)[0])
    model, accelerated = built(family, order)
    assert all(len(lora_of(block.experts)) == 2 for block in blocks(model))
    assert blocks(model)
    check_close(loss_and_gradients(model), expected)
    assert "PEFT adds" not in str(accelerated)
    accelerated.undo()
    assert not blocks(model)
    found = loss_and_gradients(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("options", [dict(r=3), dict(use_rslora=True), dict(targets=TARGETS[:1])])
def test_ranks_scales_and_one_parameter_alone(options):
    expected = loss_and_gradients(built("qwen3_moe", None, **options)[0])
    for order in ("lora first", "lora last"):
        check_close(loss_and_gradients(built("qwen3_moe", order, **options)[0]), expected)


def summed_weights(model):
    """Operations of a step whose results are as large as all experts' weights, and no views."""
    stacks = [p for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name]
    shapes = {tuple(sorted(p.shape)) for p in stacks}
    there = {p.untyped_storage().data_ptr() for p in model.parameters()}
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and tuple(sorted(out.shape)) in shapes:
                made.extend([func.name()] * (out.untyped_storage().data_ptr() not in there))
            return out

    with Watch():
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    return made


def test_no_summed_weight_is_made():
    model, accelerated = built("qwen3_moe", "lora first")
    assert not summed_weights(model)
    accelerated.undo()
    assert len(summed_weights(model)) >= 4


def train(model, accelerated, between=lambda step: contextlib.nullcontext()):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS):
        with between(step), accelerated.step():
            loss = model(input_ids=tokens(step), labels=tokens(step)).loss
            if loss.requires_grad:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("order", ["lora first", "lora last"])
def test_graphs_change_no_bit(order):
    expected = train(*built("qwen3_moe", order))
    model, accelerated = built("qwen3_moe", order, graphs=True)
    assert all(map(torch.equal, train(model, accelerated), expected))
    report = accelerated.graphs.report()
    assert report.eager_calls == {"warmup": 6}
    assert report.matched == 2 * (STEPS - 3)


def add_other(model):
    try:
        model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    except ValueError as error:  # of PEFT 0.18
        if "only one LoRA adapter" not in str(error):
            raise
        pytest.skip(str(error))


def switched(model):
    """Another adapter in step 4, none in step 5."""

    @contextlib.contextmanager
    def between(step):
        model.set_adapter("other" if step == 4 else "default")
        with model.disable_adapter() if step == 5 else contextlib.nullcontext():
            yield

    return between


@pytest.mark.filterwarnings("ignore::moe_graphs.errors.GraphWarning")
def test_adapters_that_are_switched_while_graphs_live_are_never_stale():
    results = []
    for graphs in (False, True):
        model, accelerated = built("qwen3_moe", "lora first", graphs)
        add_other(model)
        model.set_adapter("default")
        results.append(train(model, accelerated, switched(model)))
    assert all(map(torch.equal, *results))
    report = accelerated.graphs.report()
    assert report.matched == 2
    assert sum(report.eager_calls.values()) == 2 * STEPS - 2, report.eager_calls


def test_several_adapters_add_up():
    results = []
    for order in (None, "lora first", "lora last"):
        model, _ = built("qwen3_moe", order)
        torch.manual_seed(3)
        add_other(model)
        model.base_model.set_adapter(["default", "other"])
        results.append(loss_and_gradients(model))
    check_close(results[1], results[0])
    check_close(results[2], results[0])


def test_merged_adapters_are_in_the_weights():
    model, accelerated = built("qwen3_moe", "lora first")
    before = loss_and_gradients(model)["loss"]
    model.merge_adapter()
    with torch.no_grad():
        merged = model(input_ids=tokens(), labels=tokens()).loss
    torch.testing.assert_close(merged, before)
    with pytest.warns(GraphWarning, match="merged LoRA on experts is disabled"):
        with torch.no_grad(), model.disable_adapter():
            model(input_ids=tokens(), labels=tokens())
    assert "merged" not in str(accelerated)  # PEFT has taken them apart


def test_experts_that_train_themselves_are_summed_by_peft():
    expected, _ = built("qwen3_moe", None)
    model, accelerated = built("qwen3_moe", "lora last")
    for each in (expected, model):
        each.requires_grad_(True)
    with pytest.warns(GraphWarning, match="experts with LoRA require gradients themselves"):
        found = loss_and_gradients(model)
    check_close(found, loss_and_gradients(expected))
    assert "require gradients themselves" in str(accelerated)


def test_files_are_those_of_peft(tmp_path):
    plain, _ = built("qwen3_moe", None)
    model, accelerated = built("qwen3_moe", "lora first")
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "ours")
    found, expected = (
        safetensors.load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("ours", "plain")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    loaded = peft.PeftModel.from_pretrained(tiny("qwen3_moe", "grouped_mm"), tmp_path / "ours")
    accelerate_model(loaded, graphs=False)
    with torch.no_grad():
        losses = [each(input_ids=tokens(), labels=tokens()).loss for each in (loaded, plain)]
    torch.testing.assert_close(*losses)
    accelerated.undo()
    assert all(
        len(wrappers_around(m.experts)) == 2 for m in model.modules() if hasattr(m, "experts")
    )


def test_experts_that_stay_transformers_multiply_rows_as_well():
    expected = loss_and_gradients(built("gpt_oss", None)[0])
    model, accelerated = built("gpt_oss", "lora first")
    (line,) = [each for each in accelerated.changes if each.what == "ParamWrapper"]
    assert line.done
    made = summed_weights(model)
    assert not made
    check_close(loss_and_gradients(model), expected)
    accelerated.undo()
    assert len(summed_weights(model)) >= 4
    found = loss_and_gradients(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_graphs_of_such_experts_change_no_bit():
    expected = train(*built("gpt_oss", "lora first"))
    model, accelerated = built("gpt_oss", "lora first", graphs=True)
    assert all(map(torch.equal, train(model, accelerated), expected))
    assert accelerated.graphs.report().eager_calls == {"warmup": 6}


def test_lora_that_comes_later_around_such_experts_is_named():
    expected = loss_and_gradients(built("gpt_oss", None)[0])
    model, accelerated = built("gpt_oss", "lora last")
    check_close(loss_and_gradients(model), expected)
    assert "2 ParamWrapper: apply PEFT before accelerate_model" in str(accelerated)


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts products of rows by weights or factors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        counts = {"grouped_gemm_forward": 1, "grouped_gemm_with_lora": 1, "lora_gemm": 2}
        self.count += counts.get(func._schema.name.removeprefix("moe_graphs::"), 0)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_checkpointing_repeats_the_first_product_of_a_layer_alone(family):
    counts, found = [], []
    for checkpointing in (False, True):
        model, _ = built(family, "lora first")
        model.enable_input_require_grads()
        if checkpointing:
            options = {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        with Products() as products:
            found.append(loss_and_gradients(model))
        counts.append(products.count)
    check_close(found[1], found[0])
    assert counts[1] - counts[0] == 2 * 2  # with A and with W, in each of two layers
