"""Rows between ranks, through memory into which every rank of a host can write and read.

A token travels once to every rank that holds any of its experts, however many of them; a token's
partial sums come back once from each. Nothing is compacted: token t of rank s has row ``s * T + t``
in every rank's memory, so its place needs no counting and there is always room for it.

A call is a barrier, writing, a barrier, reading. The first one says that all ranks have read what
the call before has left, whichever it was: on each rank calls run one after the other in one order,
so a rank that has come to it has no reads left to do. The second one says that everything
has been written. So one memory serves all layers and microbatches, no call needs to know which one
came before it, and a graph may replay them in any order that all ranks share.

What was received (``received_rows``, ``received_tokens``) is there until the next call.

Shapes: T tokens of a rank, W ranks, G = W * T, D model, K top-k, R rows of local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.peer_rows import reference as peer_rows_reference
from moe_graphs.kernels.permute import collect_rows_into, spread_rows


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """The memory of all ranks at fixed addresses, as this rank sees it.

    Attributes:
        rows: per rank ``[G, D]``: tokens or gradients that were pushed to it, or partial sums
            that it has for others.
        experts, weights: per rank ``[G, K]``, int64 and fp32; gradients of weights take the place
            of weights.
        addresses_3W: int64 on the device, the addresses of rows, experts and weights on every rank.
        barrier: enqueued between kernels, or waits on the CPU.
        owned: what keeps the memory alive.
    """

    rank: int
    rows: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    addresses_3W: Tensor
    barrier: Callable[[], None]
    owned: Any = None

    @classmethod
    def of(
        cls,
        rank: int,
        parts: Sequence[tuple[Tensor, ...]],
        barrier: Callable[[], None],
        owned: Any = None,
    ) -> PeerMemory:
        """parts: rows, experts and weights; with the addresses of these tensors."""
        rows, experts, weights = parts
        device = rows[rank].device
        addresses = [[each.data_ptr() for each in part] for part in parts]
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(rank, rows, experts, weights, table, barrier, owned)


# An op can take a number but no object. The memory is kept, since a graph may know the number.
_numbered: list[PeerMemory] = []


def memory_of(number: int) -> PeerMemory:
    return _numbered[number]


def number_of(memory: PeerMemory) -> int:
    """The number by which the ops below know this memory from now on."""
    _numbered.append(memory)
    return len(_numbered) - 1


@define_op(device="default")
def push_tokens(
    hidden_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    local: int,
    memory: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Send tokens to all ranks that have an expert of them, and their routing to all ranks.

    ``received_rows`` reads the tokens.

    Args:
        local: the number of experts that a rank holds.
        group_name: the group of the ranks. An op that communicates says with whom.

    Returns:
        ``experts_GK`` (to be read before the next call) and ``weights_GK`` of all ranks' tokens.
    """
    peers = memory_of(memory)
    peers.barrier()
    push_rows(hidden_TD, experts_TK, weights_TK, local, peers)
    peers.barrier()
    return peers.experts[peers.rank], peers.weights[peers.rank].clone()


@define_op(device="default")
def push_gradients(
    grad_TD: Tensor, experts_TK: Tensor, local: int, memory: int, group_name: str
) -> None:
    """Send gradients to the ranks that ``push_tokens`` sends tokens to, without their routing."""
    peers = memory_of(memory)
    peers.barrier()
    push_rows(grad_TD, experts_TK, None, local, peers)
    peers.barrier()


@define_op(device="default")
def received_rows(order_R: Tensor, inverse_GK: Tensor, memory: int) -> Tensor:
    """``rows_RD``, the local experts' rows: tokens of the last push to this rank."""
    peers = memory_of(memory)
    return spread_rows(peers.rows[peers.rank], order_R, inverse_GK, None, True)


@define_op(device="default")
def received_tokens(experts_TK: Tensor, memory: int) -> Tensor:
    """``[G, D]``, a copy of the last push to this rank; tokens without a local expert are anything.

    A recorder sees by ``experts_TK`` on which device this is.
    """
    peers = memory_of(memory)
    return peers.rows[peers.rank].clone()


@define_op(device="default")
def pull_sums(
    sums_GD: Tensor, experts_TK: Tensor, local: int, memory: int, group_name: str
) -> Tensor:
    """``out_TD``, the sums of each token on all ranks, added up.

    A token's rank adds up the ranks' sums in their order and in fp32, and rounds.
    """
    peers = memory_of(memory)
    peers.barrier()
    leave_sums(sums_GD, peers)
    peers.barrier()
    return pull_rows(experts_TK, local, peers, False)[0]


@define_op(device="default")
def pull_gradients(
    grad_RD: Tensor,
    inverse_GK: Tensor,
    grad_weights_GK: Tensor,
    experts_TK: Tensor,
    local: int,
    memory: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """``grad_TD``, and the gradients of weights ``[T, K]`` from the ranks of their experts.

    A rank sums the rows that it has, and rounds; ``grad_TD`` is added up from the ranks' sums as in
    ``pull_sums``.
    """
    peers = memory_of(memory)
    peers.barrier()
    collect_rows_into(peers.rows[peers.rank], grad_RD, inverse_GK, None)
    peers.weights[peers.rank].copy_(grad_weights_GK)
    peers.barrier()
    return pull_rows(experts_TK, local, peers, True)


def push_rows(
    source_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor | None,
    local: int,
    peers: PeerMemory,
) -> None:
    """Write into all ranks' memory; the caller has a barrier before it and one behind it."""
    if has_kernel(source_TD):
        from moe_graphs.kernels.peer_rows import triton_kernels as peer_rows_triton

        peer_rows_triton.push_rows(
            source_TD, experts_TK, weights_TK, peers.addresses_3W, peers.rank, local
        )
    else:
        parts = (peers.rows, peers.experts, peers.weights)
        peer_rows_reference.push_rows(source_TD, experts_TK, weights_TK, *parts, peers.rank, local)


def leave_sums(sums_GD: Tensor, peers: PeerMemory) -> None:
    """Write into this rank's memory, between barriers."""
    peers.rows[peers.rank].copy_(sums_GD)


def pull_rows(
    experts_TK: Tensor, local: int, peers: PeerMemory, with_weights: bool
) -> tuple[Tensor, Tensor]:
    """Read from all ranks' memory, between barriers. Without weights the second tensor is empty."""
    own = peers.rows[peers.rank]
    tokens, top_k = experts_TK.shape
    out_TD = own.new_empty((tokens, own.shape[1]))
    out_TK = peers.weights[peers.rank].new_empty((tokens, top_k) if with_weights else (0, 0))
    if has_kernel(own):
        from moe_graphs.kernels.peer_rows import triton_kernels as peer_rows_triton

        peer_rows_triton.pull_rows(
            out_TD, out_TK, experts_TK, peers.addresses_3W, peers.rank, local
        )
    else:
        parts = (peers.rows, peers.weights)
        peer_rows_reference.pull_rows(out_TD, out_TK, experts_TK, *parts, peers.rank, local)
    return out_TD, out_TK
