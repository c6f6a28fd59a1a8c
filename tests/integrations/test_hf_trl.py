"""TRL's ``SFTTrainer`` with its defaults, LoRA and router losses: saved, resumed, bitwise."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra trl")
pytest.importorskip("trl", reason="needs the extra trl")
from hf_families import counted  # noqa: E402
from moe_graphs import GraphWarning  # noqa: E402
from moe_graphs.integrations.transformers import GraphCallback, accelerate_model  # noqa: E402
from trl_runs import LAYERS, SAVED_AT, STEPS, model_of, sft  # noqa: E402

# PEFT's pattern "all-linear" names experts, too, which this LoRA does not take.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
ATTENTION = ["q_proj", "v_proj"]
EAGER = dict(gradient_checkpointing=False)
ONE_LENGTH = dict(pad_to_multiple_of=48, **EAGER)
LENGTHS = dict(lengths=(40, 48))  # given, so that a run that is resumed pads to the same


def test_it_trains_saves_and_resumes_with_the_defaults_of_trl(tmp_path):
    plain = sft(tmp_path / "plain", GraphCallback(graphs=False, **LENGTHS))
    assert all("aux_loss" in line for line in plain.logged)
    callback = GraphCallback(**LENGTHS)
    assert sft(tmp_path / "graphed", callback).equals(plain)
    assert counted(callback.report) == {"warmup": 3 * LAYERS}
    assert callback.report.matched == (STEPS - 3) * LAYERS
    assert all(scope.recomputed_bytes for scope in callback.report.scopes)
    checkpoint = tmp_path / "graphed" / f"checkpoint-{SAVED_AT}"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    again = GraphCallback(**LENGTHS)
    assert sft(tmp_path / "resumed", again, resume=checkpoint).equals(plain)
    assert "gradient_checkpointing" not in counted(again.report)


@pytest.mark.long
def test_without_the_callback_it_trains_alike_to_rounding(tmp_path):
    plain, ours = sft(tmp_path / "plain"), sft(tmp_path / "ours", GraphCallback())
    for one, other in zip(plain.logged, ours.logged, strict=True):
        for name in ("loss", "aux_loss"):
            assert float(one[name]) == pytest.approx(float(other[name]), abs=2e-3)


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param("all-linear", id="all", marks=pytest.mark.long),
        pytest.param(ATTENTION, id="attention"),
        pytest.param(None, id="none", marks=pytest.mark.long),
    ],
)
def test_without_checkpointing_layers_are_replayed_bit_for_bit(lora, tmp_path):
    plain = sft(tmp_path / "plain", GraphCallback(graphs=False, **LENGTHS), lora=lora, **EAGER)
    callback = GraphCallback(**LENGTHS)
    graphed = sft(tmp_path / "graphed", callback, lora=lora, **EAGER)
    assert graphed.equals(plain)
    report = callback.report
    assert report.eager_calls == {"warmup": 3 * LAYERS}
    assert report.matched == (STEPS - 3) * LAYERS
    assert report.shapes == 2


@pytest.mark.long
def test_batches_of_one_length_are_all_replayed_and_resumed(tmp_path):
    # Masks that hide padding on the right alone are left out in both runs.
    plain = sft(tmp_path / "plain", GraphCallback(graphs=False, lengths=True), **ONE_LENGTH)
    callback = GraphCallback()
    assert sft(tmp_path / "graphed", callback, **ONE_LENGTH).equals(plain)
    assert callback.report.eager_calls == {"warmup": 3 * LAYERS}
    assert callback.report.matched == (STEPS - 3) * LAYERS
    checkpoint = tmp_path / "graphed" / f"checkpoint-{SAVED_AT}"
    assert sft(tmp_path / "resumed", GraphCallback(), resume=checkpoint, **ONE_LENGTH).equals(plain)


@pytest.mark.filterwarnings("ignore:its router is a:moe_graphs.GraphWarning")
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param("all-linear", id="all"),
        pytest.param(ATTENTION, id="attention"),
    ],
)
@pytest.mark.long
def test_a_model_that_was_accelerated_before(lora, tmp_path):
    """LoRA then comes second; the callback marks the steps of the graphs that are there."""
    runs = []
    for graphs in (False, True):
        model = model_of()
        accelerated = accelerate_model(model, graphs=graphs, lengths=True)
        callback = GraphCallback(accelerated)
        runs.append(sft(tmp_path / str(graphs), callback, model=model, lora=lora, **ONE_LENGTH))
    assert runs[0].equals(runs[1])
    assert callback.report.matched == (STEPS - 3) * LAYERS
    assert accelerated.graphs.report().eager_calls == {"warmup": 3 * LAYERS}
    assert accelerated.graphs.state == "captured"


def test_without_the_callback_an_accelerated_model_runs_eagerly_and_is_counted(tmp_path):
    model = model_of()
    accelerated = accelerate_model(model)
    with pytest.warns(GraphWarning, match="outside_step"):
        sft(tmp_path, model=model, lora=ATTENTION, **EAGER)
    assert accelerated.graphs.report().eager_calls == {"outside_step": STEPS * LAYERS}


def test_graphs_that_are_there_already_are_to_be_passed_on(tmp_path):
    model = model_of()
    accelerated = accelerate_model(model)
    with pytest.raises(ValueError, match=r"GraphCallback\(accelerated\)"):
        sft(tmp_path, GraphCallback(), model=model, lora=None)
    with pytest.raises(ValueError, match="norms: give options to accelerate_model"):
        GraphCallback(accelerated, norms=False)


def test_a_line_says_where_the_head_of_trl_computes_the_loss(tmp_path):
    trl = pytest.importorskip("trl.trainer.utils")
    model = model_of()
    accelerated = accelerate_model(model, graphs=False)
    assert "TRL" not in str(accelerated)
    if not hasattr(trl, "add_fused_lm_head"):
        pytest.skip("this TRL computes losses by the model's own head")
    trl.add_fused_lm_head(model)
    assert "loss     left        1 TRL's fused head: TRL's trainers compute" in str(accelerated)
