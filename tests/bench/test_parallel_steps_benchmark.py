"""The benchmark of steps on several ranks, on the CPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from distributed import run_distributed

FIRST_STEPS, TRACED_STEPS = 6, 1 + 3
MOE = (
    "eager, all_to_all", "recipe, all_to_all", "eager, symmetric", "attn,moe, symmetric",
    "attn,moe, symmetric, recompute", "whole step, symmetric",
    "whole step, symmetric, groups of layers, our AdamW",
    "whole step, symmetric, replicated, our AdamW", "whole step, alone",
)  # fmt: skip


def smoke(rank: int, world_size: int, out: Path) -> None:
    options = ["--smoke", "--rounds", "2", "--steps", "2", "--out", str(out), "--commit", "c"]
    options += ["--models", "dense,moe", "--trace", "--contenders", "^(?!whole step, alone, our)"]
    importlib.import_module("parallel_steps").main(options)


@pytest.mark.long
def test_a_line_per_contender(tmp_path):
    out = tmp_path / "lines.jsonl"
    run_distributed(smoke, 2, arguments=(out,))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["benchmark"] for line in lines} == {"parallel_steps_traced"}
    assert [(line["model"], line["contender"]) for line in lines] == [
        ("dense", "eager"), ("dense", "whole step"), ("dense", "eager"), ("dense", "whole step"),
        *(("moe", name) for name in MOE),
    ]  # fmt: skip
    for line in lines:
        assert len(line["step_ms_of_turns"]) == 2
        assert line["step_ms"] > 0
        # Counts of the CPU's operators, which include those of the CPU recorder's replays.
        assert line["traced_ms"] >= line["communication_ms"] >= line["exposed_ms"] >= 0
        assert (line["communication_ms"] > 0) == ("alone" not in line["contender"])
        if line["contender"] == "whole step":
            assert (line["state"], line["loss_difference"]) == ("captured", 0.0)
    moe = {line["contender"]: line for line in lines if line["model"] == "moe"}
    for name in MOE[5:]:
        assert moe[name]["replayed"] == FIRST_STEPS - 3 + 2 * 2 + TRACED_STEPS, name
        # One rank alone has other tokens.
        assert moe[name]["loss_difference"] < (0.5 if "alone" in name else 1e-5)
    assert moe[MOE[6]]["layers_per_group"] == 2
    for name in ("recipe, all_to_all", "attn,moe, symmetric", "attn,moe, symmetric, recompute"):
        assert moe[name]["loss_difference"] < 1e-5
        assert moe[name]["replayed"] > 0
