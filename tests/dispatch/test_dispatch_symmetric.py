"""Tokens through peers' memory, on gloo ranks and on GPUs, equal all-gather to the bit.

Shapes: T tokens of a rank, W ranks, G = W * T, D model, F ffn, K top-k, E experts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed import RANKS, run_distributed
from moe_graphs.dispatch import (
    AllGatherDispatcher,
    SymmetricDispatcher,
    equal_tokens,
    make_dispatcher,
    peer_memory,
)
from moe_graphs.kernels import peer_rows
from routed_ranks import ROUTINGS, D, E, F, T, check_routing, run_layer
from stand_in_experts import unchanged

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)]


def _poison(group: dist.ProcessGroup | None) -> None:
    """Fill this rank's memory with NaN, so that a read before its write shows."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()  # until here ranks may read
    for memory in peer_rows._numbered:
        if len(memory.rows) == dist.get_world_size(group):
            memory.rows[memory.rank].fill_(torch.nan)
            memory.weights[memory.rank].fill_(torch.nan)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()  # from here on ranks may write


def _equals_all_gather(
    name: str, group, device: str, dtype: torch.dtype, factor: float | None
) -> None:
    """Compare output and gradients of tokens, weights and experts, in poisoned memory."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(3)
    experts_GK = ROUTINGS[name][0](world_size * T, world_size)
    weights_GK, w1, w2 = (
        torch.rand(experts_GK.shape), torch.randn(E, D, 2 * F), torch.randn(E, F, D),
    )  # fmt: skip
    hidden_GD, grad_GD = torch.randn(2, world_size * T, D)
    mine = slice(rank * T, (rank + 1) * T)
    batch = (hidden_GD.to(dtype), weights_GK, experts_GK)
    given = [each[mine].to(device) for each in batch]
    given += [each.to(device, dtype) for each in (w1, w2, grad_GD[mine])]
    want = run_layer(AllGatherDispatcher(group, factor), *given)
    _poison(group)
    found = run_layer(SymmetricDispatcher(group, factor), *given)
    for number, (got, expected) in enumerate(zip(found, want, strict=True)):
        assert torch.equal(got, expected), f"{name}: {number}"
    _check_counts(group, factor, *given[:3])


def _check_counts(group, factor: float | None, hidden_TD, weights_TK, experts_TK) -> None:
    """Check the rows that arrive, are needed and are dropped against counts on the host."""
    dispatcher, rank, world_size = (
        SymmetricDispatcher(group, factor), dist.get_rank(group), dist.get_world_size(group),
    )  # fmt: skip
    plan = dispatcher.preprocess(hidden_TD, weights_TK, experts_TK, E)
    everywhere = [torch.empty_like(experts_TK) for _ in range(world_size)]
    dist.all_gather(everywhere, experts_TK, group=group)
    needed = sum(int((each * world_size // E == rank).sum()) for each in everywhere)
    rows, top_k = plan.order.order_R.numel(), experts_TK.shape[1]
    if factor is not None:
        worst = world_size * T * min(top_k, E // world_size)
        assert rows == min(factor * T * top_k, worst)
        assert plan.rows_needed.item() == needed
    assert plan.dropped.item() == max(needed - rows, 0)
    assert plan.order.offsets_E[-1].item() == min(needed, rows)


def _check_all(rank: int, world_size: int, device: str) -> None:
    groups = [None]
    if world_size == 4:  # all ranks, then groups of two
        groups.append([dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2])
    dtypes = [torch.float32, torch.bfloat16] if device == "cpu" else [torch.bfloat16]
    for group, dtype, name in itertools.product(groups, dtypes, ROUTINGS):
        check_routing(SymmetricDispatcher(group), device, dtype, name)
        factors = {torch.float32: [None], torch.bfloat16: [1.0]}[dtype]
        for factor in factors if device == "cpu" else (None, 1.0):
            _equals_all_gather(name, group, device, dtype, factor)
    assert len(peer_rows._numbered) <= 32  # one memory for each shape, dtype, group and kind


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_equals_all_gather_and_one_process(world_size):
    run_distributed(_check_all, world_size, arguments=("cpu",))


@pytest.mark.multigpu
def test_equals_all_gather_and_one_gpu():
    run_distributed(_check_all, RANKS, "nccl", arguments=("cuda",))


def _call(tokens: int, device: str) -> str | None:
    """Dispatch ``tokens`` tokens; return the error, or None if the results are right."""
    hidden_TD = torch.full((tokens, 8), 1.0 + dist.get_rank(), device=device)
    weights_TK = torch.ones(tokens, 1, device=device)
    experts_TK = torch.arange(tokens, device=device).view(-1, 1) % E
    dispatcher = SymmetricDispatcher()
    try:
        plan = dispatcher.preprocess(hidden_TD, weights_TK, experts_TK, E)
    except ValueError as error:
        return str(error)
    dispatched = dispatcher.dispatch(plan)
    output_TD = dispatcher.combine(unchanged(dispatched), dispatched, plan)
    assert torch.equal(output_TD, hidden_TD)
    return None


def _unequal(rank: int, world_size: int, device: str) -> list[str | None]:
    said = [_call(tokens, device) for tokens in (8 + rank, 8, 8, 12 - rank, 0, 12, 8)]
    if rank == 0:
        return said  # this rank goes on with a known number
    equal_tokens.PATIENCE = 1.0
    return [*said, _call(9 + rank, device)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_unequal_tokens_are_refused_on_every_rank(backend):
    device = "cuda" if backend == "nccl" else "cpu"
    first, *others = run_distributed(_unequal, RANKS, backend, arguments=(device,))
    for said in (first, *others):
        assert f"have {[8 + rank for rank in range(RANKS)]} tokens. symmetric has" in said[0]
        assert "choose dispatcher 'all_to_all'" in said[0]
        assert [said[index] for index in (1, 2, 4, 5, 6)] == [None] * 5
    for rank, said in enumerate(others, 1):
        assert f"rank {rank} has {9 + rank} tokens for the first time, and not all" in said[7]


def _no_memory(device: str) -> contextlib.AbstractContextManager:
    """Context in which memory cannot be made: on every rank's GPU, or on rank 0's CPU."""
    if device == "cpu":
        return mock.patch.object(os, "memfd_create", side_effect=OSError("full"))
    from torch.distributed import _symmetric_memory

    return mock.patch.object(_symmetric_memory, "empty", side_effect=RuntimeError("full"))


def _refusals(rank: int, world_size: int, device: str) -> list[str]:
    """Messages of the refusals if something is missing, if possible on one rank alone."""
    said = []

    def refused(tokens: int, size: int = 8) -> None:
        hidden_TD = torch.ones(tokens, size, device=device)
        weights_TK = torch.ones(tokens, 1, device=device)
        with pytest.raises(ValueError, match="symmetric") as error:
            SymmetricDispatcher().preprocess(hidden_TD, weights_TK, weights_TK.long(), E)
        said.append(str(error.value))

    with (
        mock.patch.object(peer_memory, "_host", return_value=str(rank)),
        mock.patch.object(socket, "gethostname", return_value=f"node{rank}"),
    ):
        refused(1)
    lacks = "this torch has none" if rank else ""
    with mock.patch.object(peer_memory, "_missing", return_value=lacks):
        refused(2)
    with _no_memory(device) if rank == 0 else contextlib.nullcontext():
        refused(3)
    refused(4, size=12)
    if device == "cuda":
        with mock.patch.object(torch.cuda, "can_device_access_peer", return_value=False):
            refused(7)
    assert _call(5, device) is None  # the ranks go on after a refusal
    return said


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_share_memory_is_refused_on_every_rank(backend):
    device = "cuda" if backend == "nccl" else "cpu"
    ranks = run_distributed(_refusals, 2, backend, arguments=(device,), timeout_seconds=40)
    full = "full" if device == "cuda" else "rank 0 could not make a file"
    for hosts, missing, memory, size, *access in ranks:
        assert "symmetric needs peer access: 2 ranks are on hosts node0, node1" in hosts
        assert hosts.endswith("take 'all_gather'")
        assert "needs peer access: this torch has none (rank 1): take 'all_gather'" in missing
        assert f"needs peer access: cannot share memory ({full}" in memory
        assert "hidden sizes divisible by 8, got 12: take 'all_gather'" in size
        if device == "cuda":
            assert "cuda:0 has no peer access to cuda:1 (rank 0)" in access[0]


class _Handle:
    """Stand-in for a handle of torch's symmetric memory, with other offsets on every rank."""

    def __init__(self, allocation: torch.Tensor, world_size: int) -> None:
        self.allocation, self.asked = allocation, []
        self.buffer_ptrs = [allocation.data_ptr()] * world_size

    def get_buffer(self, peer: int, shape: torch.Size, dtype: torch.dtype, offset: int):
        self.asked.append((peer, tuple(shape), offset))
        return self.allocation.view(dtype)[offset : offset + shape.numel()].view(shape)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert (channel, timeout_ms) == (0, 600_000)


