"""`accelerate_model`: the same training to rounding, its graphs bit for bit, all of it undone."""

from __future__ import annotations

import copy

import pytest
import torch

from moe_graphs import GraphWarning
from moe_graphs.integrations.transformers import accelerate_model, causal_lm_loss

pytest.importorskip("transformers", reason="needs the extra hf")
from transformers import CompileConfig
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_families import FAMILIES as ALL
from hf_families import implementation_of, loss_and_gradients, skip_unknown, tiny, tokens, trained

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "llama", "qwen3_next")

OWN = {
    "llama": {"rotary", "residual", "packing"},
    "gpt_oss": {"experts"},
    "olmoe": {"rotary", "moe", "residual", "packing"},  # its attention may clip
    "deepseek_v3": {"rotary", "moe", "residual", "packing"},
    "qwen3_next": {"rotary", "moe"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_as_before_and_is_undone(family):
    skip_unknown(family)
    model = tiny(family, implementation_of(family))
    expected = loss_and_gradients(model, tokens())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerated = accelerate_model(model, graphs=False)
    parts = {change.part for change in accelerated.changes if change.done}
    assert parts == {"loss", "logits", "norms", "caching"} | OWN.get(
        family, {"rotary", "moe", "residual", "packing"}
    )
    assert model.state_dict().keys() == state.keys()
    found = loss_and_gradients(model, tokens())
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-12)
        assert (found[name] - value).abs().max() <= 2e-5 * scale, name
    accelerated.undo()
    again = loss_and_gradients(model, tokens())
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


# One of each kind of layer; bailing_hybrid reads transformers' dictionary of activations.
ALWAYS = {"qwen3_moe", "gpt_oss", "bailing_hybrid"}
IN_CI = {"llama", "qwen3_next"}  # `test_hf_caching.py` has these with packed rows
GRAPHED = [
    f
    if f in ALWAYS
    else pytest.param(f, marks=pytest.mark.long if f in IN_CI else pytest.mark.full)
    for f in (*ALL, "llama")
]


@pytest.mark.parametrize("family", GRAPHED)
def test_its_graphs_are_eager_bit_for_bit(family):
    skip_unknown(family)
    runs = []
    for graphs in (False, True):
        model = tiny(family, implementation_of(family))
        accelerated = accelerate_model(model, graphs=graphs)
        runs.append(trained(model, accelerated.step))
    assert accelerated.graphs.report().replayed > 0
    assert all(map(torch.equal, *runs))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")  # flash attention's backward adds with atomics
@pytest.mark.parametrize("family", [*(f for f in ALL if f != "minimax"), "llama"])
def test_its_graphs_on_a_gpu(family):
    skip_unknown(family)
    runs = []
    for graphs in (False, True):
        model = tiny(family, implementation_of(family), moe_intermediate_size=64)
        model = model.to(torch.bfloat16).cuda()
        accelerated = accelerate_model(model, graphs=graphs)
        runs.append(trained(model, accelerated.step))
    report = accelerated.graphs.report()
    assert report.replayed > 0, report
    assert all(map(torch.equal, *runs))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_in_fp32_runs_without_autocast_on_a_gpu(family):
    """TRL's GRPOTrainer generates so, and an evaluation may."""
    runs, sizes = [], dict(moe_intermediate_size=64)
    expected = loss_and_gradients(tiny(family, "grouped_mm", **sizes).cuda(), tokens("cuda"))
    for graphs in (False, True):
        model = tiny(family, "grouped_mm", **sizes).cuda()
        accelerated = accelerate_model(model, graphs=graphs)
        runs.append(trained(model, accelerated.step))
    assert accelerated.graphs.report().replayed > 0
    assert all(map(torch.equal, *runs))
    model = tiny(family, "grouped_mm", **sizes).cuda()
    accelerate_model(model, graphs=False)
    found = loss_and_gradients(model, tokens("cuda"))
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-12)
        assert (found[name] - value).abs().max() <= 1e-4 * scale, name


@pytest.mark.gpu
def test_what_no_cuda_graph_can_hold_is_named():
    """MiniMax's linear attention brings zeros from the host in every forward."""
    skip_unknown("minimax")
    model = tiny("minimax", "grouped_mm", moe_intermediate_size=64).to(torch.bfloat16).cuda()
    with pytest.warns(GraphWarning, match="modeling_minimax.py:.*the model is eager again"):
        trained(model, accelerate_model(model).step)


