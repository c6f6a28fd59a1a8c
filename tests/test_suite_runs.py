"""Runs of test suites leave a line each, and docs/development has the table of the lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import suite_runs

TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_a_run_leaves_a_line_with_its_counts(workers, tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_all.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): raise ValueError\n"
        "@pytest.fixture\n"
        "def broken(): yield; raise ValueError\n"
        "def test_teardown(broken): pass\n"
        "def test_skipped(): pytest.skip('no such library')\n"
        "@pytest.mark.gpu\n"
        "def test_gpu(): pass\n"
    )
    record = tmp_path / "runs.jsonl"
    options = ["--record-run", str(record), "--record-suite", "all", "--record-commit", "abc"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), *options, str(tmp_path)]
    path = {"PYTHONPATH": f"{TESTS / 'support'}:{TESTS.parent}", "PATH": ""}
    subprocess.run([*command, "-p", "no:cacheprovider"], cwd=tmp_path, env=path, check=False)
    (line,) = map(json.loads, record.read_text().splitlines())
    assert line["suite"] == "all"
    assert (line["passed"], line["failed"], line["skipped"]) == (1, 2, 2)
    assert [name.split("::")[1] for name in line["failures"]] == ["test_bad", "test_teardown"]
    failures = (tmp_path / "runs.failures.txt").read_text()
    assert "test_bad, call\n" in failures
    assert "test_teardown, teardown\n" in failures
    assert line["skip_reasons"]["no such library"] == 1
    assert line["complete"]
    assert line["environment"]["commit"] == "abc"
    assert suite_runs.table([line, line]).count("| 2, `test_all.py::test_bad`") == 2


def test_the_table_is_that_of_the_lines():
    assert suite_runs.TABLE.read_text() == suite_runs.table(suite_runs.read())
