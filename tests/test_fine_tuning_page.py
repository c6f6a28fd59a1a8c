"""`docs/fine_tuning.md` is true: its commands and its Python run, from top to bottom."""

from __future__ import annotations

import re
from typing import Any

import pytest

from test_tutorial import REPOSITORY, run

pytest.importorskip("peft", reason="needs the extra peft")
pytest.importorskip("trl", reason="needs the extra trl")
from lightning_runs import QUIET

# PEFT gives MoE models a pattern for experts, and says so if "all-linear" does not target them.
_PATTERN = "ignore:The following .*_pattern keys:RuntimeWarning"
pytestmark = [*QUIET, pytest.mark.filterwarnings(_PATTERN)]
PAGE = (REPOSITORY / "docs/fine_tuning.md").read_text()


@pytest.mark.long
def test_every_block_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    (installs, *others) = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.S)
    assert installs[1].startswith("git clone")
    names: dict[str, Any] = {}
    eager = []
    for language, block in others:
        if language == "sh":
            run(block)
            continue
        exec(compile(block, "docs/fine_tuning.md", "exec"), names)
        if "graphs.report()" in block:
            eager.append(names["accelerated"].graphs.report().eager_calls)
    assert eager == [{"warmup": 6}] * 3
    assert "norm of the gradients" in capsys.readouterr().out
    for name in (
        "adapters/adapter_model.safetensors",
        "fine_tuned/model.safetensors",
        "merged/model.safetensors",
    ):
        assert (tmp_path / "runs" / name).is_file()