def _torchs_memory(rank: int, world_size: int) -> list:
    """Calls of a stand-in for torch's symmetric memory, which fails the second time on rank 1."""
    from torch.distributed import _symmetric_memory

    handles, fails = [], False

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if fails and rank:
            raise RuntimeError("no handle")
        allocation = torch.zeros(4096, dtype=torch.uint8)
        handles.append(_Handle(allocation, world_size))
        at = 16 * (1 + rank) // dtype.itemsize
        numel = shape[0] * shape[1]
        return allocation.view(dtype)[at : at + numel].view(shape)

    def rendezvous(own: torch.Tensor, name: str) -> _Handle:
        assert name == dist.group.WORLD.group_name
        start = own.untyped_storage().data_ptr()
        return next(each for each in handles if each.allocation.data_ptr() == start)

    with (
        mock.patch.object(_symmetric_memory, "empty", empty),
        mock.patch.object(_symmetric_memory, "rendezvous", rendezvous),
        mock.patch.object(peer_memory, "_on_the_cpu", peer_memory._on_gpus),
    ):
        given = (dist.group.WORLD, 3, 8, 2, torch.bfloat16, torch.device("cpu"))
        memory = peer_rows.memory_of(peer_memory.peer_memory(*given))
        fails = True
        with pytest.raises(ValueError, match="symmetric needs peer access: cannot") as error:
            peer_memory.peer_memory(*given[:1], 4, *given[2:])
    memory.barrier()
    own = [part[rank].data_ptr() for part in (memory.rows, memory.experts, memory.weights)]
    assert memory.addresses_3W[:, rank].tolist() == own
    return [[handle.asked for handle in handles[:3]], str(error.value)]


