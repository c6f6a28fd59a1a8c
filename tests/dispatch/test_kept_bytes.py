"""Bytes that each dispatcher and the experts behind it keep for the backward.

The rows' order counts as well: int32 pairs, their inverse, and the experts' ends. Nobody keeps rows
beside tokens, activations, or outputs of experts. With ``recompute`` gate and up of the rows are
not kept either.

Shapes: T tokens of a rank, G = W * T of all W ranks, D model, F ffn, K top-k, E experts, e of a
rank, R rows.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distributed import run_distributed
from kept_bytes import kept_bytes
from moe_graphs.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatcher,
    LocalDispatcher,
    PaddedDispatcher,
)
from moe_graphs.kernels import routed_experts

T, D, F, E, K = 24, 16, 8, 8, 2
DTYPES = (torch.bfloat16, torch.float32)


def kept(dispatcher: Dispatcher, dtype: torch.dtype, *, recompute: bool = False) -> tuple[int, int]:
    """Bytes that are kept between tokens and output, and rows of this rank's experts."""
    torch.manual_seed(0)
    e = len(dispatcher.local_experts(E))
    shapes = (T, D), (e, D, 2 * F), (e, F, D)
    hidden, w1, w2 = (torch.randn(s).to(dtype).requires_grad_() for s in shapes)
    weights, experts = torch.rand(T, K, requires_grad=True), torch.rand(T, E).topk(K).indices
    rows = []

    def run() -> torch.Tensor:
        plan = dispatcher.preprocess(hidden, weights, experts, E)
        given = dispatcher.dispatch(plan)
        rows.append(given.order.order_R.numel())
        operands = given.tokens_XD, given.order, given.weights_XK, w1, w2
        sums = routed_experts(*operands, is_sorted=given.is_sorted, recompute=recompute)
        return dispatcher.combine(sums, given, plan)

    return kept_bytes(run, (w1, w2)), rows[0]


def of_experts(tokens: int, pairs: int, rows: int, e: int, dtype: torch.dtype) -> int:
    """Tokens and gate and up of the rows; routing weights; the order."""
    return dtype.itemsize * (tokens * D + rows * 2 * F) + 4 * pairs + 4 * (rows + pairs + e)


def check_recomputed(dispatcher: Dispatcher, dtype: torch.dtype) -> None:
    """Everything but gate and up is kept if they are computed again."""
    (most, rows), (least, _) = (kept(dispatcher, dtype, recompute=r) for r in (False, True))
    assert most - least == dtype.itemsize * rows * 2 * F


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dispatcher", [LocalDispatcher(), PaddedDispatcher(1.0)])
def test_recomputed(dispatcher, dtype):
    check_recomputed(dispatcher, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_local(dtype):
    assert kept(LocalDispatcher(), dtype) == (of_experts(T, T * K, T * K, E, dtype), T * K)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded(dtype, factor):
    rows = int(T * K * factor)
    assert kept(PaddedDispatcher(factor), dtype) == (of_experts(T, T * K, rows, E, dtype), rows)


@pytest.mark.parametrize("dispatcher", [AllGatherDispatcher(), AllToAllDispatcher()])
def test_one_rank_of_the_others_keeps_no_more_than_its_exchange(dispatcher):
    sent = 2 * 4 * T * K if isinstance(dispatcher, AllToAllDispatcher) else 0
    tokens = T * K if sent else T
    expected = of_experts(tokens, T * K, T * K, E, torch.float32) + sent
    assert kept(dispatcher, torch.float32) == (expected, T * K)


def of_two(rank: int, world_size: int) -> None:
    G, e = world_size * T, E // world_size
    for dtype in DTYPES:
        for dispatcher in (AllGatherDispatcher(), AllToAllDispatcher()):
            check_recomputed(dispatcher, dtype)
        found, rows = kept(AllGatherDispatcher(), dtype)
        assert rows == G * K  # room for the worst routing
        # The end of the pairs of other ranks' experts lies behind the ends of this rank's.
        assert found == of_experts(G, G * K, rows, e + 1, dtype)
        found, rows = kept(AllGatherDispatcher(rows_factor=1.5), dtype)
        assert rows == T * K * 3 // 2
        assert found == of_experts(G, G * K, rows, e, dtype)
        found, rows = kept(AllToAllDispatcher(), dtype)
        every = torch.tensor(rows)
        dist.all_reduce(every)
        assert every == G * K
        # Tokens arrive as rows. The order of the rows that were sent is kept, too.
        assert found == of_experts(rows, rows, rows, e, dtype) + 2 * 4 * T * K


def test_two_ranks():
    run_distributed(of_two, 2)
