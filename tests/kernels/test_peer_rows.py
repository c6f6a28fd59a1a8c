"""Rows between ranks: kernels compiled for sm_90, interpreted, and on one GPU that is all ranks.

Shapes: T tokens of a rank, W ranks, G = W * T, D model, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from compiled import check, launch_compiler
from moe_graphs.kernels import peer_rows_reference, peer_rows_triton, permute_triton
from moe_graphs.kernels.peer_rows import PeerMemory

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _memories(
    W: int, T: int, D: int, K: int, dtype: torch.dtype, device: str, halves: int = 1
) -> list[PeerMemory]:
    """Of all ranks, on one device. What nobody writes is NaN, or no expert."""
    G = halves * W * T
    rows = tuple(torch.full((G, D), torch.nan, dtype=dtype, device=device) for _ in range(W))
    experts = tuple(torch.full((G, K), -(10**9), device=device) for _ in range(W))
    weights = tuple(torch.full((G, K), torch.nan, device=device) for _ in range(W))
    parts = (rows, experts, weights)
    return [PeerMemory.of(rank, parts, lambda: None, None, halves) for rank in range(W)]


def _routing(W: int, T: int, K: int, E: int, name: str) -> Tensor:
    """``[W, T, K]``; "one rank": all tokens' experts are the last rank's."""
    local = E // W
    if name == "one rank":
        return torch.rand(W, T, local).topk(min(K, local)).indices + E - local
    return torch.rand(W, T, E).topk(K).indices


def _copies(memory: PeerMemory) -> list[Tensor]:
    return [t.cpu().clone() for t in (*memory.rows, *memory.experts, *memory.weights)]


def _check(
    W: int, T: int, D: int, K: int, dtype: torch.dtype, routing: str, device: str, halves: int = 1
) -> None:
    """Kernels of every rank in turn leave the very bits that the reference leaves."""
    E = 4 * W
    experts_WTK = _routing(W, T, K, E, routing).to(device)
    K = experts_WTK.shape[2]
    source_WTD = torch.randn(W, T, D).to(device, dtype)
    weights_WTK = torch.rand(W, T, K).to(device)
    found, expected = (_memories(W, T, D, K, dtype, device, halves) for _ in range(2))
    # With two halves the first pull finds the first push.
    for with_routing in (True, False):
        for rank in range(W):
            weights = weights_WTK[rank] if with_routing else None
            given = (source_WTD[rank], experts_WTK[rank], weights)
            turn_2 = found[rank].turn_2
            peer_rows_triton.push_rows(*given, found[rank].addresses_3W, rank, 4, turn_2)
            plain = expected[rank]
            parts = (plain.half(p, 0) for p in (plain.rows, plain.experts, plain.weights))
            peer_rows_reference.push_rows(*given, *parts, rank, 4)
            plain.count()
            _check_turns(found[rank], plain)
        for got, want in zip(_copies(found[0]), _copies(expected[0]), strict=True):
            assert torch.equal(got.nan_to_num(777.0), want.nan_to_num(777.0))
    assert W == 1 or routing == "random" or found[0].rows[0].isnan().all()
    for rank in range(W):
        outs = [torch.full((T, n), torch.nan, device=device) for n in (D, K, D, K)]
        outs = [outs[0].to(dtype), outs[1], outs[2].to(dtype), outs[3]]
        where, turn_2 = found[rank].addresses_3W, found[rank].turn_2
        peer_rows_triton.pull_rows(*outs[:2], experts_WTK[rank], where, rank, 4, turn_2)
        plain = expected[rank]
        parts = (plain.half(p, 0) for p in (plain.rows, plain.weights))
        peer_rows_reference.pull_rows(*outs[2:], experts_WTK[rank], *parts, rank, 4)
        plain.count()
        _check_turns(found[rank], plain)
        assert torch.equal(outs[0], outs[2])
        assert torch.equal(outs[1], outs[3])
        assert torch.equal(outs[3], weights_WTK[rank])  # back where they came from
        alone = outs[0].clone().fill_(torch.nan)
        empty = torch.empty(0, 0, device=device)
        peer_rows_triton.pull_rows(alone, empty, experts_WTK[rank], where, rank, 4, turn_2)
        assert torch.equal(alone, outs[2])


def _check_turns(found: PeerMemory, plain: PeerMemory) -> None:
    assert (found.turn_2 is None) == (plain.turn_2 is None)
    if found.turn_2 is not None:
        assert torch.equal(found.turn_2.cpu(), plain.turn_2.cpu())


def _check_own_half(T: int, D: int, K: int, device: str) -> None:
    """What is moved and multiplied lies in the half of a call, or of the one before."""
    (memory,) = _memories(1, T, D, K, FP32, device, halves=2)
    rows_RD, other_TD = torch.randn(T * K, D, device=device), torch.randn(2 * T, D, device=device)
    inverse_TK = torch.randperm(T * K, device=device).view(T, K)
    inverse_TK[0, 0] = -1
    weights_TK, turn_2 = torch.rand(T, K, device=device), memory.turn_2
    for count in (0, 1, 6, 7):
        turn_2[0] = count
        memory.rows[0].fill_(torch.nan)
        permute_triton.collect_rows_into(memory.rows[0], rows_RD, inverse_TK, weights_TK, turn_2)
        own, other = (memory.half(memory.rows, ago)[0] for ago in (0, 1))
        assert torch.equal(own, permute_triton.collect_rows(rows_RD, inverse_TK, weights_TK))
        assert other.isnan().all()
        before = other_TD.chunk(2)[(count - 1) % 2]
        moved = [
            permute_triton.spread_rows(source, inverse_TK, weights_TK, T * K, True, turn)
            for source, turn in ((other_TD, turn_2), (before, None))
        ]
        assert torch.equal(*moved)
        dots = [
            permute_triton.dot_rows(rows_RD, inverse_TK, source, turn)
            for source, turn in ((other_TD, turn_2), (before, None))
        ]
        assert torch.equal(*dots)
        memory.weights[0].fill_(torch.nan)
        peer_rows_triton.push_weights(weights_TK, memory.weights[0], turn_2)
        assert memory.half(memory.weights, 1)[0].isnan().all()
        memory.experts[0].copy_(torch.arange(2 * T * K).view(2 * T, K))
        turn_2[0] += 1  # counted
        experts_TK, found_TK = peer_rows_triton.pull_routing(
            memory.experts[0], memory.weights[0], turn_2
        )
        assert torch.equal(found_TK, weights_TK)
        assert torch.equal(experts_TK, memory.experts[0].chunk(2)[count % 2])


@pytest.mark.usefixtures("interpreted")
def test_halves_interpreted(monkeypatch):
    monkeypatch.setattr(peer_rows_triton, "PAIRS", 4)
    _check_own_half(3, 24, 2, "cpu")


@pytest.mark.gpu
def test_halves_on_one_gpu():
    _check_own_half(1000, 2048, 8, "cuda")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("routing", ["random", "one rank"])
@pytest.mark.parametrize(
    ("W", "T", "D", "K", "dtype"),
    [(2, 5, 24, 3, FP32), (4, 3, 8, 1, FP32), (3, 2, 2056, 5, FP16), (1, 3, 16, 4, FP32)],
)
def test_interpreted(monkeypatch, W, T, D, K, dtype, routing):
    """Several tokens for a program, several tiles for a token."""
    monkeypatch.setattr(peer_rows_triton, "PUSHING", 2)
    monkeypatch.setattr(peer_rows_triton, "PULLING", 2)
    torch.manual_seed(0)
    _check(W, T, D, K, dtype, routing, "cpu")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("programs", [1, 3])
def test_halves_that_take_turns_interpreted(monkeypatch, programs):
    """The last of the programs counts the call, tokens or not."""
    monkeypatch.setattr(peer_rows_triton, "PUSHING", programs)
    monkeypatch.setattr(peer_rows_triton, "PULLING", programs)
    torch.manual_seed(0)
    _check(2, 2, 24, 3, FP32, "random", "cpu", halves=2)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ["random", "one rank"])
@pytest.mark.parametrize(
    ("W", "T", "D", "K", "dtype"),
    [
        (2, 1000, 2048, 8, BF16),
        (4, 300, 2880, 4, BF16),
        (8, 77, 1032, 6, FP32),
        (3, 65, 8, 1, FP16),
    ],
)
def test_on_one_gpu(W, T, D, K, dtype, routing):
    torch.manual_seed(0)
    for halves in (1, 2):
        _check(W, T, D, K, dtype, routing, "cuda", halves)


@pytest.fixture
def compiled(monkeypatch) -> Callable:
    return launch_compiler(monkeypatch)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
    ("W", "D", "K", "dtype"),
    [
        (2, 2048, 8, BF16),
        (4, 2880, 4, BF16),
        (8, 1032, 6, FP16),
        (2, 256, 1, FP32),
        (8, 4096, 8, FP32),
    ],
)
def test_compiled(compiled, W, D, K, dtype, turns):
    """Rows move in pieces of 16 bytes, addresses from a table or not."""
    memory = _memories(W, 1, 8, 1, dtype, "cpu", 2 if turns else 1)[0]
    source, weights = torch.empty(100, D, dtype=dtype), torch.empty(100, K)
    experts = torch.zeros(100, K, dtype=torch.int64)

    def launches() -> None:
        where = memory.addresses_3W
        peer_rows_triton.push_rows(source, experts, weights, where, 1, 16, memory.turn_2)
        peer_rows_triton.pull_rows(source, weights, experts, where, 1, 16, memory.turn_2)

    push, pull = compiled(launches)
    for kernel in (push, pull):
        check(kernel, wgmma=False)
        # The count of the programs, behind a barrier of their warps.
        assert kernel.ptx.count("atom") == (1 if turns else 0)
        if turns:
            before, after = kernel.ptx.split("atom")
            assert "bar.sync" in before
            assert "st.global.v4" not in after
    assert push.ptx.count("st.global.v4.b32") >= W
    assert "st.global.b16" not in push.ptx
    assert pull.ptx.count("ld.global.v4.b32") >= W
    assert "ld.global.b16" not in pull.ptx
