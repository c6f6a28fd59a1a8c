"""Command lines and files that are derived from a tree of dataclasses."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from moe_graphs.lm.options import PlanOptions, ProfileOptions, TrainOptions
from moe_graphs.option_tree import (
    as_toml,
    changes,
    command,
    flat,
    option,
    options_of,
    read_config,
    section,
    tree_of,
    with_values,
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    width: int = option(help="Width.")
    depth: int = option(2, "Depth.", least=1)
    decay: float | None = option(None, "Decay.", flags="--ema")


@dataclass(frozen=True, kw_only=True)
class Files:
    out: Path | None = option(None, "Where.", of="start")
    save: bool = option(True, "Write.")
    loud: bool = option(False, "Tell.")
    either: bool | None = option(None, "One of both.", flags="--this/--that")


@dataclass(frozen=True, kw_only=True)
class Tree:
    sizes: dict[str, Any] = changes(Sizes)
    files: Files = section(Files)


heard: list[tuple[Tree, set[str]]] = []


def show(tree: Tree, given: set[str]) -> None:
    """Shows a tree."""
    heard.append((tree, given))


def invoke(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(command(Tree, show, config=True))
    heard.clear()
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "160"})


def called(*arguments: object) -> tuple[Tree, set[str]]:
    found = invoke(*arguments)
    assert found.exit_code == 0, found.stderr
    return heard[0]


def test_a_command_line_is_a_tree_and_the_names_that_it_gives():
    tree, given = called("--depth", 3, "--ema", 0.5, "--no-save", "--that", "--out", "there")
    assert tree.sizes == {"depth": 3, "decay": 0.5}
    assert tree.files == Files(out=Path("there"), save=False, either=False)
    assert given == {"depth", "decay", "save", "either", "out"}
    assert called() == (Tree(), set())


def test_help_has_a_group_for_each_section_and_the_functions_words():
    shown = invoke("--help").stdout
    for words in ("Shows a tree.", "─ Sizes ─", "─ Files ─", "(default: 2)", "--ema", "--this",
                  "--that", "--no-save", "--config"):  # fmt: skip
        assert words in shown
    assert "--no-loud" not in shown


def test_the_command_line_goes_before_the_file_and_the_file_before_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[sizes]\nwidth = 7\ndepth = 5\n[files]\nloud = true\nout = "there"\n')
    tree, given = called("--config", file, "--depth", 6)
    assert tree == Tree(sizes={"width": 7, "depth": 6}, files=Files(loud=True, out=Path("there")))
    assert given == {"width", "depth", "loud", "out"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sizes]\nwidht = 1", "[sizes] has widht: did you mean width?"),
        ("[sizes]\nsave = true", "[sizes] has save, which belongs to [files]: move it there"),
        ("width = 1", "it has, before any table, width, which belongs to [sizes]: move it there"),
        ("[size]\nwidth = 1", "has a table [size]: did you mean sizes?"),
        ("[elsewhere]\nx = 1", "has a table [elsewhere]: known are sizes, files"),
        ("[sizes]\nwidth = 1.5", "width = 1.5 is of type float: write a value of type int"),
        ("[sizes]\nwidth = true", "width = True is of type bool: write a value of type int"),
        ('[files]\nsave = "no"', "save = 'no' is of type str: write a value of type bool"),
        ("[sizes\n", "is no TOML: "),
    ],
)
def test_a_wrong_file_is_one_line_that_says_what_to_do(tmp_path, text, words):
    file = tmp_path / "run.toml"
    file.write_text(text)
    found = invoke("--config", file)
    assert found.exit_code == 1
    (line,) = found.stderr.splitlines()
    assert words in line
    assert not heard


def test_a_file_that_is_not_there_is_a_line():
    found = invoke("--config", "nowhere.toml")
    assert (found.exit_code, len(found.stderr.splitlines())) == (1, 1)
    assert "nowhere.toml cannot be read" in found.stderr


def test_limits_hold_for_the_file_too(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[sizes]\ndepth = 0\n")
    found = invoke("--config", file)
    assert found.exit_code == 2
    assert "--depth" in found.stderr


def test_a_tree_written_as_a_file_is_read_as_itself(tmp_path):
    asked = {"width": 7, "decay": 1e-5, "out": Path('a "b"\\ä'), "save": False, "either": True}
    tree = tree_of(Tree, asked)
    file = tmp_path / "run.toml"
    file.write_text(as_toml(Tree, flat(tree)))
    assert set(tomllib.loads(file.read_text())) == {"sizes", "files"}
    assert called("--config", file)[0] == tree
    assert with_values(tree, {"width": 8}).sizes["width"] == 8


@pytest.mark.parametrize("tree", [TrainOptions, PlanOptions, ProfileOptions])
def test_every_option_of_the_commands_has_a_help_and_one_place(tree):
    for name, each in options_of(tree).items():
        assert each.help.endswith((".", ")")), name
        assert each.of in ("run", "start", "ranks", "layout"), name


def test_a_file_of_train_can_name_every_option(tmp_path):
    file = tmp_path / "all.toml"
    values = {Path: Path("x"), bool: True, int: 1, float: 0.5, str: "x"}
    asked = {name: values[each.kinds[0]] for name, each in options_of(TrainOptions).items()}
    file.write_text(as_toml(TrainOptions, asked))
    assert read_config(TrainOptions, file) == {
        name: str(value) if isinstance(value, Path) else value for name, value in asked.items()
    }
