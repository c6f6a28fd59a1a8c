"""The commands of `moe-graphs plan` in `docs/many_gpus.md` run, and print the figures there."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moe_graphs.cli import build_app
from moe_graphs.registry import MODELS as KNOWN
from planned_layouts import LLAMA_CONFIG

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/many_gpus.md").read_text()
SECTION = DOCUMENT.split("## Plan before asking for GPUs")[1].split("\n## ")[0]
COMMANDS = re.findall(r"^moe-graphs (plan .*?)\s*(?:#.*)?$", SECTION, re.MULTILINE)
MODELS = {"Qwen3-235B-A22B": "qwen3-235b-a22b", "Llama 3.1 405B": "llama3.1-405b"}


def run(command: str) -> dict[str, Any]:
    found = CliRunner().invoke(build_app(), [*shlex.split(command), "--json"])
    assert found.exit_code == 0, (command, found.stderr)
    return json.loads(found.stdout)


@pytest.fixture
def few_layers(monkeypatch):
    """Published models with eight layers: the same refusals, and faster plans."""
    for name in MODELS.values():
        config = KNOWN[name]()
        assert config.num_layers > 8
        assert isinstance(config.moe_layers, str)  # a pattern fits any number of layers
        monkeypatch.setitem(
            KNOWN._places, name, lambda config=config: replace(config, num_layers=8)
        )


@pytest.mark.long
def test_the_commands_run(few_layers, tmp_path):
    assert len(COMMANDS) > 3
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    for command in COMMANDS:
        found = run(command.replace("DIRECTORY", str(tmp_path)))
        assert 0 < found["memory"] == max(rank["memory"] for rank in found["ranks"])


def rows() -> list[tuple[str, list[str]]]:
    """Rows of the table of published models: the command, and the cells behind it."""
    lines = SECTION.split("| model, GPUs |")[1].split("\n\n")[0].splitlines()[2:]
    found, before = [], ("", "")
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines):
        (code, *_) = re.findall(r"`(--.*?)`", f"{cells[0]} {cells[1]}") or [""]
        if cells[0].startswith("the same"):
            model, code = before[0], f"{before[1]} {code}"
        else:
            name, gpus = cells[0].rsplit(", ", 1)
            model = f"--model {MODELS[name]} --gpus {gpus}"
        before = model, code
        length = cells[2].split()[-1]
        found.append((f"plan {model} {code} --sequence-length {length}", cells[3:]))
    return found


@pytest.mark.full
@pytest.mark.parametrize(("command", "cells"), rows(), ids=[command for command, _ in rows()])
def test_the_figures(command, cells):
    found = run(command)
    exact, estimated, wire = (found[name] for name in ("exact", "estimated", "wire"))
    fsdp = [count for name, count in wire.items() if name.startswith(("FSDP2", "HSDP"))]
    experts = [count for name, count in wire.items() if name.startswith("expert")]
    sums = [
        [exact[name] for name in ("parameters", "gradients", "optimizer")],
        [estimated["activations"]],
        [estimated["copies of weights (autocast)"]],
        [found["memory"]],
        fsdp,
        experts,
    ]
    for said, counts in zip(cells, sums, strict=True):
        number = 0.0 if said == "-" else float(said.replace(",", ""))
        rounding = 0.5 if number > 1000 else 0.05
        assert sum(counts) / 2**30 == pytest.approx(number, abs=rounding), (said, cells)
