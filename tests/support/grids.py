"""Combinations of what a test varies: all pairs of values by default, all of them if asked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def grid(*axes: Sequence[Any]) -> list[Any]:
    """Parameters for every combination; `full` marks those that add no new pair of values.

    A combination is one parameter per axis; a tuple on an axis is several. Greedy and in order, so
    the same ones are chosen in every process.

    Example: ``grid("ab", "cd", "ef")`` leaves four of eight unmarked.
    """
    places = list(itertools.combinations(range(len(axes)), 2))
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = {(p, c[p[0]], c[p[1]]) for c in combinations for p in places}
    chosen = set()
    while missing:
        pairs = {c: {(p, c[p[0]], c[p[1]]) for p in places} for c in combinations}
        best = max(combinations, key=lambda c: len(pairs[c] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [_parameter(axes, c, () if c in chosen else pytest.mark.full) for c in combinations]


def _parameter(axes: Sequence[Sequence[Any]], combination: tuple[int, ...], marks: Any) -> Any:
    values = [axis[i] for axis, i in zip(axes, combination, strict=True)]
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return pytest.param(*flat, marks=marks)
