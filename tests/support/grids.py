"""Combinations of a test's parameters: all pairs of values, or every value, or all if asked."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import pytest


def grid(*axes: Sequence[Any]) -> list[Any]:
    """Parameters for every combination; `full` marks those that add no new pair of values.

    A combination is one parameter per axis; a tuple on an axis is several. Greedy and in order, so
    the same ones are chosen in every process.

    Example: ``grid("ab", "cd", "ef")`` leaves four of eight unmarked.
    """
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen = covering(combinations)
    return [_parameter(axes, c, () if c in chosen else pytest.mark.full) for c in combinations]


def by_turns(*axes: Sequence[Any]) -> list[Any]:
    """Every combination, of which `long` marks all but one per value, taken by turns; CI runs all.

    Example: ``by_turns("abc", "de")`` leaves ad, be and cd unmarked.
    """
    turns = {tuple(i % len(axis) for axis in axes) for i in range(max(map(len, axes)))}
    combinations = itertools.product(*(range(len(axis)) for axis in axes))
    return [_parameter(axes, c, () if c in turns else pytest.mark.long) for c in combinations]


def by_pairs(*axes: Sequence[Any]) -> list[Any]:
    """Every combination, of which `long` marks those that add no new pair of values; CI runs it."""
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen = covering(combinations)
    return [_parameter(axes, c, () if c in chosen else pytest.mark.long) for c in combinations]


def longer(places: Sequence[Any]) -> list[Any]:
    """Parameters that are all marked `long`, besides their own marks."""
    return [pytest.param(*place.values, marks=(*place.marks, pytest.mark.long)) for place in places]


def few(places: Sequence[Any]) -> list[Any]:
    """Parameters of a ``grid``, of which `long` marks those without a value that is new."""
    found, had = [], set()
    for place in places:
        values = set(enumerate(place.values))
        is_short = place.marks or not values <= had
        found.append(place if is_short else pytest.param(*place.values, marks=pytest.mark.long))
        had |= set() if place.marks else values
    return found


def pairs(combinations: Sequence[tuple]) -> list[Any]:
    """Parameters as in ``grid``, for combinations of which some are left out."""
    chosen = covering(combinations)
    return [pytest.param(*c, marks=() if c in chosen else pytest.mark.full) for c in combinations]


def covering(combinations: Sequence[tuple[Hashable, ...]]) -> set[tuple[Hashable, ...]]:
    """A few of the combinations, which contain every pair of values that any of them contains."""
    pairs = {c: set(itertools.combinations(enumerate(c), 2)) for c in combinations}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(combinations, key=lambda c: len(pairs[c] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _parameter(axes: Sequence[Sequence[Any]], combination: tuple[int, ...], marks: Any) -> Any:
    values = [axis[i] for axis, i in zip(axes, combination, strict=True)]
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return pytest.param(*flat, marks=marks)
