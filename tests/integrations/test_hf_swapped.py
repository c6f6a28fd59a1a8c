"""`swap_moe_layers`: the same training to rounding, its graphs bit for bit, files to the byte."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch.nn.utils import parametrize

import moe_graphs
from moe_graphs import CaptureError, GraphConfig, routing
from moe_graphs.integrations.transformers import (
    GraphCallback,
    accelerate_model,
    swap_moe_layers,
    swapped_block,
)
from moe_graphs.layers.moe import MoEInput

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
from transformers.models.mixtral import modeling_mixtral  # noqa: E402

from grids import by_turns  # noqa: E402
from hf_families import loss_and_gradients, skip_unknown, tiny, tokens, trained  # noqa: E402

SWAPPED = (
    "bailing_hybrid", "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "granitemoe", "granitemoeshared", "mimo_v2_flash", "minimax", "minimax_m2",
    "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
LEFT = ("afmoe", "cohere2_moe", "deepseek_v4", "gpt_oss", "hunyuan_v1_moe", "nemotron_h", "phimoe")
CHOSEN = ("mixtral", "qwen2_moe", "deepseek_v3")
NO_CACHE = dict(use_cache=False)  # graphs of plain attention hold none; their error says so
GROUPS = dict(n_group=4, topk_group=2, num_experts_per_tok=3, norm_topk_prob=True)


def swapped(family, **overrides):
    model = tiny(family, "eager", **overrides)
    (change,) = swap_moe_layers(model).changes
    assert change.done, change
    return model


def expected_of(model):
    return {name: value.clone() for name, value in loss_and_gradients(model, tokens()).items()}


def move_biases(model):
    """Gives biases values that change which experts are chosen."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.5, 0.5, buffer.numel()))


def check_close(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-12)
        assert (found[name] - value).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("family", SWAPPED)