def test_tensors_of_torchs_memory_are_found_where_they_lie():
    for asked, said in run_distributed(_torchs_memory, 2):
        assert asked == [
            [(0, (6, 8), 8), (1, (6, 8), 16)],
            [(0, (6, 2), 2), (1, (6, 2), 4)],
            [(0, (6, 2), 4), (1, (6, 2), 8)],
        ]
        assert "cannot share memory (another rank could not) (rank 0): take 'all_gather'" in said


def test_by_name():
    assert make_dispatcher("symmetric", rows_factor=1.5) == SymmetricDispatcher(rows_factor=1.5)
    assert not SymmetricDispatcher.host_sync


def _out_of_step(rank: int, world_size: int, device: str) -> None:
    """Run calls in random order on ranks that wait at different times.

    Tokens are sent twice before anything comes back, two microbatches are open at once, and sums
    come back twice.
    """
    torch.manual_seed(rank)
    dispatcher = SymmetricDispatcher()
    calls = random.Random(5)  # the same on all ranks
    dawdle = random.Random(rank)
    opened: list[tuple] = []
    for number in range(80):
        time.sleep(dawdle.choice([0.0, 0.0, 0.002]))
        if calls.random() < 0.55 or not opened:
            hidden_TD = torch.randn(T, D, device=device).requires_grad_()
            experts_TK = torch.rand(T, E, device=device).topk(3).indices
            weights_TK = torch.rand(T, 3, device=device)
            plan = dispatcher.preprocess(hidden_TD, weights_TK, experts_TK, E)
            opened.append((hidden_TD, weights_TK, plan))
            continue
        hidden_TD, weights_TK, plan = opened.pop(calls.randrange(len(opened)))
        dispatched = dispatcher.dispatch(plan)
        for _ in range(calls.choice([1, 2])):
            output_TD = dispatcher.combine(unchanged(dispatched), dispatched, plan)
        want_TD = hidden_TD * weights_TK.sum(1, keepdim=True)
        torch.testing.assert_close(output_TD, want_TD, msg=f"call {number}")
        if calls.random() < 0.5:
            grad_TD = torch.randn_like(hidden_TD)
            (found_TD,) = torch.autograd.grad(output_TD, hidden_TD, grad_TD)
            want_TD = grad_TD * weights_TK.sum(1, keepdim=True)
            torch.testing.assert_close(found_TD, want_TD, msg=f"gradient of call {number}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_out_of_step_and_calls_in_any_order(backend):
    device = "cuda" if backend == "nccl" else "cpu"
    run_distributed(_out_of_step, RANKS, backend, arguments=(device,))


def _one_dies(rank: int, world_size: int) -> None:
    assert _call(6, "cpu") is None
    if rank:
        os._exit(1)
    _call(6, "cpu")


def test_a_rank_that_dies_ends_the_others():
    with pytest.raises(
        RuntimeError, match=r"(?s)rank 0:.*Connection.*rank 1:.*died without a word"
    ):
        run_distributed(_one_dies, 2)


def _one_never_comes(rank: int, world_size: int) -> None:
    """Leave rank 0 alone in a call: rank 1 is alive, but waits at the end."""
    peer_memory.BARRIER_TIMEOUT = 5_000
    assert _call(6, "cuda") is None
    if rank == 0:
        _call(6, "cuda")


@pytest.mark.multigpu
def test_a_kernel_that_waits_for_a_rank_ends_its_process():
    """The kernel has to do so itself, since NCCL's watchdog does not see it."""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 0:.*(CUDA error|died without a word)"):
        run_distributed(_one_never_comes, 2, "nccl", timeout_seconds=40)
    assert time.monotonic() - began < 40


def _mapped_files(rank: int, world_size: int) -> tuple[int, int]:
    before = len(os.listdir("/proc/self/fd"))
    assert _call(6, "cpu") is None
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:moe_graphs" in line for line in maps)
    return len(os.listdir("/proc/self/fd")) - before, mapped


def test_memory_of_the_cpu_has_no_name_and_no_open_file():
    """Nothing is left behind then, however the processes end."""
    assert run_distributed(_mapped_files, 2) == [(0, 1)] * 2
