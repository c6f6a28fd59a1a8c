"""A line per run of a test suite, and the table of them: commit x suite x machine.

python -m pytest -m gpu --record-run docs/development/suite_runs.jsonl --record-commit COMMIT
PYTHONPATH=. python tests/support/suite_runs.py    # writes the table, suite_runs.md
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moe_graphs.bench.environment import stamp

ROOT = Path(__file__).resolve().parents[2]
LINES = ROOT / "docs" / "development" / "suite_runs.jsonl"
TABLE = LINES.with_suffix(".md")
EXTRAS = ("transformer_engine", "megablocks", "transformers", "peft", "trl", "lightning")
HEAD = """# Which commit passed which tests, and where

`make test-gpu` appends a line to [suite_runs.jsonl](suite_runs.jsonl) after each run, and
`PYTHONPATH=. python tests/support/suite_runs.py` writes this page from the lines. `make test-gpu`
runs every test that needs one GPU and, where several GPUs are found, those that need several.

| date | commit | suite | machine | versions | passed | failed | skipped | time |
|---|---|---|---|---|---|---|---|---|
"""


class Recorder:
    """Counts the outcomes of one run and appends them to a file as one JSON line.

    It is registered in the process that collects the reports, not in xdist's workers. Failures are
    written as they come, too, to a file beside it: a run that hangs leaves no line.
    """

    def __init__(self, path: Path, commit: str | None, suite: str) -> None:
        self._path, self._commit, self._suite = path, commit, suite
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._outcomes: dict[str, str] = {}
        self._reasons: Counter[str] = Counter()
        self._started = time.time()
        self._failures = path.with_suffix(".failures.txt")
        self._failures.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test: it failed if its setup, its call or its teardown did."""
        known = self._outcomes.get(report.nodeid)
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = "failed" if known == "failed" else report.outcome
        if report.failed:
            with self._failures.open("a") as file:
                file.write(f"{report.nodeid}, {report.when}\n{report.longreprtext}\n\n")
        if report.skipped and isinstance(report.longrepr, tuple):
            self._reasons[re.sub(r"^Skipped: ", "", report.longrepr[2])] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        counts = Counter(self._outcomes.values())
        line = {
            "suite": self._suite,
            **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
            "complete": exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
            "failures": sorted(k for k, v in self._outcomes.items() if v == "failed"),
            "skip_reasons": dict(self._reasons.most_common()),
            "seconds": round(time.time() - self._started),
            "extras": _installed(),
            "environment": stamp(self._commit),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _installed() -> dict[str, str]:
    """Versions of the optional libraries that are installed."""
    found = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(found[name][0]) for name in EXTRAS if found.get(name)}


def _row(line: dict[str, Any]) -> str:
    where = line["environment"]
    versions = {"torch": where["torch"], "triton": where["triton"], "Python": where["python"]}
    cells = (
        where["date"][:10],
        f"`{where['commit'].partition('+')[0][:7]}`{'+' if '+' in where['commit'] else ''}",
        f"`{line['suite']}`",
        where["gpu"] if where["gpu"] != "none" else f"{where['cpus']} CPU cores",
        ", ".join(f"{name} {version}" for name, version in (versions | line["extras"]).items()),
        str(line["passed"]) + ("" if line["complete"] else " (cut off)"),
        ", ".join([str(line["failed"]), *(f"`{name}`" for name in line["failures"][:5])]),
        ", ".join(f"{count}: {reason}" for reason, count in line["skip_reasons"].items()) or "0",
        f"{line['seconds']} s",
    )
    return f"| {' | '.join(cells)} |"


def table(lines: list[dict[str, Any]]) -> str:
    """The page, newest run first."""
    newest_first = sorted(lines, key=lambda line: line["environment"]["date"], reverse=True)
    return HEAD + "\n".join(map(_row, newest_first)) + "\n"


def read(path: Path = LINES) -> list[dict[str, Any]]:
    """The lines of a file of runs; none where there is no file."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    TABLE.write_text(table(read()))
    sys.stdout.write(f"{TABLE} has {len(read())} runs\n")