def test_it_says_what_it_did_and_left():
    model = tiny("qwen3_moe", "grouped_mm")
    newer = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable)()
    model.model.norm.__class__.forward, original = (
        lambda self, x: x * self.weight,
        model.model.norm.__class__.forward,
    )
    try:
        accelerated = accelerate_model(model)
    finally:
        model.model.norm.__class__.forward = original
    lines = {change.part: change for change in accelerated.changes}
    assert lines["moe"].done
    assert lines["moe"].count == 2
    assert not lines["norms"].done
    assert lines["graphs"].done
    with accelerated.step():
        loss_and_gradients(model, tokens())
    report = accelerated.graphs.report()
    assert report.eager_calls == {"warmup": 2}
    again = accelerate_model(model, norms=False, loss=False, graphs=False)
    assert "already" in str(again)


def test_an_accelerated_model_can_be_copied_and_saved(tmp_path):
    model = tiny("qwen3_moe", "grouped_mm")
    accelerate_model(model, whole_steps=True)
    expected = loss_and_gradients(model, tokens())
    copied = copy.deepcopy(model)
    model.lm_head.weight.data.zero_()
    found = loss_and_gradients(copied, tokens())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("options", [{"graphs": False}, {"whole_steps": True}])
def test_where_there_are_no_graphs_the_report_says_why(options):
    accelerated = accelerate_model(tiny("llama", None), **options)
    report = accelerated.graphs.report()
    assert report.state == "off"
    assert report.replayed == 0
    expected = "FullIteration" if options.get("whole_steps") else "graphs=False"
    assert expected in report.off_because
    assert expected in str(report)
    with accelerated.step():
        pass
    accelerated.undo()
    assert accelerated.graphs.report().state == "off"


@pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"whole_steps": True}])
def test_undo_restores_the_dtype_of_the_configuration(options):
    model = tiny("llama", None)
    model.config.dtype = before = torch.float32
    accelerated = accelerate_model(model, **options)
    accelerated.undo()
    assert model.config.dtype is before


def test_the_report_is_there_after_undo():
    accelerated = accelerate_model(tiny("llama", None))
    accelerated.undo()
    assert accelerated.graphs.report().state == "released"


def test_a_failure_leaves_the_model_as_it_was(monkeypatch):
    model = tiny("qwen3_moe", "grouped_mm")
    expected = loss_and_gradients(model, tokens())
    model.config.dtype = torch.float32
    monkeypatch.setattr("moe_graphs.integrations.transformers.accelerated.graph", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accelerate_model(model)
    assert model.config.dtype is torch.float32
    found = loss_and_gradients(model, tokens())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_another_model_is_refused():
    with pytest.raises(ValueError, match="PreTrainedModel"):
        accelerate_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("items", [None, 7, torch.tensor(9)])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_is_that_of_transformers(items, shifted):
    logits = torch.randn(2, 5, 11)
    labels = torch.randint(11, (2, 5))
    labels[0, 2] = -100
    given = dict(vocab_size=11, num_items_in_batch=items, shift_labels=labels if shifted else None)
    expected = ForCausalLMLoss(logits, labels, **given)
    torch.testing.assert_close(causal_lm_loss(logits, labels, **given), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama"])
def test_its_error_in_bf16_is_at_most_twice_that_of_before(family):
    sizes = dict(moe_intermediate_size=64)
    exact = loss_and_gradients(tiny(family, implementation_of(family), **sizes), tokens())
    errors = []
    for changed in (False, True):
        model = tiny(family, implementation_of(family), **sizes).to(torch.bfloat16).cuda()
        if changed:
            accelerate_model(model, graphs=False)
        found = loss_and_gradients(model, tokens("cuda"))
        assert (found["loss"].cpu() - exact["loss"]).abs() <= 5e-3 * exact["loss"]
        errors.append((found["logits"].cpu().float() - exact["logits"]).norm())
    # A token whose experts are nearly equal may get others in bf16: that is in both errors.
    before, now = errors
    assert now <= 2 * before


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_generation_that_transformers_compiles_is_compiled_whole_between_graphs(family):
    """A static cache is enough on GPUs; here dynamo has no compiler behind it."""
    torch._dynamo.reset()
    model = tiny(family, implementation_of(family)).eval()
    given = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, cache_implementation="static")
    expected = model.generate(tokens(), **given)
    accelerate_model(model)
    whole = CompileConfig(backend="eager", mode=None, fullgraph=True)
    whole._compile_all_devices = True
    assert torch.equal(model.generate(tokens(), **given, compile_config=whole), expected)
