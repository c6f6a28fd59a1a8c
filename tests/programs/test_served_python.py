"""Each program of ``served_python.py`` is replayed, or stays eager where the table says so."""

from __future__ import annotations

import pytest

from grids import by_turns
from programs.cases import judge
from programs.running import EQUAL
from programs.served_python import EAGER, case
from programs.specification import ENGINES

LETTERS = dict(zip("scf", ENGINES, strict=True))
CASES = {each.name: each for each in case.cases}
pytestmark = pytest.mark.usefixtures("thawed")


@pytest.mark.parametrize(("letter", "name"), by_turns(list(LETTERS), list(CASES)))
def test_a_program_is_served(name, letter):
    verdict = judge(CASES[name], LETTERS[letter])
    assert verdict.is_allowed, f"{verdict.outcome}: {verdict.detail}"
    replays = verdict.outcome == EQUAL and verdict.replayed > 0
    assert replays == (letter not in EAGER[name]), verdict
