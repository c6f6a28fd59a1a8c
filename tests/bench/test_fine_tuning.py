"""`benchmarks/fine_tuning.py` on the CPU, with a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import fine_tuning

pytest.importorskip("peft")
pytest.importorskip("transformers")


@pytest.mark.long
@pytest.mark.parametrize(
    "row", ["experts_16k", "nf4_experts_16k", "gpt_oss_attention_2k", "all_weights_4_layers"]
)
def test_every_contender_leaves_a_line(row, tmp_path):
    out = tmp_path / "lines.jsonl"
    given = ["--smoke", "--rows", row, "--out", str(out), "--commit", "c"]
    assert fine_tuning.main(given) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = [(row, *run) for run in fine_tuning.SIZES[row].runs]
    assert [(line["row"], line["contender"], line["checkpointing"]) for line in lines] == expected
    assert all(line["error"] is None and line["tokens_per_second"] > 0 for line in lines)
    for line in lines:
        is_predicted = line["contender"] in fine_tuning.PREDICTED and not row.startswith("all")
        assert is_predicted == (line["predicted_bytes"] is not None)
        has_none = line["contender"] in fine_tuning.WITHOUT_GRAPHS
        assert has_none != ("graphs" in line)
        if "graphs" in line:
            assert line["graphs"]["matched"] > 0
            assert line["graphs"]["eager_calls"].keys() == {"warmup"}


def test_unknown_rows_are_an_error(capsys):
    with pytest.raises(SystemExit):
        fine_tuning.main(["--rows", "attention_1m"])
    assert "attention_1m: known are attention_16k" in capsys.readouterr().err


@pytest.mark.long
def test_one_contender_runs_with_fewer_layers(tmp_path):
    out, own = tmp_path / "lines.jsonl", fine_tuning.ACCELERATED
    given = ["--smoke", "--rows", "experts_16k", "--layers", "1", "--contenders", own]
    options = [*given, "--measured", "1", "--out", str(out), "--commit", "c"]
    assert fine_tuning.main(options) == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["contender"], line["layers"]) == (own, 1)
    case = fine_tuning.Case("experts_16k", own, True, layers=4)
    assert case.size.model["num_hidden_layers"] == 4


def test_unknown_contenders_are_an_error(capsys):
    with pytest.raises(SystemExit):
        fine_tuning.main(["--contenders", "Unsloth"])
    assert "Unsloth: known are accelerate_model;" in capsys.readouterr().err


def test_other_losses_are_an_error():
    right = {"error": None, "losses": [2.0, 1.9], "step_ms": 10.0}
    assert fine_tuning.compared(right | {"step_ms": 5.0}, right)["speedup"] == 2.0
    assert "apart" in fine_tuning.compared(right | {"losses": [2.0, 1.5]}, right)["error"]
    failed = {"error": "out of memory"}
    assert fine_tuning.compared(right, failed) is right
    assert fine_tuning.compared(failed, right) is failed


@pytest.mark.parametrize("row", ["experts_16k", "gpt_oss_attention_2k"])
def test_tokens_spread_over_all_experts(row, monkeypatch):
    """Tokens of an untrained model are alike, and go to few experts."""
    size = fine_tuning.SIZES[row]
    monkeypatch.setitem(fine_tuning.SIZES, row, replace(size, attention="eager"))
    key = "num_local_experts" if "num_local_experts" in size.model else "num_experts"
    smaller = dict(num_hidden_layers=3, hidden_size=512, vocab_size=2048, head_dim=16)
    widths = dict(intermediate_size=48, moe_intermediate_size=48, num_attention_heads=8)
    sizes = {**size.model, **smaller, **widths, key: 32, "num_key_value_heads": 2}
    loads = []
    for routing in ("untrained", "even"):
        case = fine_tuning.Case(row, size.runs[0][0], True, routing=routing)
        model = fine_tuning.bare_model(case, torch.device("cpu"), sizes)
        loads.append(fine_tuning.load_of(model, torch.randint(2048, (1, 512))))
    assert loads[0] > 2.5 > 2 > loads[1]
