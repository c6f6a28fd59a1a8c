"""`benchmarks/largest_batch.py` on the CPU, and its search."""

from __future__ import annotations

import json

import pytest

from largest_batch import KINDS, largest, main


@pytest.mark.parametrize("limit", [0, 7, 8, 9, 40, 41, 1000, 1007])
@pytest.mark.parametrize("start", [8, 64])
def test_the_search_finds_the_largest_multiple_that_fits(limit, start):
    tried = []

    def fits(tokens):
        tried.append(tokens)
        return tokens <= limit

    assert largest(fits, start, 8) == limit // 8 * 8
    assert not any(each % 8 for each in tried)
    assert len(tried) == len(set(tried)) <= 16


def test_a_line_for_each_kind(tmp_path):
    out = tmp_path / "lines.jsonl"
    assert main(["--smoke", "--out", str(out), "--commit", "c"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["contender"], line["tokens"]) for line in lines] == [(k, 24) for k in KINDS]
    assert all(line["error"] is None for line in lines)