def test_it_computes_what_the_model_did_and_is_undone(family):
    skip_unknown(family)
    model = tiny(family, "eager")
    move_biases(model)
    expected = expected_of(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    changes = swap_moe_layers(model)
    assert all(change.done for change in changes.changes)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    assert list(model.state_dict()) == list(state)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    check_close(loss_and_gradients(model, tokens()), expected)
    assert all(p.grad.is_contiguous() for p in parameters if p.grad is not None)
    changes.undo()
    again = loss_and_gradients(model, tokens())
    assert all(torch.equal(again[name], value) for name, value in expected.items())


@pytest.mark.parametrize("options", [GROUPS, dict(GROUPS, norm_topk_prob=False), {}])
def test_groups_of_experts_and_scaling(options):
    model = tiny("deepseek_v3", "eager", routed_scaling_factor=1.7, **options)
    move_biases(model)
    expected = expected_of(model)
    assert swap_moe_layers(model).changes[0].done
    check_close(loss_and_gradients(model, tokens()), expected)


def test_one_expert_per_token_whose_weight_is_always_one():
    expected = expected_of(tiny("mixtral", "eager", num_experts_per_tok=1))
    found = loss_and_gradients(swapped("mixtral", num_experts_per_tok=1), tokens())
    routers = {name for name in expected if name.endswith("gate.weight")}
    assert len(routers) == 2
    for name in routers:
        assert max(each.pop(name).abs().max() for each in (found, expected)) < 1e-6
    check_close(found, expected)


@pytest.mark.parametrize("family", LEFT)
def test_other_blocks_are_left(family):
    skip_unknown(family)
    model = tiny(family, "eager")
    blocks = list(map(type, model.modules()))
    (change,) = swap_moe_layers(model).changes
    assert not change.done
    assert "not one that we have read" in change.note
    assert list(map(type, model.modules())) == blocks


def with_hook(experts):
    experts.register_forward_hook(lambda *_: None)


def with_another_weight(experts):
    experts.down_proj = type("Sharded", (torch.nn.Parameter,), {})(experts.down_proj.data)


@pytest.mark.parametrize(
    ("options", "change", "note"),
    [
        (dict(router_jitter_noise=0.1), None, "jitter_noise"),
        (dict(hidden_act="gelu"), None, "no SwiGLU: GELUActivation"),
        ({}, with_hook, "hooks or the forward set on its experts"),
        ({}, with_another_weight, "a weight is a Sharded"),
        ({}, lambda experts: setattr(experts, "_is_expert_parallel", True), "over ranks"),
        ({}, lambda experts: experts.register_parameter("scale", torch.nn.Parameter()), "other"),
    ],
)
def test_what_a_block_has_besides_is_left_by_name(options, change, note):
    model = tiny("mixtral", "eager", **options)
    if change is not None:
        change(model.model.layers[1].mlp.experts)
    changes = swap_moe_layers(model).changes
    left = {change.note: change.count for change in changes if not change.done}
    assert [count for text, count in left.items() if note in text] == [1 if change else 2], left


def test_a_block_that_computes_something_else_is_left(monkeypatch):
    original = modeling_mixtral.MixtralTopKRouter.forward

    def forward(self, hidden_states):
        logits, weights, experts = original(self, hidden_states)
        return logits, weights * (1 if self.training else 1.0001), experts

    monkeypatch.setattr(modeling_mixtral.MixtralTopKRouter, "forward", forward)
    model = tiny("mixtral", "eager")
    random = torch.get_rng_state()
    (change,) = swap_moe_layers(model).changes
    assert not change.done
    assert "output differs by 0.0001 in evaluation" in change.note
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("family", CHOSEN)
def test_files_are_those_of_the_model_before(family, tmp_path):
    model = tiny(family, "eager")
    model.save_pretrained(tmp_path / "before")
    swap_moe_layers(model)
    logits = model(tokens()).logits
    model.save_pretrained(tmp_path / "after")
    files = sorted(file.name for file in (tmp_path / "before").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "after").iterdir())
    for name in files:
        before, after = ((tmp_path / each / name).read_bytes() for each in ("before", "after"))
        assert before == after, name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after").train()
    other = tiny(family, "eager", initializer_range=0.1)
    swap_moe_layers(other)
    assert not torch.equal(other(tokens()).logits, logits)
    other.load_state_dict(loaded.state_dict())
    assert torch.equal(other(tokens()).logits, logits)
    swap_moe_layers(loaded)
    assert torch.equal(loaded(tokens()).logits, logits)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_the_balancing_loss_stays_and_graphs_end_before_the_router(family):
    options = dict(output_router_logits=True, router_aux_loss_coef=0.3)
    expected = expected_of(tiny(family, "eager", **options))
    plain = loss_and_gradients(tiny(family, "eager"), tokens())
    assert expected["loss"] - plain["loss"] > 0.5
    check_close(loss_and_gradients(swapped(family, **options), tokens()), expected)
    eager = trained(swapped(family, **options, **NO_CACHE), contextlib.nullcontext)
    model = swapped(family, **options, **NO_CACHE)
    graphs = moe_graphs.graph(model, GraphConfig("*.self_attn"))
    assert all(map(torch.equal, eager, trained(model, graphs.step)))
    assert graphs.report().replayed > 0
    model = swapped(family, **options)
    graphs = moe_graphs.graph(model, GraphConfig("moe_router", on_capture_error="error"))
    with pytest.raises(CaptureError, match="module 'gate' has hooks"):
        trained(model, graphs.step)


