"""Hand-written adversaries under every engine: equal, counted and equal, or a named error.

Without ``--long``, each adversary runs under one engine; the engines take turns.
"""

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
PAIRS = [
    pytest.param(name, engine, id=f"{name}, {engine}", marks=marks)
    for number, (name, case) in enumerate(CASES.items())
    for turn, engine in enumerate(case.engines)
    for marks in [() if turn == number % len(case.engines) else pytest.mark.long]
]
pytestmark = pytest.mark.usefixtures("thawed")


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_an_adversary_is_not_silently_different(name, engine):
    case: Case = CASES[name]
    verdict = judge(case, engine)
    assert verdict.is_allowed, f"{verdict.outcome}: {verdict.detail}"
