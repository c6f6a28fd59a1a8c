"""`docs/tutorial.md` is true: its commands run, its lines of Python are those of the examples."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lightning_runs import QUIET
from moe_graphs.cli import build_app

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
from hf_families import FAMILIES, implementation_of, skip_unknown, tiny
from moe_graphs.integrations.transformers import accelerate_model

pytestmark = QUIET
REPOSITORY = Path(__file__).resolve().parent.parent
TUTORIAL = (REPOSITORY / "docs/tutorial.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TUTORIAL, re.S)


def run(command: str) -> str:
    """Run the commands in this process, since each process would import for ten seconds."""
    program, *arguments = shlex.split(command)
    if program == "moe-graphs":
        found = CliRunner().invoke(build_app(), arguments)
        assert found.exit_code == 0, found.output
        return found.output
    assert program == "python"
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = arguments, [str(Path(arguments[0]).parent)]
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    return ""


@pytest.mark.long
def test_the_commands_run_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    # Sequences of 32 tokens, not 128: the CPU multiplies in bf16 slowly.
    import huggingface_checkpoint

    monkeypatch.setattr(huggingface_checkpoint.token_batches, "__defaults__", (4, 32))
    installation, *commands = blocks("sh")
    assert all(line.startswith(("git clone", "pip install")) for line in installation.splitlines())
    assert len(commands) == 7
    said = [run(command) + capsys.readouterr().out for command in commands]
    _, loop, whole, trainer, _, continued, again = said
    assert "matched 34, eager {'warmup': 6}" in TUTORIAL
    assert "matched 34, eager {'warmup': 6}" in loop
    assert "matched 17, eager {'warmup': 3}" in whole
    assert "model.layers.*" in trainer
    assert "held" in continued
    assert "matched 34" in again
    assert torch.is_autocast_cache_enabled()


def row_of(family: str) -> str:
    """Changes of `accelerate_model` to the model, as the table has them."""
    changes = accelerate_model(tiny(family, implementation_of(family)), graphs=False).changes
    columns = ("norms", "residual", "rotary", "loss")
    parts = dict.fromkeys(("moe", "experts", *columns), False)
    for change in changes:
        if change.part in parts:  # the table leaves out caching
            parts[change.part] |= change.done
    experts = "block" if parts["moe"] else "experts" if parts["experts"] else "dense"
    others = ["yes" if parts[part] else "-" for part in columns]
    return f"| `{family}` | {' | '.join([experts, *others])} |"


@pytest.mark.parametrize("family", sorted([*FAMILIES, "llama"]))
def test_its_table_of_families_is_true(family):
    skip_unknown(family)
    assert row_of(family) in TUTORIAL


def test_its_python_is_that_of_the_examples():
    """Line by line, wherever it is indented to."""
    examples = [path.read_text() for path in REPOSITORY.glob("examples/huggingface_*.py")]
    lines = {line.strip() for text in examples for line in text.splitlines()}
    shown = {line.strip() for block in blocks("python") for line in block.splitlines()}
    assert shown
    assert shown <= lines, shown - lines
