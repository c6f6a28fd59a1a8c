"""`benchmarks/largest_batch.py` on the CPU, and its search."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from largest_batch import KINDS, _loss, largest, main


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


@pytest.mark.long
def test_a_line_for_each_kind(tmp_path):
    out = tmp_path / "lines.jsonl"
    assert main(["--smoke", "--out", str(out), "--commit", "c"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["contender"], line["tokens"]) for line in lines] == [(k, 24) for k in KINDS]
    assert all(line["error"] is None for line in lines)


def test_a_model_that_returns_logits_alone_has_the_loss_of_whole_logits():
    logits_BSV = torch.randn(2, 4, 8, requires_grad=True)
    batch = torch.randint(8, (2, 4))

    class LogitsAlone(torch.nn.Module):
        def forward(self, tokens_BS):
            return SimpleNamespace(logits_BSV=logits_BSV, aux_loss=torch.tensor(0.5))

    loss = _loss(LogitsAlone(), batch)
    expected = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), batch.flatten()) + 0.5
    torch.testing.assert_close(loss, expected)
