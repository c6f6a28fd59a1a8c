"""A Hugging Face checkpoint is trained further, and the result is one again."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from distributed import run_distributed
from hf_texts import END, VOCABULARY, texts, write_checkpoint, write_texts, write_tokenizer
from lm_runs import advance
from moe_graphs.cli import build_app
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.building import RunOptions, build_batches, build_trainer
from moe_graphs.lm.checkpoint import read_model
from moe_graphs.lm.continued import checkpoint_identity, continued_preset
from moe_graphs.lm.data import HeldOut, corpus_at
from moe_graphs.lm.options import TrainOptions
from moe_graphs.lm.sample import continue_tokens, sample_text
from moe_graphs.lm.tokenized import CACHE, load_tokenizer, tokenize
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.option_tree import tree_of
from moe_graphs.parallel import ParallelConfig

SMALL = ["--device", "cpu", "--sequence-length", 32, "--batch-size", 4, "--learning-rate", 3e-3]
FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "llama"]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with mixtral/ and text/."""
    folder = tmp_path_factory.mktemp("continued")
    write_checkpoint(folder / "mixtral")
    write_texts(folder / "text")
    return folder


def invoke(init: Path, text: Path, *arguments: object) -> Result:
    common = ["train", "--init", init, "--data", text, *SMALL, *arguments]
    return CliRunner().invoke(build_app(), [str(each) for each in common])


def summary_of(result: Result) -> dict:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def trained(here) -> dict:
    """Twenty steps with graphs, with a checkpoint in the middle."""
    arguments = ["--steps", 20, "--checkpoint-every", 10, "--json", "--out", here / "run"]
    result = invoke(here / "mixtral", here / "text", *arguments)
    return {**summary_of(result), "said": result.stderr}


def held_out_of(here: Path) -> HeldOut:
    corpus, tokenizer = corpus_at(here / "text"), load_tokenizer(here / "mixtral")
    text, _ = tokenize(corpus, tokenizer, vocab_size=VOCABULARY, sequence_length=32)
    return HeldOut.of(text.held_out_documents, sequence_length=32, context=16)


def loss_in_transformers(directory: Path, held_out: HeldOut) -> float:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        logits = model(input_ids=held_out.inputs_NS).logits
    targets = held_out.targets_NS.flatten()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).item()


def trainer_of(here: Path, workers: Workers | None) -> Trainer:
    init = here / "mixtral"
    preset = continued_preset(init, steps=2)
    training = dataclasses.replace(preset.training, sequence_length=32, batch_size=4)
    given = RunOptions(
        preset=dataclasses.replace(preset, training=training),
        device=torch.device("cpu"),
        graph_config=None,
        dispatcher="local" if workers is None else "all_to_all",
        asked=tree_of(TrainOptions, {"init": init}),
        workers=workers,
    )
    corpus, tokenizer = corpus_at(here / "text"), load_tokenizer(init)
    text, _ = tokenize(corpus, tokenizer, vocab_size=VOCABULARY, sequence_length=32)
    return build_trainer(given, build_batches(given, text))


def losses_of(here: Path, workers: Workers | None) -> list[float]:
    """The losses before any step, and after two steps."""
    trainer, held_out = trainer_of(here, workers), held_out_of(here)
    before = trainer.nats_per_token(held_out)
    advance(trainer, 2)
    return [before, trainer.nats_per_token(held_out)]


def matched(report: dict) -> int:
    return report["replayed"] + report["audited"]


def on_ranks(rank: int, world_size: int, here: Path) -> list[float]:
    layout = ParallelConfig(dp_shard=world_size, ep=world_size)
    return losses_of(here, Workers.on(layout, torch.device("cpu")))


@pytest.mark.long
def test_ranks_go_on_with_a_checkpoint_of_which_each_has_read_its_part(here):
    alone = losses_of(here, None)
    assert alone[0] != alone[1]
    for found in run_distributed(on_ranks, 2, arguments=(here,)):
        assert found == pytest.approx(alone, rel=1e-5)


def test_the_loss_before_and_after_is_the_one_that_transformers_finds(here, trained):
    before, after = trained["held_out_before"], trained["held_out_nats_per_token"]
    assert after < before - 1
    held_out = held_out_of(here)
    assert loss_in_transformers(here / "mixtral", held_out) == pytest.approx(before, rel=1e-5)
    assert loss_in_transformers(here / "run" / "model", held_out) == pytest.approx(after, rel=1e-5)
    assert held_out.bits_per_byte(after) == pytest.approx(trained["held_out_bits_per_byte"])
    assert (trained["report"]["captures"], matched(trained["report"])) == (1, 17)


