"""Names of dispatchers, optimizers, experts and projections, and classes of a user's own."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import moe_graphs
from lm_runs import fresh_trainer, options, small_preset
from moe_graphs.checkpoints.families import Family
from moe_graphs.cli import build_app
from moe_graphs.dispatch import make_dispatcher
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.layers.expert_backends import ExpertsBackend
from moe_graphs.lm.optimizers import make_optimizer_state
from moe_graphs.lm.option_values import preset_of
from moe_graphs.lm.plan_command import named_model
from moe_graphs.lm.run_presets import Preset
from moe_graphs.registry import (
    DISPATCHERS,
    EXPERTS,
    FAMILIES,
    FP8_RECIPES,
    MODELS,
    OPTIMIZERS,
    PRESETS,
    PROJECTIONS,
    Registry,
)
from own_parts import (
    OwnAttention,
    OwnDispatcher,
    OwnExperts,
    OwnLinear,
    OwnLion,
    gated_preset,
    own_model,
)

PACKAGE = Path(moe_graphs.__file__).parent
OWN_LION, OWN_DISPATCHER = "own_parts:OwnLion", "own_parts:OwnDispatcher"
# Files that may name one, beside the registry and the classes themselves: defaults.
WHO_MAY_NAME = {
    "lm/fastest_way.py": {"local"},
    "lm/building.py": {"local"},
    "parallel/parallelize.py": {"all_to_all"},
    "parallel/replicated.py": {"all_to_all"},
    "planning/planned_step.py": {"all_to_all"},
    "integrations/megablocks/dmoe.py": {"local"},
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), list(map(str, arguments)), env={"COLUMNS": "200"})


def test_every_entry_is_a_class_of_its_name():
    for name, kind in DISPATCHERS.items():
        assert kind.name == name
    assert all(OPTIMIZERS.values())
    assert all(issubclass(kind, ExpertsBackend) for kind in EXPERTS.values())
    assert all(map(callable, PROJECTIONS.values()))
    assert all(isinstance(each, Family) for each in FAMILIES.values())
    assert all(isinstance(make(), Preset) for make in PRESETS.values())
    assert all(isinstance(make(), TransformerConfig) for make in MODELS.values())


def test_no_other_file_lists_dispatchers():
    """A dispatcher is one class and one entry: names in other files would be lists to keep."""
    names = set(DISPATCHERS) - {"local"}
    for file in sorted(PACKAGE.rglob("*.py")):
        where = str(file.relative_to(PACKAGE))
        if where.startswith("dispatch/") or where == "registry.py":
            continue
        constants = {
            node.value
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert names & constants <= WHO_MAY_NAME.get(where, set()), where


def test_help_has_every_name():
    help_text = " ".join(invoke("train", "--help").stdout.split())
    for kinds in (DISPATCHERS, OPTIMIZERS, EXPERTS, PROJECTIONS, FP8_RECIPES, PRESETS):
        assert kinds.words() in help_text.replace("│ │ ", "")


def test_experts_and_projections_of_a_users_own_are_in_a_model():
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, experts="own_parts:OwnExperts")
    config = TransformerConfig(
        hidden_size=16, num_layers=1, num_heads=2, vocab_size=32, max_sequence_length=16, moe=moe
    )
    theirs = dataclasses.replace(config, linear="own_parts:OwnLinear")
    with_theirs, model = LanguageModel(theirs), LanguageModel(config)
    tokens_BS, before = torch.randint(32, (2, 16)), OwnExperts.forwards
    assert type(model.layers[0].moe.experts) is OwnExperts
    model(tokens_BS)
    assert OwnExperts.forwards == before + 1
    model.use_experts("moe_graphs")
    ours = model(tokens_BS, tokens_BS).loss
    model.use_experts("own_parts:OwnExperts")
    assert torch.equal(model(tokens_BS, tokens_BS).loss, ours)
    assert type(with_theirs.layers[0].attention.qkv) is OwnLinear
    with pytest.raises(ValueError, match="recompute='experts' needs experts='moe_graphs', got"):
        dataclasses.replace(moe, experts="transformer_engine", recompute="experts")
    assert dataclasses.replace(moe, recompute="experts").recompute == "experts"
    with pytest.raises(ValueError, match="experts: 'own_parts:None_' cannot be imported"):
        LanguageModel(
            dataclasses.replace(config, moe=dataclasses.replace(moe, experts="own_parts:None_"))
        )


def test_an_entry_of_a_users_own_is_in_help_and_in_messages(monkeypatch):
    monkeypatch.setattr(DISPATCHERS, "_places", dict(DISPATCHERS._places))
    DISPATCHERS.add("mine", OwnDispatcher)
    DISPATCHERS.add("mine", OwnDispatcher)  # the same once more is no error
    assert isinstance(make_dispatcher("mine"), OwnDispatcher)
    with pytest.raises(
        ValueError, match="choose one of local, .*, mine .did you mean 'mine'.., or a cl"
    ):
        make_dispatcher("minne")
    with pytest.raises(ValueError, match="dispatcher 'local' is taken by moe_graphs.dispatch"):
        DISPATCHERS.add("local", OwnDispatcher)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nowhere:Thing",
            "'nowhere:Thing' cannot be imported (No module named 'nowhere'): its",
        ),
        ("own_parts:Nothing", "cannot be imported (module 'own_parts' has no attribute 'Nothing'"),
        ("own_parts:NoOptimizer", "is no class of torch.optim.Optimizer"),
        ("own_parts:SilentLion", "or say capturable = True on the class if it does not"),
        ("adamx", "'adamx' is unknown: choose one of adamw, torch_adamw"),
    ],
)
def test_a_wrong_name_is_a_line(tmp_path, name, words):
    found = invoke("train", "--optimizer", name, "--device", "cpu", "--out", tmp_path / "run")
    assert found.exit_code == 1
    assert found.stderr.splitlines()[-1].startswith("error: --optimizer: ")
    assert words in found.stderr.splitlines()[-1]


def test_words_are_names_that_are_allowed():
    kinds = Registry("letter", {"a": str, "b": bytes, "c": str})
    assert kinds.words() == "a, b or c"
    assert kinds.words(lambda kind: kind is str) == "a or c"
    assert kinds.words(lambda kind: kind is bytes) == "b"


def test_parts_of_a_users_own_train_in_whole_steps_bitwise_as_eagerly(text):
    own = ["--optimizer", OWN_LION, "--dispatcher", OWN_DISPATCHER, "--learning-rate", 1e-3]
    sizes = ["--batch-size", 2, "--sequence-length", 32, "--steps", 7, "--data", text]
    found = invoke("train", "--device", "cpu", *own, *sizes, "--compare", "--json")
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["eager"]["dropped"] == 0  # counted, since the class says that it drops
    assert document["parameters_bitwise_equal"] is True
    assert document["report"]["state"] == "captured"


def test_a_run_with_a_users_optimizer_goes_on_from_its_checkpoint(text, tmp_path):
    sizes = ["--batch-size", 2, "--sequence-length", 32, "--data", text, "--device", "cpu"]
    common = [*sizes, "--optimizer", OWN_LION, "--impl", "none", "--learning-rate", 1e-3]
    whole = ["--steps", 4, "--checkpoint-every", 2, "--out", tmp_path / "whole"]
    assert invoke("train", *common, *whole).exit_code == 0
    middle = tmp_path / "whole" / "checkpoints" / "step_000002"
    found = invoke("train", "--resume", middle, "--out", tmp_path / "again")
    assert found.exit_code == 0, found.stderr
    files = [tmp_path / name / "summary.json" for name in ("whole", "again")]
    losses = [json.loads(file.read_text())["held_out_bits_per_byte"] for file in files]
    assert losses[0] == losses[1]


def test_the_state_of_a_users_optimizer_is_made_without_a_step_of_the_weights():
    preset = small_preset(optimizer=OWN_LION)
    trainer = fresh_trainer(dataclasses.replace(options(), preset=preset))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    make_optimizer_state(trainer.optimizer, trainer.settings)
    assert isinstance(trainer.optimizer, OwnLion)
    for parameter, old in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert not trainer.optimizer.state[parameter]["momentum"].any()
        assert parameter.grad is None
    assert all(group["lr"] > 0 for group in trainer.optimizer.param_groups)


def test_a_preset_of_a_users_own_trains_goes_on_and_is_planned(text, tmp_path):
    own, out = "lm_runs:small_preset", tmp_path / "run"
    common = ["--data", text, "--device", "cpu", "--impl", "none", "--checkpoint-every", 2]
    assert invoke("train", "--preset", own, *common, "--steps", 4, "--out", out).exit_code == 0
    assert f'preset = "{own}"' in (out / "config.toml").read_text()
    middle = out / "checkpoints" / "step_000002"
    found = invoke("train", "--resume", middle, "--out", tmp_path / "again")
    assert found.exit_code == 0, found.stderr
    planned = invoke("plan", "--model", own, "--gpus", 1, "--json")
    assert json.loads(planned.stdout)["tokens"] == 4 * 32  # the preset's batch


def test_attention_of_a_users_own_trains_in_graphs_and_is_refused_where_it_is_unknown(
    text, tmp_path
):
    common = ["--preset", "own_parts:gated_preset", "--data", text, "--device", "cpu"]
    muon = ["--optimizer", "muon", "--compare", "--impl", "full_iteration", "--json"]
    found = invoke("train", *common, *muon, "--steps", 16)
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["parameters_bitwise_equal"] is True
    model = LanguageModel(gated_preset().model)
    assert type(model.layers[0].attention) is OwnAttention
    with pytest.raises(ValueError, match="attention"):
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="attention: 'latnt' is unknown: choose one of grouped_qu"):
        dataclasses.replace(own_model(), attention="latnt")
    with pytest.raises(ValueError, match="sizes of its own: set latent"):
        LanguageModel(dataclasses.replace(own_model(), attention="latent"))


def test_a_model_of_a_users_own_is_planned():
    def parameters(name: str) -> int:
        found = invoke("plan", "--model", name, "--gpus", 1, "--sequence-length", 64, "--json")
        assert found.exit_code == 0, found.stderr
        return json.loads(found.stdout)["parameters"]

    assert parameters("own_parts:own_model") == LanguageModel(own_model()).num_parameters()
    known = "model: 'tinny' is no directory and not one of mixtral-8x7b, .*, tiny, small, nor a fu"
    with pytest.raises(ValueError, match=known):
        named_model("tinny")
    with pytest.raises(ValueError, match="returns a OwnLinear: return a TransformerConfig or a"):
        named_model("own_parts:own_layer")
    with pytest.raises(ValueError, match="own_model' returns a TransformerConfig and no Pr"):
        preset_of("own_parts:own_model", torch.device("cpu"))


def test_a_plan_counts_a_users_optimizer_and_refuses_a_dispatcher_without_costs():
    common = ["plan", "--model", "tiny", "--gpus", 2, "--json"]
    mine, ours = (invoke(*common, "--optimizer", name) for name in (OWN_LION, "adamw"))
    assert mine.exit_code == 0, mine.stderr
    states = [json.loads(found.stdout)["ranks"][0]["exact"]["optimizer"] for found in (mine, ours)]
    assert 0.49 < states[0] / states[1] < 0.51
    refused = invoke(*common, "--ep", 2, "--dispatcher", "own_parts:OwnExchange")
    assert refused.exit_code == 1
    assert "does not say what it costs: write OwnExchange.costs" in refused.stderr
