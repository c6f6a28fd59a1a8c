"""A short soak; ``soak.py`` is the long one."""

from __future__ import annotations

import pytest

from programs import soak
from training_runs import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "engine",
    [pytest.param(n, marks=() if n == "scopes" else pytest.mark.long) for n in soak.ENGINES],
)
def test_everything_that_happens_in_a_long_run_is_bitwise_eager(engine, device):
    lines, run = soak.run(engine, device, 120, shorter=40)
    assert run.provoked == {"capture": 1, "audit": 1}
    assert len(lines) == 20
    assert max(line["audits_passed"] for line in lines) > 1
    assert max(line["replayed"] for line in lines) > 0
    assert len({line["files"] for line in lines[4:]}) == 1