@pytest.mark.parametrize(
    "family",
    [f if f in ("mixtral", "llama") else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES],
)
def test_transformers_computes_our_logits_from_what_was_saved(here, tmp_path, family):
    init = write_checkpoint(tmp_path / family, family)
    arguments = ["--steps", 6, "--json", "--out", tmp_path / "run"]
    summary = summary_of(invoke(init, here / "text", *arguments))
    assert (summary["report"]["captures"], matched(summary["report"])) == (1, 3)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    ours = LanguageModel.from_pretrained(init)
    first = {name: value.clone() for name, value in ours.state_dict().items()}
    ours.load_state_dict(read_model(checkpoint))
    assert any(not torch.equal(first[name], value) for name, value in ours.state_dict().items())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokens = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = theirs.eval()(input_ids=tokens).logits
        torch.testing.assert_close(found, ours.eval()(tokens).logits_BSV, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.eos_token == END
    written = load_tokenizer(init).encode([texts()[5].encode()])
    assert tokenizer(texts()[5], truncation=False)["input_ids"] == next(written)


def test_what_the_run_says(trained):
    said = trained["said"]
    assert f"{END!r} between documents" in said
    assert "learning rate: 0.003 after 2 steps" in said
    assert "tokens to train on" in said
    assert "tokens of an epoch fill no batch" in said
    greedy, chance = trained["samples"]
    assert (greedy["temperature"], chance["temperature"]) == (0.0, 0.8)
    assert greedy["prompt"].startswith("Station ")
    assert greedy["continuation"] != chance["continuation"]
    assert f"sample at 0: {greedy['prompt']!r} -> {greedy['continuation']!r}" in said
    before, after = trained["held_out_before"], trained["held_out_nats_per_token"]
    assert f"held out: {before:.4f} nats per token before, {after:.4f} after" in said


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_a_resumed_run_is_the_uninterrupted_run(here, trained, tmp_path, impl):
    middle = here / "run" / "checkpoints" / "step_000010"
    more = ["--steps", 20, "--resume", middle, "--impl", impl, "--json", "--out", tmp_path]
    result = invoke(here / "mixtral", here / "text", *more)
    again = summary_of(result)
    assert f"tokens: {here / 'run' / CACHE}" in result.stderr
    assert not (tmp_path / CACHE).exists()
    assert again["differences"] == []
    same = "held_out_before", "held_out_nats_per_token", "train_loss", "samples"
    assert [again[name] for name in same] == [trained[name] for name in same]
    for reader, part in ((read_model, "checkpoints/step_000020"),
                         (load_file, "model/model.safetensors")):  # fmt: skip
        models = [reader(run / part) for run in (here / "run", tmp_path)]
        assert models[0].keys() == models[1].keys()
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_run_goes_on_in_its_own_directory(here, trained, tmp_path):
    out = shutil.copytree(here / "run", tmp_path / "run")
    more = ["--steps", 22, "--resume", out, "--out", out, "--json", "--impl", "none"]
    result = invoke(here / "mixtral", here / "text", *more, "--no-save")
    assert summary_of(result)["steps"] == 22
    assert f"tokens: {out / CACHE}" in result.stderr
    models = [load_file(run / "model" / "model.safetensors") for run in (here / "run", out)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    summary_of(invoke(here / "mixtral", here / "text", *more))
    after = load_file(out / "model" / "model.safetensors")
    assert any(not torch.equal(models[0][name], after[name]) for name in after)


def test_resuming_says_what_is_another(here, trained, tmp_path):
    init = shutil.copytree(here / "mixtral", tmp_path / "init")
    weights = load_file(init / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, init / "model.safetensors", metadata={"format": "pt"})
    tokenizer = write_tokenizer(tmp_path / "tokenizer", vocabulary=VOCABULARY - 10)
    text = write_texts(tmp_path / "text", 61)
    more = ["--resume", here / "run", "--steps", 21, "--tokenizer", tokenizer, "--json"]
    again = summary_of(invoke(init, text, *more, "--out", tmp_path / "run"))
    names = {line.partition(":")[0] for line in again["differences"]}
    assert names == {"steps", "text", "tokenizer", "init"}
    copied = (tmp_path / "run" / "model" / "tokenizer.json").read_bytes()
    assert copied == (tokenizer / "tokenizer.json").read_bytes()


def test_a_comparison_leaves_nothing_behind(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = summary_of(
        invoke(here / "mixtral", here / "text", "--steps", 7, "--compare", "--json")
    )
    assert document["losses_bitwise_equal"] is True
    assert document["parameters_bitwise_equal"] is True
    assert document["replayed"] > 0
    assert list(tmp_path.iterdir()) == []


def test_parameters_in_bf16_are_saved_so(here, tmp_path):
    arguments = ["--steps", 5, "--dtype", "bfloat16", "--impl", "none", "--json"]
    summary = summary_of(invoke(here / "mixtral", here / "text", *arguments, "--out", tmp_path))
    assert summary["held_out_nats_per_token"] < summary["held_out_before"]
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "tiny"], "preset: 'tiny' with --init, which has sizes of its own"),
        (["--init", "nowhere"], "init: no directory nowhere"),
        (["--tokenizer", "nowhere"], "tokenizer: no nowhere/tokenizer.json"),
        (["--sequence-length", 65], "--sequence-length: 65 is more than the 64 positions"),
        (["--batch-size", 4000], "4000 sequences of 32 tokens are more than the"),
        (["--dtype", "float16"], "dtype: 'float16' is not one of float32, bfloat16"),
        (["--warmup-steps", -1], "--warmup-steps: -1 must not be negative"),
        (["--learning-rate", -1], "--learning-rate: -1.0 must be at least 0"),
    ],
)
def test_bad_arguments_are_one_line(here, tmp_path, arguments, words):
    result = invoke(here / "mixtral", here / "text", "--out", tmp_path / "run", *arguments)
    assert result.exit_code == 1
    assert words in result.stderr.splitlines()[-1]
    assert not list(tmp_path.rglob("*.safetensors")) or "tokens" in words


