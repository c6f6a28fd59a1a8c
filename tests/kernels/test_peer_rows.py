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
from moe_graphs.kernels.peer_rows import PeerMemory
from moe_graphs.kernels.peer_rows import reference as peer_rows_reference
from moe_graphs.kernels.peer_rows import triton_kernels as peer_rows_triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _memories(W: int, T: int, D: int, K: int, dtype: torch.dtype, device: str) -> list[PeerMemory]:
    """Memory of all ranks, on one device. Places that nobody writes hold NaN, or no expert."""
    G = W * T
    rows = tuple(torch.full((G, D), torch.nan, dtype=dtype, device=device) for _ in range(W))
    experts = tuple(torch.full((G, K), -(10**9), device=device) for _ in range(W))
    weights = tuple(torch.full((G, K), torch.nan, device=device) for _ in range(W))
    parts = (rows, experts, weights)
    return [PeerMemory.of(rank, parts, lambda: None) for rank in range(W)]


def _routing(W: int, T: int, K: int, E: int, name: str) -> Tensor:
    """``[W, T, K]``; "one rank": all tokens' experts are the last rank's."""
    local = E // W
    if name == "one rank":
        return torch.rand(W, T, local).topk(min(K, local)).indices + E - local
    return torch.rand(W, T, E).topk(K).indices


def _copies(memory: PeerMemory) -> list[Tensor]:
    return [t.cpu().clone() for t in (*memory.rows, *memory.experts, *memory.weights)]


def _check(W: int, T: int, D: int, K: int, dtype: torch.dtype, routing: str, device: str) -> None:
    """Kernels of every rank in turn leave the very bits that the reference leaves."""
    E = 4 * W
    experts_WTK = _routing(W, T, K, E, routing).to(device)
    K = experts_WTK.shape[2]
    source_WTD = torch.randn(W, T, D).to(device, dtype)
    weights_WTK = torch.rand(W, T, K).to(device)
    found, expected = (_memories(W, T, D, K, dtype, device) for _ in range(2))
    for with_routing in (True, False):
        for rank in range(W):
            weights = weights_WTK[rank] if with_routing else None
            given = (source_WTD[rank], experts_WTK[rank], weights)
            peer_rows_triton.push_rows(*given, found[rank].addresses_3W, rank, 4)
            plain = expected[rank]
            parts = (plain.rows, plain.experts, plain.weights)
            peer_rows_reference.push_rows(*given, *parts, rank, 4)
        for got, want in zip(_copies(found[0]), _copies(expected[0]), strict=True):
            assert torch.equal(got.nan_to_num(777.0), want.nan_to_num(777.0))
    assert W == 1 or routing == "random" or found[0].rows[0].isnan().all()
    for rank in range(W):
        outs = [torch.full((T, n), torch.nan, device=device) for n in (D, K, D, K)]
        outs = [outs[0].to(dtype), outs[1], outs[2].to(dtype), outs[3]]
        where, plain = found[rank].addresses_3W, expected[rank]
        peer_rows_triton.pull_rows(*outs[:2], experts_WTK[rank], where, rank, 4)
        parts = (plain.rows, plain.weights)
        peer_rows_reference.pull_rows(*outs[2:], experts_WTK[rank], *parts, rank, 4)
        assert torch.equal(outs[0], outs[2])
        assert torch.equal(outs[1], outs[3])
        assert torch.equal(outs[3], weights_WTK[rank])  # back where they came from
        alone = outs[0].clone().fill_(torch.nan)
        empty = torch.empty(0, 0, device=device)
        peer_rows_triton.pull_rows(alone, empty, experts_WTK[rank], where, rank, 4)
        assert torch.equal(alone, outs[2])


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
    _check(W, T, D, K, dtype, routing, "cuda")


@pytest.fixture
def compiled(monkeypatch) -> Callable:
    return launch_compiler(monkeypatch)


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
def test_compiled(compiled, W, D, K, dtype):
    """Rows move in pieces of 16 bytes, addresses from a table or not."""
    memory = _memories(W, 1, 8, 1, dtype, "cpu")[0]
    source, weights = torch.empty(100, D, dtype=dtype), torch.empty(100, K)
    experts = torch.zeros(100, K, dtype=torch.int64)

    def launches() -> None:
        where = memory.addresses_3W
        peer_rows_triton.push_rows(source, experts, weights, where, 1, 16)
        peer_rows_triton.pull_rows(source, weights, experts, where, 1, 16)

    push, pull = compiled(launches)
    for kernel in (push, pull):
        check(kernel, wgmma=False)
        assert "atom" not in kernel.ptx
    assert push.ptx.count("st.global.v4.b32") >= W
    assert "st.global.b16" not in push.ptx
    assert pull.ptx.count("ld.global.v4.b32") >= W
    assert "ld.global.b16" not in pull.ptx
