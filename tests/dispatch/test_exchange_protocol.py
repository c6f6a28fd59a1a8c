"""The protocol of `kernels.peer_rows`, through all interleavings of two and three ranks.

A rank is a list of atomic actions: writing a cell, arriving at a barrier, leaving it, reading a
cell. A cell has the rows of one rank's tokens in one rank's memory. In any interleaving, every read
has to find what the same call has written. A call of the dispatcher waits at two barriers:
`Protocol()`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from moe_graphs.kernels import peer_rows
from moe_graphs.kernels.peer_rows import PeerMemory

PUSH, PULL = "push", "pull"
Cell = tuple[int, int]  # rank of the memory, rank of the tokens


@dataclass(frozen=True)
class Protocol:
    barrier_before: bool = True
    barrier_between: bool = True


def actions(rank: int, ranks: int, calls: tuple[str, ...], protocol: Protocol) -> list[tuple]:
    """Actions of a rank; it reads every cell, since reading less cannot disturb other ranks."""
    everyone, found = range(ranks), []
    meeting = [("come",), ("go",)]
    for number, kind in enumerate(calls):
        of_others = [(peer, rank) for peer in everyone]
        own = [(rank, peer) for peer in everyone]
        written, read = (of_others, own) if kind == PUSH else (own, of_others)
        found += meeting if protocol.barrier_before else []
        found += [("write", cell, number) for cell in written]
        found += meeting if protocol.barrier_between else []
        found += [("read", cell, number) for cell in read]
    return found


def wrong_read(ranks: int, calls: tuple[str, ...], protocol: Protocol) -> str | None:
    """Describe a read that misses its call's data, or a deadlock, in any interleaving; or None."""
    programs = [actions(rank, ranks, calls, protocol) for rank in range(ranks)]
    start = ((0,) * ranks, frozenset())
    seen, open_ = {start}, [start]
    while open_:
        places, memory = open_.pop()
        moved = False
        for rank, place in enumerate(places):
            if place == len(programs[rank]):
                continue
            kind, *rest = programs[rank][place]
            if kind == "go" and not _all_came(programs, places, rank):
                continue
            after, moved = memory, True
            if kind == "write":
                cell, number = rest
                after = frozenset({*(each for each in memory if each[0] != cell), (cell, number)})
            elif kind == "read" and tuple(rest) not in memory:
                return f"rank {rank} in call {rest[1]} of {calls} reads {rest[0]}: {set(memory)}"
            state = (*places[:rank], place + 1, *places[rank + 1 :]), after
            if state not in seen:
                seen.add(state)
                open_.append(state)
        if not moved and any(p < len(programs[rank]) for rank, p in enumerate(places)):
            return f"nobody goes on at {places}"
    return None


def _all_came(programs: list[list[tuple]], places: tuple[int, ...], rank: int) -> bool:
    """Whether every rank has arrived at as many barriers as this rank."""
    counts = [
        sum(action[0] == "come" for action in program[:place])
        for program, place in zip(programs, places, strict=True)
    ]
    return min(counts) >= counts[rank]


def sequences(length: int) -> list[tuple[str, ...]]:
    return list(itertools.product((PUSH, PULL), repeat=length))


@pytest.mark.parametrize(("ranks", "length"), [(2, 4), (3, 3)])
def test_every_read_finds_its_call(ranks, length):
    for calls in sequences(length):
        assert wrong_read(ranks, calls, Protocol()) is None


@pytest.mark.parametrize(
    "broken",
    [
        Protocol(barrier_before=False),
        # A barrier before the writes does not order the writes after it.
        Protocol(barrier_between=False),
        Protocol(barrier_before=False, barrier_between=False),
    ],
    ids=["none before", "none between", "none"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_taken_away_is_missed(broken, ranks):
    found = [wrong_read(ranks, calls, broken) for calls in sequences(3)]
    assert any(found)
    assert all("reads" in each for each in found if each)


def _watched(monkeypatch) -> tuple[list[str], PeerMemory]:
    """Memory of one rank alone, and a list in which its writes, barriers and reads are noted."""
    done: list[str] = []
    parts = [
        (torch.zeros(2, width, dtype=dtype),)
        for width, dtype in ((8, torch.float32), (1, torch.int64), (1, torch.float32))
    ]
    memory = PeerMemory.of(0, parts, lambda: done.append("barrier"))
    reference = SimpleNamespace(**vars(peer_rows.peer_rows_reference))
    for name, action in (("push_rows", "write"), ("pull_rows", "read")):
        monkeypatch.setattr(reference, name, _noting(getattr(reference, name), done, action))
    monkeypatch.setattr(peer_rows, "peer_rows_reference", reference)
    for name, action in (("leave_sums", "write"), ("spread_rows", "read")):
        monkeypatch.setattr(peer_rows, name, _noting(getattr(peer_rows, name), done, action))
    return done, memory


def _noting(function: Callable, done: list[str], action: str) -> Callable:
    def noting(*args):
        done.append(action)
        return function(*args)

    return noting


def test_calls_do_what_is_checked_here(monkeypatch):
    """All calls have the order of the protocol."""
    done, memory = _watched(monkeypatch)
    number = peer_rows.number_of(memory)
    rows_TD, experts_T1 = torch.arange(16.0).view(2, 8), torch.zeros(2, 1, dtype=torch.int64)
    weights_T1, order_R = torch.ones(2, 1), torch.arange(2)
    inverse_G1 = order_R.view(2, 1)
    for call, kind in enumerate([PUSH, PUSH, PULL, PULL, PUSH]):
        given = rows_TD + 100 * call
        if kind == PUSH:
            peer_rows.push_tokens(given, experts_T1, weights_T1, 1, number, "")
            found = peer_rows.received_rows(order_R, inverse_G1, number)
        else:
            found = peer_rows.pull_sums(given, experts_T1, 1, number, "")
        assert torch.equal(found, given)
        assert done == ["barrier", "write", "barrier", "read"]
        done.clear()
        assert torch.equal(memory.rows[0], given)
