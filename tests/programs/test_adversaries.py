"""Hand-written adversaries under every engine: equal, counted and equal, or a named error."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from programs.cases import Case, judge

FILES = sorted(path.stem for path in Path(__file__).parent.glob("adversary_*.py"))
CASES = {
    f"{file.removeprefix('adversary_')}: {case.name}": case
    for file in FILES
    for case in importlib.import_module(f"programs.{file}").case.cases
}
PAIRS = [(name, engine) for name, case in CASES.items() for engine in case.engines]
pytestmark = pytest.mark.usefixtures("thawed")


@pytest.mark.parametrize(("name", "engine"), PAIRS, ids=[f"{n}, {e}" for n, e in PAIRS])
def test_an_adversary_is_not_silently_different(name, engine):
    case: Case = CASES[name]
    verdict = judge(case, engine)
    assert verdict.is_allowed, f"{verdict.outcome}: {verdict.detail}"
