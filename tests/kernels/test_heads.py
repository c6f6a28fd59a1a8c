"""split_heads on the CPU: what it refuses, what it keeps, and that values are no copy."""

from __future__ import annotations

import pytest
import torch

from moe_graphs.kernels.heads import split_heads, split_heads_by_rank

QKV, TABLE, WEIGHT = torch.randn(2, 5, 8 * 6), torch.randn(5, 3), torch.ones(6)


def test_values_are_a_view():
    query, key, value = split_heads(QKV, TABLE, TABLE, 4, 2)
    assert [x.shape for x in (query, key, value)] == [(2, 5, n, 6) for n in (4, 2, 2)]
    assert torch.equal(value.flatten(2), QKV[..., 36:])
    assert value.untyped_storage().data_ptr() == QKV.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((QKV[..., :-1], TABLE, TABLE, 4, 2), r"4 \+ 2 \* 2"),
        ((QKV[..., :40], TABLE, TABLE, 4, 2), "even size"),
        ((QKV[0], TABLE, TABLE, 4, 2), "batch, sequence"),
        ((QKV, TABLE[:4], TABLE[:4], 4, 2), r"\(5, 3\), one row a position"),
        ((QKV, TABLE, TABLE[:, :2], 4, 2), r"\(5, 3\), one row a position"),
        ((QKV, TABLE, TABLE, 4, 2, WEIGHT), "two weights"),
        ((QKV, TABLE, TABLE, 4, 2, WEIGHT, WEIGHT[:5]), "two weights"),
        ((QKV, TABLE, TABLE, 4, 2, torch.ones(24), WEIGHT), "two weights"),
        ((QKV, TABLE, TABLE, 4, 2, WEIGHT, WEIGHT, 0.0), "eps above 0"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        split_heads(*arguments)


def test_every_rank_gets_its_heads():
    """Four ranks share four query heads and two kv heads: each has the kv head of its query."""
    query, key, value = split_heads(QKV, TABLE, TABLE, 4, 2)
    for ranks in (1, 2, 4):
        sent = split_heads_by_rank(QKV, TABLE, TABLE, 4, 2, ranks)
        for rank, part in enumerate(sent):
            own = part.unflatten(2, (-1, 6)).split((4 // ranks, *(max(2 // ranks, 1),) * 2), 2)
            kv = slice(rank * 2 // ranks, max((rank + 1) * 2 // ranks, rank * 2 // ranks + 1))
            assert torch.equal(own[0], query[:, :, rank * 4 // ranks : (rank + 1) * 4 // ranks])
            assert torch.equal(own[1], key[:, :, kv])
            assert torch.equal(own[2], value[:, :, kv])
    with pytest.raises(ValueError, match="3 ranks cannot share 4 heads"):
        split_heads_by_rank(QKV, TABLE, TABLE, 4, 2, 3)
