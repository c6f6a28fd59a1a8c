"""Files that are not what they should be are refused by name, before any weight is read."""

from __future__ import annotations

import errno
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_directories import difference, logits, saved
from moe_graphs.checkpoints import loading, saving
from moe_graphs.layers import LanguageModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    saved("qwen3_moe", folder / "whole")
    saved("qwen3_moe", folder / "shards", max_shard_size=100_000)
    saved("deepseek_v3", folder / "deepseek")
    return folder


@pytest.fixture
def directory(originals, tmp_path, request):
    return Path(shutil.copytree(originals / request.param, tmp_path / "copy"))


whole = pytest.mark.parametrize("directory", ["whole"], indirect=True)
shards = pytest.mark.parametrize("directory", ["shards"], indirect=True)
deepseek = pytest.mark.parametrize("directory", ["deepseek"], indirect=True)


def refused(directory: Path, monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """Check that loading raises, that the message has all ``parts``, and that no weight is read."""

    def read(*_arguments: object) -> None:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(loading, "_read", read)
    with pytest.raises(ValueError, match=".+") as refusal:
        LanguageModel.from_pretrained(directory)
    for part in parts:
        assert part in str(refusal.value), (part, str(refusal.value))


def change(directory: Path, rename: dict[str, str] | None = None, **tensors: torch.Tensor | None):
    """Rewrite the single file: tensors by name, None to leave one out."""
    found = load_file(directory / SINGLE)
    for old, new in (rename or {}).items():
        found[new] = found.pop(old)
    found |= tensors
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, directory / SINGLE, metadata={"format": "pt"})


@whole
@pytest.mark.parametrize("length", [-1, 4000, 9, 5, 0])
def test_truncated(directory, monkeypatch, length):
    file = directory / SINGLE
    file.write_bytes(file.read_bytes()[:length])
    refused(directory, monkeypatch, str(file), "truncated", "download it again")


@shards
def test_a_truncated_shard(directory, monkeypatch):
    file = sorted(directory.glob("model-*"))[2]
    file.write_bytes(file.read_bytes()[:-4])
    refused(directory, monkeypatch, str(file), "truncated")


@shards
def test_a_missing_shard(directory, monkeypatch):
    file = sorted(directory.glob("model-*"))[2]
    file.unlink()
    refused(directory, monkeypatch, str(file), "is missing")


@shards
def test_exchanged_shards(directory, monkeypatch):
    first, second, *_ = sorted(directory.glob("model-*"))
    first.rename(directory / "aside")
    second.rename(first)
    (directory / "aside").rename(second)
    refused(directory, monkeypatch, str(first), " lacks ", "was it renamed")


@shards
def test_an_index_that_does_not_list_everything(directory, monkeypatch):
    index = json.loads((directory / INDEX).read_text())
    shard = index["weight_map"].pop(NORM)
    (directory / INDEX).write_text(json.dumps(index))
    refused(directory, monkeypatch, shard, f"holds {NORM}", "does not list")


@shards
def test_a_tensor_in_two_shards(directory, monkeypatch):
    index = json.loads((directory / INDEX).read_text())
    other = next(f for f in index["weight_map"].values() if f != index["weight_map"][NORM])
    tensors = load_file(directory / other)
    save_file(tensors | {NORM: torch.ones(64)}, directory / other)
    refused(directory, monkeypatch, other, f"holds {NORM}", "does not list")


@shards
@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_a_broken_index(directory, monkeypatch, text):
    (directory / INDEX).write_text(text)
    refused(directory, monkeypatch, INDEX)


@shards
def test_two_checkpoints_in_one_directory(directory, monkeypatch, originals):
    shutil.copy(originals / "whole" / SINGLE, directory)
    refused(directory, monkeypatch, "holds both")


