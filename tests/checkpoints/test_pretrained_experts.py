"""Ranks that share experts read their own experts from the files.

This file imports no transformers, because every rank imports it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from distributed import run_distributed
from moe_graphs.dispatch import AllToAllDispatcher, LocalDispatcher, SymmetricDispatcher
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig

MOE = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=6)
CONFIG = TransformerConfig(hidden_size=8, num_layers=2, num_heads=2, vocab_size=16, moe=MOE)
TOKENS = torch.arange(12).view(2, 6)


def _read(rank: int, world_size: int, directory: Path) -> tuple[np.ndarray, ...]:
    model = LanguageModel.from_pretrained(directory, dispatcher=AllToAllDispatcher())
    experts = model.layers[1].moe.experts
    bounded = SymmetricDispatcher(rows_factor=2.0)  # has counters that no file holds
    other = LanguageModel.from_pretrained(directory, dispatcher=bounded)
    assert torch.equal(other.layers[1].moe.experts.w1, experts.w1)
    assert not other.layers[1].moe.row_statistics.most_rows
    with pytest.raises(ValueError, match="holds 4 of 8 experts, the others are on other ranks"):
        model.save_pretrained(directory / "ours")
    return tuple(x.detach().numpy() for x in (experts.w1, experts.w2, model(TOKENS).logits_BSV))


@pytest.mark.long
def test_ranks_read_their_own_experts(tmp_path):
    torch.manual_seed(0)
    whole = LanguageModel(CONFIG, LocalDispatcher())
    whole.save_pretrained(tmp_path, max_shard_bytes=2000)
    ranks = run_distributed(_read, 2, arguments=(tmp_path,))
    experts = whole.layers[1].moe.experts
    for parts, want in zip(zip(*ranks, strict=True), (experts.w1, experts.w2), strict=False):
        assert np.array_equal(np.concatenate(parts), want.detach().numpy())
    for *_, logits in ranks:
        np.testing.assert_allclose(logits, whole(TOKENS).logits_BSV.detach(), rtol=1e-5, atol=1e-6)
    assert not (tmp_path / "ours").exists()