@pytest.mark.parametrize("family", ["qwen3_moe", "minimax_m2"])
def test_asking_for_logits_changes_nothing_else(family):
    model = swapped(family)
    before = model(tokens()).logits
    output = model(tokens(), output_router_logits=True)
    assert torch.equal(output.logits, before)
    theirs = tiny(family, "eager")(tokens(), output_router_logits=True).router_logits
    assert len(output.router_logits) == 2
    for mine, other in zip(output.router_logits, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    ("family", "scopes"), by_turns(CHOSEN, ["moe_router,moe_preprocess", "moe", "model.layers.*"])
)
def test_graphs_are_eager_bit_for_bit(family, scopes):
    cache = NO_CACHE if scopes == "model.layers.*" else {}
    eager = trained(swapped(family, **cache), contextlib.nullcontext)
    model = swapped(family, **cache)
    graphs = moe_graphs.graph(model, GraphConfig(scopes))
    graphed = trained(model, graphs.step)
    assert graphs.report().matched == 2 * 2  # layers, steps
    assert all(map(torch.equal, eager, graphed))


def test_a_router_alone_and_attention_bit_for_bit():
    eager = trained(swapped("qwen2_moe", **NO_CACHE), contextlib.nullcontext)
    model = swapped("qwen2_moe", **NO_CACHE)
    graphs = moe_graphs.graph(model, GraphConfig(("*.self_attn", "moe_router")))
    assert all(map(torch.equal, eager, trained(model, graphs.step)))
    assert graphs.report().matched == 2 * 2 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_dtypes_come_out_as_before(dtype):
    outputs = []
    for change in (lambda model: None, swap_moe_layers):
        model = tiny("qwen2_moe", "grouped_mm").to(dtype)
        change(model)
        kept = []
        model.model.layers[1].mlp.register_forward_hook(lambda *call, kept=kept: kept.append(call))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            model(tokens())
        ((_, _, output),) = kept
        outputs.append(output)
    before, after = outputs
    assert after.dtype == before.dtype == dtype
    assert (after - before).float().norm() <= 0.02 * before.float().norm()


def test_other_tensors_since_then_are_undone_too():
    model = tiny("minimax_m2", "eager")
    changes = swap_moe_layers(model)
    copied = copy.deepcopy(model)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    move_biases(model)
    expected = model.eval()(tokens()).logits
    changes.undo()
    assert not any(layer.mlp.experts.training for layer in model.model.layers)
    torch.testing.assert_close(model(tokens()).logits, expected)
    assert swap_moe_layers(copied).changes[0].note == "are ours already"
    assert loss_and_gradients(copied, tokens())["loss"].isfinite()


def test_the_rest_of_the_model_is_accelerated_beside_it():
    model = swapped("qwen3_moe")
    expected = expected_of(model)
    accelerated = accelerate_model(model, graphs=False)
    assert [change.part for change in accelerated.changes if not change.done] == ["moe"]
    check_close(loss_and_gradients(model, tokens()), expected, 2e-5)
    assert "no blocks" in str(swap_moe_layers(tiny("llama", None)))


def test_a_callback_graphs_its_stages_under_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    runs = []
    for graphs in (False, GraphConfig("moe_router,moe_preprocess")):
        model = swapped("qwen3_moe")
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=6, report_to="none", disable_tqdm=True, use_cpu=True,
            per_device_train_batch_size=2, save_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        texts = [{"input_ids": row, "labels": row} for row in tokens().repeat(6, 1)]
        callback = GraphCallback(graphs=graphs)
        transformers.Trainer(model, arguments, train_dataset=texts, callbacks=[callback]).train()
        runs.append([p.detach() for p in model.parameters()])
    assert callback.report.matched == 2 * 3
    assert all(map(torch.equal, *runs))


@pytest.mark.gpu
@pytest.mark.parametrize("family", CHOSEN)
def test_its_error_in_bf16_is_at_most_twice_that_of_before(family):
    # Sizes that both kernels take. Experts that are nearly equal are chosen by the rounding.
    sizes = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)
    exact = loss_and_gradients(tiny(family, "eager", **sizes).cuda(), tokens("cuda"))
    errors = []
    for change in (lambda model: None, swap_moe_layers):
        model = tiny(family, "grouped_mm", **sizes).to(torch.bfloat16).cuda()
        change(model)
        found = loss_and_gradients(model, tokens("cuda"))
        assert (found["loss"] - exact["loss"]).abs() <= 5e-3 * exact["loss"]
        errors.append((found["logits"].float() - exact["logits"]).norm())
    before, now = errors
    assert now <= 2 * before


