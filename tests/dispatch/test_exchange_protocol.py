"""The protocol of `kernels.peer_rows`, through all interleavings of two and three ranks.

A rank is a list of atomic actions: writing a cell, coming to a barrier, going on from it, reading
a cell. A cell is the rows of one rank's tokens in one rank's memory. Every read has to
find what the same call has written, whoever else is how far by then. A call of the dispatcher
waits twice: `Protocol()`.
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
Cell = tuple[int, int]  # whose memory, whose tokens


@dataclass(frozen=True)
class Protocol:
    barrier_before: bool = True
    barrier_between: bool = True


def actions(rank: int, ranks: int, calls: tuple[str, ...], protocol: Protocol) -> list[tuple]:
    """What is read is left out for nobody: a rank that reads less is in nobody's way."""
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
    """Any read, in any interleaving, that does not find its call's data; a deadlock likewise."""
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
    """Each has come to as many barriers as this rank."""
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
        # The barrier before says nothing about what is written behind it.
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
    """One rank alone, and what its calls do: the order of its writing, barriers and reading."""
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
    for name, action in (("collect_rows_into", "write"), ("spread_rows", "read")):
        monkeypatch.setattr(peer_rows, name, _noting(getattr(peer_rows, name), done, action))
    return done, memory


def _noting(function: Callable, done: list[str], action: str) -> Callable:
    def noting(*args):
        done.append(action)
        return function(*args)

    return noting


def test_calls_do_what_is_checked_here(monkeypatch):
    """In the order of the protocol, whatever the calls are."""
    done, memory = _watched(monkeypatch)
    number = peer_rows.number_of(memory)
    rows_TD, experts_T1 = torch.arange(16.0).view(2, 8), torch.zeros(2, 1, dtype=torch.int64)
    weights_T1, order_R = torch.ones(2, 1), torch.arange(2)
    inverse_G1 = order_R.view(2, 1)
    for call, kind in enumerate([PUSH, PUSH, PULL, PULL, PUSH]):
        given = rows_TD + 100 * call
        if kind == PUSH:
            peer_rows.push_tokens(given, experts_T1, weights_T1, 1, number, "")
            found = peer_rows.received_rows(order_R, inverse_G1, None, number)
        else:
            found = peer_rows.pull_sums(given, inverse_G1, None, experts_T1, 1, number, "")
        assert torch.equal(found, given)
        assert done == ["barrier", "write", "barrier", "read"]
        done.clear()
        assert torch.equal(memory.rows[0], given)
