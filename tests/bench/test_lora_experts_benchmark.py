"""`benchmarks/lora_experts.py` on the CPU, with a tiny layer."""

from __future__ import annotations

import json

import pytest

import lora_experts


def test_a_line_for_each_way(tmp_path):
    out = tmp_path / "lines.jsonl"
    lora_experts.main(["--tiny", "--out", str(out), "--commit", "c"])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["checkpointing"] for line in lines] == [True, False]
    assert all(0 < line["difference"] < lora_experts.APART for line in lines)


def test_other_gradients_are_an_error(monkeypatch):
    monkeypatch.setattr(lora_experts, "added_apart", lambda x, w, low, b, offsets: x @ w[0])
    with pytest.raises(RuntimeError, match="of their size apart"):
        lora_experts.main(["--tiny", "--commit", "c"])


def test_single_products_are_what_the_line_says():
    layer = lora_experts.Layer(lora_experts.TINY["tiny"], "cpu")
    for call in lora_experts.products(layer).values():
        call()