@whole
@pytest.mark.parametrize(
    ("rename", "tensors", "parts"),
    [
        ({}, {NORM: None}, ("lacks", NORM)),
        ({}, {"model.layers.0.mlp.experts.3.up_proj.weight": None}, ("lacks", "experts.3.up")),
        ({}, {"model.extra": torch.ones(2)}, ("holds model.extra, which a model",)),
        ({NORM: "model.layers.2.input_layernorm.weight"}, {}, ("lacks", NORM)),
        ({}, {NORM: torch.ones(63)}, (SINGLE, NORM, "has shape [63]", "should be [64]")),
        ({}, {NORM: torch.ones(64, dtype=torch.int8)}, (SINGLE, NORM, "is I8")),
        ({}, {NORM: torch.ones(64).to(torch.float8_e4m3fn)}, (NORM, "only one of the two")),
        ({}, {"lm_head.weight": torch.ones(128, 64).bfloat16()}, ("BF16, F32", "dtype you want")),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(directory, monkeypatch, rename, tensors, parts):
    change(directory, rename, **tensors)
    refused(directory, monkeypatch, *parts)


@whole
def test_no_checkpoint_at_all(directory, monkeypatch):
    (directory / SINGLE).unlink()
    refused(directory, monkeypatch, "holds neither model.safetensors nor")
    (directory / "config.json").unlink()
    refused(directory, monkeypatch, "config.json is missing")
    refused(directory / "nowhere", monkeypatch, "nowhere", "is missing")


@whole
def test_quantised_in_a_way_that_we_cannot_read(directory, monkeypatch):
    values = json.loads((directory / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (directory / "config.json").write_text(json.dumps(values))
    refused(directory, monkeypatch, "quant_method='awq'", "take an unquantised one")


@deepseek
def test_layers_that_predict_later_tokens_are_left_out(directory, tmp_path):
    want = logits(LanguageModel.from_pretrained(directory))
    change(directory, **{"model.layers.2.eh_proj.weight": torch.ones(64, 128)})
    with pytest.warns(UserWarning, match=r"left out 1 tensors of .*_layers=1") as warned:
        ours = LanguageModel.from_pretrained(directory)
    assert warned[0].filename == __file__
    assert torch.equal(logits(ours), want)
    ours.save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours/config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    change(directory, **{"model.layers.3.eh_proj.weight": torch.ones(64, 128)})
    with (
        pytest.raises(ValueError, match="holds model.layers.3.eh_proj"),
        pytest.warns(UserWarning, match="left out"),
    ):
        LanguageModel.from_pretrained(directory)


@deepseek
def test_float8_in_blocks(directory, monkeypatch, tmp_path):
    """Blocks of 24 rows and 40 columns, so that some are cut off at the edges."""
    quantised, by_hand = {}, {}
    for name, tensor in load_file(directory / SINGLE).items():
        if "_proj" in name:
            rows, columns = tensor.shape
            scale = torch.empty(-(-rows // 24), -(-columns // 40))
            numbers = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
            for i in range(scale.shape[0]):
                for k in range(scale.shape[1]):
                    block = slice(24 * i, 24 * i + 24), slice(40 * k, 40 * k + 40)
                    scale[i, k] = tensor[block].abs().max() / 448 * (1 + i)
                    numbers[block] = (tensor[block] / scale[i, k]).to(torch.float8_e4m3fn)
            quantised |= {name: numbers, name + "_scale_inv": scale}
            scales = torch.kron(scale, torch.ones(24, 40))[:rows, :columns]
            by_hand[name] = numbers.float() * scales
            assert difference(by_hand[name], tensor) < 0.2
    change(directory, **by_hand)
    want = logits(LanguageModel.from_pretrained(directory))
    values = json.loads((directory / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [24, 40]}
    (directory / "config.json").write_text(json.dumps(values))
    change(directory, **quantised)
    read = LanguageModel.from_pretrained(directory)
    assert {p.dtype for p in read.parameters()} == {torch.bfloat16}
    exact = LanguageModel.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(logits(exact), want)
    exact.save_pretrained(tmp_path / "ours")
    assert "quantization_config" not in (tmp_path / "ours/config.json").read_text()
    assert torch.equal(logits(LanguageModel.from_pretrained(tmp_path / "ours")), want)
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    change(directory, **{name + "_scale_inv": torch.ones(3, 2)})
    refused(directory, monkeypatch, name, "F32 (3, 1)")


@shards
def test_one_tensor_is_in_memory_and_no_random_number_drawn(directory, monkeypatch):
    read, values, state = loading._read, [], torch.get_rng_state()

    def watched(*arguments: object) -> torch.Tensor:
        assert all(value() is None for value in values)
        value = read(*arguments)
        values.append(weakref.ref(value))
        return value

    monkeypatch.setattr(loading, "_read", watched)
    LanguageModel.from_pretrained(directory)
    assert len(values) == 2 * (8 * 3 + 9) + 3
    assert torch.equal(torch.get_rng_state(), state)


@shards
def test_one_shard_is_in_memory(directory, monkeypatch):
    ours, parts, write = LanguageModel.from_pretrained(directory), [], save_file

    def watched(tensors: dict[str, torch.Tensor], *arguments: object, **options: object) -> None:
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 100_000
        assert all(part() is None for part in parts)
        write(tensors, *arguments, **options)
        parts.extend(weakref.ref(tensor) for tensor in tensors.values())

    monkeypatch.setattr(saving, "save_file", watched)
    ours.save_pretrained(directory, max_shard_bytes=100_000)
    assert len(parts) == 2 * (8 * 3 + 9) + 3


@shards
def test_what_is_saved_over_a_checkpoint_replaces_it_alone(directory):
    ours = LanguageModel.from_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    ours.save_pretrained(directory)
    left = {"config.json", "generation_config.json", "tokenizer.json", SINGLE}
    assert {file.name for file in directory.iterdir()} == left
    assert torch.equal(logits(LanguageModel.from_pretrained(directory)), logits(ours))
    ours.save_pretrained(directory, max_shard_bytes=200_000)
    assert not (directory / SINGLE).exists()
    assert torch.equal(logits(LanguageModel.from_pretrained(directory)), logits(ours))


@shards
def test_a_full_disk_leaves_what_was_there(directory, monkeypatch):
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    ours, calls = LanguageModel.from_pretrained(directory), []

    def full(*arguments: object, **options: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*arguments, **options)

    monkeypatch.setattr(saving, "save_file", full)
    with pytest.raises(OSError, match="could not be written: No space left on device"):
        ours.save_pretrained(directory, max_shard_bytes=100_000)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before


@shards
@pytest.mark.parametrize(("size", "renamed"), [(100_000, 0), (100_000, 3), (10**9, 0), (10**9, 1)])
def test_a_crash_leaves_nothing_that_looks_whole(directory, monkeypatch, size, renamed):
    ours, calls = LanguageModel.from_pretrained(directory), []
    rename = Path.rename

    def crash(file: Path, target: Path) -> Path:
        calls.append(file)
        if len(calls) > renamed:
            raise KeyboardInterrupt
        return rename(file, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            ours.save_pretrained(directory, max_shard_bytes=size)
    refused(directory, monkeypatch, "")
    monkeypatch.undo()
    ours.save_pretrained(directory, max_shard_bytes=size)
    assert torch.equal(logits(LanguageModel.from_pretrained(directory)), logits(ours))
    assert not (directory / "model.partial").exists()
