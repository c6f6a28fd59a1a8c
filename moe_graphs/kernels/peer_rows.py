"""Rows between ranks, through memory into which every rank of a host can write and read.

A token travels once to every rank that holds any of its experts, however many of them; a token's
partial sums come back once from each. Nothing is compacted: token t of rank s has row ``s * T + t``
in every rank's memory, so its place needs no counting and there is always room for it.

A call is a barrier, writing, a barrier, reading. The first one says that all ranks have read what
the call before has left, whichever it was: on each rank calls run one after the other in one order,
so a rank that has come to it has no reads left to do. The second one says that everything
has been written. So one memory serves all layers and microbatches, no call needs to know which one
came before it, and a graph may replay them in any order that all ranks share.

In memory of two halves a call is writing, a barrier, reading: call n has half n % 2. The invariant:
**a rank writes into a half for call n + 2 only when every rank has come to the barrier of call
n + 1, and a rank comes to that one only when it has read all that it will ever read of call n.**
The first part holds since writing follows the barrier of the call before, the second since a rank's
calls, reads behind their barriers included, run one after the other on one stream. No rank is ahead
of another one by more, so two halves are what it takes;
``tests/dispatch/test_exchange_protocol.py`` goes through all interleavings.

Which half a call has cannot be known before it runs: graphs are replayed in any order, and eager
calls come between them. So the count of calls lies on the device (``turn_2``), where kernels read
it. The last program of the kernel that moves rows between ranks moves it on; what reads what was
pushed comes later and takes the half of the call before. All ranks count the same, because they run
the same calls in the same order, which a barrier demands anyway. A capture runs nothing and counts
nothing. The count is no state of a model: what is put back after a run beside the real one does not
include it, and must not, since the invariant stands on its going on.

What was received (``received_rows``, ``received_dots``) is there until the next call.

Shapes: T tokens of a rank, W ranks, G = W * T, D model, K top-k, R rows of local experts, H halves
of the memory: 1 or 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_graphs.kernels import peer_rows_reference
from moe_graphs.kernels.availability import has_kernel
from moe_graphs.kernels.ops import define_op
from moe_graphs.kernels.permute import collect_rows_into, dot_rows, rows_in_part, spread_rows
from moe_graphs.kernels.row_stack import RETURNED, part_of


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """What all ranks hold at fixed addresses, as this rank sees it.

    Attributes:
        rows: per rank ``[H * G, D]``: tokens or gradients that were pushed to it, or partial sums
            that it has for others.
        experts, weights: per rank ``[H * G, K]``, int64 and fp32; gradients of weights likewise.
        addresses_3W: int64 on the device, of those three on every rank.
        turn_2: int64 on the device, None if there is one half: how many calls this rank has done,
            and how many programs of the kernel that runs now have.
        barrier: enqueued between kernels, or waits on the CPU.
        owned: what keeps the memory alive.
    """

    rank: int
    rows: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    addresses_3W: Tensor
    turn_2: Tensor | None
    barrier: Callable[[], None]
    owned: Any = None

    @classmethod
    def of(
        cls,
        rank: int,
        parts: Sequence[tuple[Tensor, ...]],
        barrier: Callable[[], None],
        owned: Any = None,
        halves: int = 1,
    ) -> PeerMemory:
        """parts: rows, experts and weights; with the addresses of these tensors."""
        rows, experts, weights = parts
        device = rows[rank].device
        addresses = [[each.data_ptr() for each in part] for part in parts]
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        turn_2 = torch.zeros(2, dtype=torch.int64, device=device) if halves == 2 else None
        return cls(rank, rows, experts, weights, table, turn_2, barrier, owned)

    def begin(self) -> None:
        """Before anything is written."""
        if self.turn_2 is None:
            self.barrier()

    def half(self, part: tuple[Tensor, ...], ago: int) -> list[Tensor]:
        """Of every rank what the call of so many calls ago had. Looks at the count on the host:
        for the CPU."""
        if self.turn_2 is None:
            return list(part)
        return [each.chunk(2)[(int(self.turn_2[0]) - ago) % 2] for each in part]

    def count(self) -> None:
        """What kernels do themselves."""
        if self.turn_2 is not None:
            self.turn_2[0] += 1


# An op takes numbers, and its memory stays where it is as long as a graph may know the number.
_numbered: list[PeerMemory] = []


def memory_of(number: int) -> PeerMemory:
    return _numbered[number]


def number_of(memory: PeerMemory) -> int:
    """What the ops below call this memory by, from now on."""
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
    """Sends tokens to all ranks that have an expert of them (``received_rows``), and their routing
    to all: ``experts_GK`` (to be read before the next call) and ``weights_GK`` of all tokens.

    local: how many experts a rank holds. group_name: of the ranks, whose memory that is: an op
    that communicates says with whom.
    """
    peers = memory_of(memory)
    peers.begin()
    push_rows(hidden_TD, experts_TK, weights_TK, local, peers)
    peers.barrier()
    return _received_routing(peers)


@define_op(device="default")
def push_gradients(
    grad_TD: Tensor, experts_TK: Tensor, local: int, memory: int, group_name: str
) -> None:
    """As tokens travel, without their routing."""
    peers = memory_of(memory)
    peers.begin()
    push_rows(grad_TD, experts_TK, None, local, peers)
    peers.barrier()


@define_op(device="default")
def received_rows(
    order_R: Tensor, inverse_GK: Tensor, weights_GK: Tensor | None, memory: int
) -> Tensor:
    """``rows_RD``: what the last call has pushed to this rank, times its weights, in the rows of
    the local experts."""
    peers = memory_of(memory)
    own = peers.rows[peers.rank]
    if peers.turn_2 is not None and has_kernel(own):
        from moe_graphs.kernels import permute_triton

        rows = order_R.numel()
        return permute_triton.spread_rows(own, inverse_GK, weights_GK, rows, True, peers.turn_2)
    rows_GD = peers.half(peers.rows, 1)[peers.rank]
    return spread_rows(rows_GD, order_R, inverse_GK, weights_GK, True)


@define_op(device="default")
def received_dots(rows_RD: Tensor, inverse_GK: Tensor, memory: int) -> Tensor:
    """``dots_GK``: the inner products of what the last call has pushed to this rank with the rows
    of the local experts."""
    return _dots(rows_RD, inverse_GK, memory_of(memory))


@define_op(device="default")
def received_dots_kept(
    state: Tensor, frame_5: Tensor, inverse_GK: Tensor, stack: int, memory: int
) -> Tensor:
    """The same with rows of a frame of a stack (``KeptRows``)."""
    where_GK = rows_in_part(frame_5, inverse_GK)
    return _dots(part_of(stack, RETURNED), where_GK, memory_of(memory))


@define_op(device="default")
def pull_sums(
    rows_RD: Tensor,
    inverse_GK: Tensor,
    weights_GK: Tensor | None,
    experts_TK: Tensor,
    local: int,
    memory: int,
    group_name: str,
) -> Tensor:
    """``out_TD``: each token's rows, weighted, summed where they are and rounded, then over the
    ranks, in their order and in fp32, and rounded once more."""
    peers = memory_of(memory)
    peers.begin()
    _collect(peers, rows_RD, inverse_GK, weights_GK)
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
    """``grad_TD`` as sums are pulled, without weights, and the weights' own gradients ``[T, K]``
    from the ranks of their experts."""
    peers = memory_of(memory)
    peers.begin()
    _collect(peers, grad_RD, inverse_GK, None)
    own = peers.weights[peers.rank]
    if peers.turn_2 is not None and has_kernel(own):
        from moe_graphs.kernels import peer_rows_triton

        peer_rows_triton.push_weights(grad_weights_GK, own, peers.turn_2)
    else:
        peers.half(peers.weights, 0)[peers.rank].copy_(grad_weights_GK)
    peers.barrier()
    return pull_rows(experts_TK, local, peers, True)


def _received_routing(peers: PeerMemory) -> tuple[Tensor, Tensor]:
    experts, weights = peers.experts[peers.rank], peers.weights[peers.rank]
    if peers.turn_2 is not None and has_kernel(weights):
        from moe_graphs.kernels import peer_rows_triton

        return peer_rows_triton.pull_routing(experts, weights, peers.turn_2)
    own = peers.rank
    return peers.half(peers.experts, 1)[own], peers.half(peers.weights, 1)[own].clone()


def _dots(rows_RD: Tensor, inverse_GK: Tensor, peers: PeerMemory) -> Tensor:
    own = peers.rows[peers.rank]
    if peers.turn_2 is not None and has_kernel(own):
        from moe_graphs.kernels import permute_triton

        return permute_triton.dot_rows(rows_RD, inverse_GK, own, peers.turn_2)
    return dot_rows(rows_RD, inverse_GK, peers.half(peers.rows, 1)[peers.rank], True)


def _collect(
    peers: PeerMemory, rows_RD: Tensor, inverse_GK: Tensor, weights_GK: Tensor | None
) -> None:
    """Sums for the other ranks."""
    own = peers.rows[peers.rank]
    if peers.turn_2 is not None and has_kernel(own):
        from moe_graphs.kernels import permute_triton

        permute_triton.collect_rows_into(own, rows_RD, inverse_GK, weights_GK, peers.turn_2)
    else:
        own_GD = peers.half(peers.rows, 0)[peers.rank]
        collect_rows_into(own_GD, rows_RD, inverse_GK, weights_GK)


def push_rows(
    source_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor | None,
    local: int,
    peers: PeerMemory,
) -> None:
    """Writes into all ranks' memory; between barriers of the caller's."""
    if has_kernel(source_TD):
        from moe_graphs.kernels import peer_rows_triton

        peer_rows_triton.push_rows(
            source_TD, experts_TK, weights_TK, peers.addresses_3W, peers.rank, local, peers.turn_2
        )
    else:
        parts = (peers.half(part, 0) for part in (peers.rows, peers.experts, peers.weights))
        peer_rows_reference.push_rows(source_TD, experts_TK, weights_TK, *parts, peers.rank, local)
        peers.count()


def pull_rows(
    experts_TK: Tensor, local: int, peers: PeerMemory, with_weights: bool
) -> tuple[Tensor, Tensor]:
    """Reads from all ranks' memory; likewise. Without weights the second one is empty."""
    own = peers.rows[peers.rank]
    tokens, top_k = experts_TK.shape
    out_TD = own.new_empty((tokens, own.shape[1]))
    out_TK = peers.weights[peers.rank].new_empty((tokens, top_k) if with_weights else (0, 0))
    if has_kernel(own):
        from moe_graphs.kernels import peer_rows_triton

        peer_rows_triton.pull_rows(
            out_TD, out_TK, experts_TK, peers.addresses_3W, peers.rank, local, peers.turn_2
        )
    else:
        parts = (peers.half(part, 0) for part in (peers.rows, peers.weights))
        peer_rows_reference.pull_rows(out_TD, out_TK, experts_TK, *parts, peers.rank, local)
        peers.count()
    return out_TD, out_TK