def test_a_tokenizer_without_a_checkpoint_is_refused(here):
    given = ["train", "--tokenizer", str(here / "mixtral"), "--device", "cpu"]
    result = CliRunner().invoke(build_app(), given)
    assert result.exit_code == 1
    assert "without --init" in result.stderr


def test_the_learning_rate_is_gentle_by_default(here):
    preset = continued_preset(here / "mixtral")
    assert preset.training.learning_rate == 1e-5
    assert (preset.training.steps, preset.training.warmup_steps) == (200, 20)
    assert preset.training.sequence_length == preset.model.max_sequence_length == 64


def test_a_checkpoint_is_known_by_its_weights(here, tmp_path):
    copy = shutil.copytree(here / "mixtral", tmp_path / "copy")
    assert checkpoint_identity(copy) == checkpoint_identity(here / "mixtral")
    weights = load_file(copy / "model.safetensors")
    changed = {name: value * 1.01 for name, value in weights.items()}
    save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_identity(copy) != checkpoint_identity(here / "mixtral")


@pytest.fixture
def model(here) -> LanguageModel:
    return LanguageModel.from_pretrained(here / "run" / "model")


def test_a_greedy_continuation_takes_the_likeliest_token(trained, model):
    prompt, before = [0, 40, 41], torch.get_rng_state()
    (found,) = continue_tokens(model, prompt, 6, [0.0], seed=1)
    for end in range(6):
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + found[:end]])).logits_BSV
        assert found[end] == logits[0, -1].argmax()
    first, again = (continue_tokens(model, prompt, 20, [0.0, 5.0], seed=1) for _ in range(2))
    assert first == again
    assert first[0][:6] == found
    assert continue_tokens(model, prompt, 20, [0.0, 5.0], seed=2)[1] != first[1]
    assert torch.equal(before, torch.get_rng_state())


def test_a_sample_ends_where_the_model_ends_the_document(here, trained, model):
    corpus, tokenizer = corpus_at(here / "text"), load_tokenizer(here / "mixtral")
    text, _ = tokenize(corpus, tokenizer, vocab_size=VOCABULARY, sequence_length=32)
    (greedy, _) = sample_text(model, text, length=64, seed=0)
    assert corpus.held_out[0].decode().startswith(greedy.prompt)
    assert greedy.continuation
    with torch.no_grad():
        model.head.weight.zero_()  # all alike: the first id, which ends a document
    (ended, _) = sample_text(model, text, length=64, seed=0)
    assert ended == dataclasses.replace(greedy, continuation="")


@pytest.mark.gpu
def test_on_the_gpu_a_resumed_graphed_run_is_the_uninterrupted_eager_run(here, tmp_path):
    models, losses = [], []
    common = ["--steps", 12, "--checkpoint-every", 6, "--device", "cuda", "--json"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    for more in (
        ["--impl", "none", "--out", whole],
        ["--resume", whole / "checkpoints" / "step_000006", "--out", again],
    ):
        summary = summary_of(invoke(here / "mixtral", here / "text", *common, *more))
        losses.append((summary["held_out_before"], summary["held_out_nats_per_token"]))
        models.append(load_file(more[-1] / "model" / "model.safetensors"))
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    found = loss_in_transformers(whole / "model", held_out_of(here))
    assert found == pytest.approx(losses[0][1], rel=2e-2)  # bf16 here, fp32 there
