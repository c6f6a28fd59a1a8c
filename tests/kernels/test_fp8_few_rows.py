"""Layers in FP8 with few rows are counted and told once."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

from moe_graphs import portable_launches
from moe_graphs.kernels.fp8.few_rows import tell_if_few


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch):
    monkeypatch.setattr(portable_launches, "_launches", Counter())


def counted() -> int:
    return sum(portable_launches.portable_launches().values())


def test_forwards_are_counted_and_told_once():
    with pytest.warns(UserWarning, match="get 511 rows each on average. .* fewer than 512,"):
        tell_if_few(8 * 511, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_if_few(8 * 100, 8)
    assert counted() == 2


@pytest.mark.parametrize(("rows", "experts"), [(8 * 512, 8), (0, 8), (512, 1)])
def test_enough_rows_and_none_are_not(rows, experts):
    tell_if_few(rows, experts)
    assert counted() == 0


def test_pyproject_ignores_the_warning_by_its_words():
    tell_if_few(8 * 99, 8)  # an error otherwise
    assert counted() == 1