@pytest.mark.gpu
@pytest.mark.parametrize("family", CHOSEN)
def test_graphs_in_bf16_are_eager_bit_for_bit(family, deterministic):
    runs = []
    for scopes in ("", "moe_router,moe_preprocess", "model.layers.*"):
        model = swapped(family, **NO_CACHE, moe_intermediate_size=64).to(torch.bfloat16).cuda()
        graphs = moe_graphs.graph(model, GraphConfig(scopes)) if scopes else None
        runs.append(trained(model, graphs.step if scopes else contextlib.nullcontext))
        assert not scopes or graphs.report().matched == 2 * 2
    eager, *graphed = runs
    assert all(all(map(torch.equal, eager, each)) for each in graphed)


@pytest.mark.parametrize("family", SWAPPED)
def test_tokens_that_are_generated_are_those_of_transformers(family):
    skip_unknown(family)
    model = tiny(family, "eager").eval()
    given = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, use_cache=True)
    expected = model.generate(tokens(), **given)
    assert swap_moe_layers(model).changes[0].done
    assert torch.equal(model.generate(tokens(), **given), expected)


def blocks_of(model):
    return [m for m in model.modules() if isinstance(m, swapped_block.SwappedMoE)]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gemma3_text"])
def test_a_step_of_generation_is_transformers_own_bit_for_bit(family):
    skip_unknown(family)
    model = tiny(family, "eager").eval()
    with torch.no_grad():
        first = model(tokens(), use_cache=True)
        given = dict(input_ids=first.logits[:, -1:].argmax(-1), use_cache=True)
        caches = [copy.deepcopy(first.past_key_values) for _ in range(2)]
        expected = model(**given, past_key_values=caches[0]).logits
        accelerate_model(model, graphs=False)
        found = model(**given, past_key_values=caches[1]).logits
    assert torch.equal(found, expected)


def test_a_step_of_generation_has_the_weights_of_now():
    block = blocks_of(swapped("qwen3_moe"))[0].double()  # other tensors, other dtype
    hidden = torch.randn(3, 1, 64, dtype=torch.float64)
    with torch.no_grad():
        block.experts.down_proj = torch.nn.Parameter(2 * block.experts.down_proj)
        torch.testing.assert_close(block(hidden)[:, :1], block.run_stages(MoEInput(hidden)))


def with_gradients(block):
    with torch.enable_grad():
        block(torch.randn(3, 1, 64))


def with_two_tokens(block):
    block(torch.randn(3, 2, 64))


def with_a_hook(block):
    block.experts.register_forward_hook(lambda *given: None)
    block(torch.randn(3, 1, 64))


def with_a_parametrized_weight(block):
    parametrize.register_parametrization(block.experts, "down_proj", torch.nn.Identity())
    block(torch.randn(3, 1, 64))


def with_another_router(block):
    block.gate = copy.deepcopy(block.gate)
    block(torch.randn(3, 1, 64))


def with_choices_that_are_recorded(block):
    with routing.record(block) as choices:
        block(torch.randn(3, 1, 64))
    assert len(choices) == 1


def with_load_that_is_counted(block):
    watch = routing.watch(block)
    block.train()(torch.randn(3, 1, 64))
    assert block.expert_load.pairs_E.sum() == 3 * block.config.top_k
    watch.close()


@pytest.mark.parametrize(
    "calling",
    [
        with_gradients,
        with_two_tokens,
        with_a_hook,
        with_a_parametrized_weight,
        with_another_router,
        with_choices_that_are_recorded,
        with_load_that_is_counted,
    ],
)
def test_other_calls_run_our_stages(calling, monkeypatch):
    block = blocks_of(swapped("qwen3_moe"))[0]
    monkeypatch.setattr(block._block[0], "forward", None)
    with torch.no_grad():
        calling(block)
