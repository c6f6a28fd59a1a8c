"""Ranks read their own parts of the weights in a directory of Hugging Face.

The ranks send nothing, so one process plays them one after the other.
"""

from __future__ import annotations

import pytest
import torch

from fake_ranks import as_rank, lay_out
from hf_directories import saved
from moe_graphs.checkpoints import loading
from moe_graphs.layers import LanguageModel
from moe_graphs.parallel import ParallelConfig, load_pretrained_sharded
from moe_graphs.parallel.own_part import shares
from moe_graphs.parallel.tensor_parallel import fused_rows, global_fqn

LAYOUTS = {
    "shard": ParallelConfig(dp_shard=4),
    "experts": ParallelConfig(dp_shard=4, ep=2),
    "tensors": ParallelConfig(dp_shard=2, tp=2),
    "stages": ParallelConfig(pp=2, dp_shard=2),
}


@pytest.fixture
def numbers_read(monkeypatch) -> list[int]:
    found: list[int] = []
    read = loading._read

    def counted(*given: object) -> torch.Tensor:
        value = read(*given)
        found.append(value.numel())
        return value

    monkeypatch.setattr(loading, "_read", counted)
    return found


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("llama", "shard"),
        ("llama", "tensors"),
        ("llama", "stages"),
        ("qwen3_moe-dense", "experts"),
        ("mixtral", "tensors"),
        ("deepseek_v3", "experts"),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_every_rank_has_its_part_of_the_weights(case, layout, fused, tmp_path, numbers_read):
    directory, _ = saved(case, tmp_path, **({"save_original_format": False} if fused else {}))
    whole, degrees, held = LanguageModel.from_pretrained(directory), LAYOUTS[layout], []
    state = whole.state_dict()
    del numbers_read[:]
    for rank in range(4):
        with as_rank(rank, 4):
            before = len(numbers_read)
            model = LanguageModel.from_pretrained(directory, device="meta")
            assert len(numbers_read) == before
            lay_out(model, degrees, "cpu")
            load_pretrained_sharded(model, directory, "cpu")
            parts, count = fused_rows(model), 0
            for held_as, tensor in model.state_dict().items():
                name = global_fqn(held_as)
                for where, piece in shares(tensor, parts.get(name)):
                    assert torch.equal(piece, state[name][where]), name
                    count += piece.numel() * (not name.endswith("tokens_per_expert"))
            assert torch.equal(model.rope.cos_SQ, whole.rope.cos_SQ)
            held.append(count)
    assert sum(numbers_read) == sum(held)  # no rank reads a number that it does not keep
