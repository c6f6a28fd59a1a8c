"""Rows between ranks by kernels that write into peers' memory, and read it.

A fixed number of programs takes all tokens in turn: where they go, and how many of them do, stays
on the device. A push reads a token once and stores it at every rank that wants it, the next rank
first, so that not all ranks store to the same one at once; a pull loads from all ranks at once and
adds in their order in fp32. A rank that holds no expert of a token is left alone.

T tokens of a rank, W ranks, D model (`width` eighths of it), K top-k. Addresses `[3, W]` are
those of rows, experts and weights on every rank.
"""

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import launch, next_power_of_2

WIDEST = 2048  # numbers of a row that a program of four warps has in flight
# Numbers of programs. Nothing waits for a store; a load from another rank takes microseconds.
PUSHING, PULLING = 528, 1056


@triton.jit
def _at(addresses_ptr, index, dtype: tl.constexpr):
    """The pointer that lies at one of the addresses, all of which are aligned to 16 bytes.

    If that is said of the number, before it is a pointer, Triton 3.6 forgets it, and moves two
    bytes at a time.
    """
    return tl.multiple_of(tl.load(addresses_ptr + index).to(tl.pointer_type(dtype)), 16)


@triton.jit
def push_kernel(
    source_ptr, experts_ptr, weights_ptr, addresses_ptr, tokens, width, rank, local,
    W: tl.constexpr, K: tl.constexpr, K_LANES: tl.constexpr, BLOCK_D: tl.constexpr,
    ROUTED: tl.constexpr,
):  # fmt: skip
    D = width * 8
    slot = tl.arange(0, K_LANES)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        here = tl.core.to_tensor(token).to(tl.int64)  # in the interpreter it is an int of Python
        row = here + rank * tokens
        expert = tl.load(experts_ptr + here * K + slot, mask=slot < K, other=0)
        holder = tl.where(slot < K, expert.to(tl.int32) // local, -1)
        for base in range(0, D, BLOCK_D):
            column = base + tl.arange(0, BLOCK_D)
            live = column < D
            value = tl.load(source_ptr + here * D + column, mask=live)
            for i in tl.static_range(W):
                peer = (rank + i + 1) % W
                wanted = tl.max((holder == peer).to(tl.int32), 0) > 0
                rows_ptr = _at(addresses_ptr, peer, source_ptr.dtype.element_ty)
                tl.store(rows_ptr + row * D + column, value, mask=live & wanted)
        if ROUTED:
            weight = tl.load(weights_ptr + here * K + slot, mask=slot < K)
            for i in tl.static_range(W):
                to_experts = _at(addresses_ptr, W + i, tl.int64)
                to_weights = _at(addresses_ptr, 2 * W + i, tl.float32)
                tl.store(to_experts + row * K + slot, expert, mask=slot < K)
                tl.store(to_weights + row * K + slot, weight, mask=slot < K)


@triton.jit
def pull_kernel(
    out_ptr, out_weights_ptr, experts_ptr, addresses_ptr, tokens, width, rank, local,
    W: tl.constexpr, K: tl.constexpr, K_LANES: tl.constexpr, BLOCK_D: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    D = width * 8
    slot = tl.arange(0, K_LANES)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        here = tl.core.to_tensor(token).to(tl.int64)  # in the interpreter it is an int of Python
        row = here + rank * tokens
        expert = tl.load(experts_ptr + here * K + slot, mask=slot < K, other=0)
        holder = tl.where(slot < K, expert.to(tl.int32) // local, -1)
        for base in range(0, D, BLOCK_D):
            column = base + tl.arange(0, BLOCK_D)
            live = column < D
            total = tl.zeros((BLOCK_D,), dtype=tl.float32)
            for peer in tl.static_range(W):
                wanted = tl.max((holder == peer).to(tl.int32), 0) > 0
                rows_ptr = _at(addresses_ptr, peer, out_ptr.dtype.element_ty)
                at = rows_ptr + row * D + column
                total += tl.load(at, mask=live & wanted, other=0.0).to(tl.float32)
            out = out_ptr + here * D + column
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=live)
        if WEIGHTS:
            found = tl.zeros((K_LANES,), dtype=tl.float32)
            for peer in tl.static_range(W):
                weights_ptr = _at(addresses_ptr, 2 * W + peer, tl.float32)
                found += tl.load(weights_ptr + row * K + slot, mask=holder == peer, other=0.0)
            tl.store(out_weights_ptr + here * K + slot, found, mask=slot < K)


def push_rows(
    source_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    addresses_3W: torch.Tensor,
    rank: int,
    local: int,
) -> None:
    """Each token to the ranks that hold any of its experts; its routing, if given, to all."""
    tokens, D = source_TD.shape
    weights = experts_TK if weights_TK is None else weights_TK.contiguous()
    args = (
        source_TD.contiguous(), experts_TK.contiguous(), weights, addresses_3W,
        tokens, _eighths(D), rank, local,
    )  # fmt: skip
    tile = _tile(addresses_3W, experts_TK, D)
    launch(push_kernel, (PUSHING,), args, ROUTED=weights_TK is not None, **tile)


def pull_rows(
    out_TD: torch.Tensor,
    out_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    addresses_3W: torch.Tensor,
    rank: int,
    local: int,
) -> None:
    """Write `out_TD`, the sum of a token's rows at the ranks that hold any of its experts.

    `out_TK` gets each pair's number at the rank of its expert, unless it is empty.
    """
    tokens, D = out_TD.shape
    args = (
        out_TD, out_TK, experts_TK.contiguous(), addresses_3W, tokens, _eighths(D), rank, local,
    )  # fmt: skip
    tile = _tile(addresses_3W, experts_TK, D)
    launch(pull_kernel, (PULLING,), args, WEIGHTS=out_TK.numel() > 0, **tile)


def _eighths(D: int) -> int:
    assert D % 8 == 0, "whoever made the memory has checked"
    return D // 8


def _tile(addresses_3W: torch.Tensor, experts_TK: torch.Tensor, D: int) -> dict[str, int]:
    block, top_k = min(WIDEST, next_power_of_2(max(D, 1))), experts_TK.shape[1]
    return {
        "W": addresses_3W.shape[1], "K": top_k, "K_LANES": next_power_of_2(top_k),
        "BLOCK_D": block, "num_warps": 4 if block > WIDEST // 4 else 2,
    }  # fmt: skip
