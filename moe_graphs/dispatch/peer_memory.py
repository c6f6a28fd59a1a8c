"""Memory that all ranks of one host can reach, made once for all layers of a shape.

On GPUs this memory is torch's symmetric memory (``torch.distributed._symmetric_memory``). On the
CPU every rank maps an anonymous file, which is gone when the processes are, even if they are
killed.

Shapes: T tokens of a rank, W ranks, G = W * T, D model, K top-k.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
import socket
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moe_graphs.dispatch.expert_group import exchange, rank_and_size
from moe_graphs.kernels.peer_rows import PeerMemory, number_of

# Milliseconds that a kernel waits for the other ranks before it fails; NCCL waits as long.
BARRIER_TIMEOUT = 600_000
_ALIGNED = 256  # bytes
_Shape = tuple[int, int, int]  # G, D, K


@functools.cache
def peer_memory(
    group: dist.ProcessGroup,
    tokens: int,
    hidden_size: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Make the memory for these shapes in the first call; return its number.

    ``kernels.peer_rows`` takes the number. The memory is never freed, because graphs may hold its
    addresses. All ranks call this function together.

    Raises:
        ValueError: on every rank, if the ranks cannot reach each other's memory.
    """
    with _disable_current_modes(), torch.no_grad():
        if hidden_size % 8:
            raise ValueError(
                f"symmetric moves 16 bytes at a time and takes hidden sizes divisible by 8, got "
                f"{hidden_size}: take 'all_gather'"
            )
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"symmetric makes its memory in the first call with {tokens} tokens, which cannot "
                f"be in a capture: run a step eagerly first"
            )
        _check_reach(group, device)
        shape = (dist.get_world_size(group) * tokens, hidden_size, top_k)
        make = _on_gpus if device.type == "cuda" else _on_the_cpu
        made: PeerMemory | None = None
        try:
            made, problem = make(group, shape, dtype, device), ""
        except (OSError, RuntimeError) as error:
            problem = f"cannot share memory ({error})"
        _refuse_if_any(group, problem)
        assert made is not None
        return number_of(made)


def _check_reach(group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare hosts and devices through the group's store, before anything is allocated."""
    number = device.index if device.index is not None else 0
    said = exchange(group, "symmetric", f"{_host()} {socket.gethostname()} {number}").values()
    hosts = {each.split()[0]: each.split()[1] for each in said}
    problem = _missing(group, device)
    if len(hosts) > 1:
        problem = f"{len(said)} ranks are on hosts {', '.join(sorted(hosts.values()))}"
    elif not problem and device.type == "cuda":
        problem = _no_access(number, [int(each.split()[2]) for each in said])
    _refuse_if_any(group, problem)


def _missing(group: dist.ProcessGroup, device: torch.device) -> str:
    """The feature that this process lacks, or an empty string."""
    if device.type == "cuda":
        found = importlib.util.find_spec("torch.distributed._symmetric_memory")
        return "" if found else "this torch has no torch.distributed._symmetric_memory"
    try:
        group._get_backend(device)
    except RuntimeError:
        return "the process group has no backend for the CPU, such as gloo"
    return "" if hasattr(os, "memfd_create") else f"{sys.platform} has no memfd_create"


def _no_access(own: int, others: list[int]) -> str:
    """The devices without peer access, or an empty string.

    Only devices that this process sees are asked; for others, mapping the memory fails later.
    """
    visible = range(torch.cuda.device_count())
    far = [
        other
        for other in others
        if other != own and other in visible and not torch.cuda.can_device_access_peer(own, other)
    ]
    return f"cuda:{own} has no peer access to {', '.join(f'cuda:{n}' for n in far)}" if far else ""


def _refuse_if_any(group: dist.ProcessGroup, problem: str) -> None:
    """Raise on all ranks if one of them has a problem.

    Raises:
        ValueError: some rank's ``problem`` is not empty; the message has the first one.
    """
    problems = {rank: said for rank, said in exchange(group, "symmetric", problem).items() if said}
    if problems:
        rank, said = next(iter(problems.items()))
        raise ValueError(f"symmetric needs peer access: {said} (rank {rank}): take 'all_gather'")


def _host() -> str:
    """Name of the running machine, the same in all of its containers."""
    found = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return found.read_text().strip() if found.exists() else socket.gethostname()


def _on_gpus(
    group: dist.ProcessGroup, shape: _Shape, dtype: torch.dtype, device: torch.device
) -> PeerMemory:
    from torch.distributed import _symmetric_memory as symmetric_memory

    G, D, K = shape
    sizes = ((D, dtype), (K, torch.int64), (K, torch.float32))
    rank, made, owned, problem, lies_at = dist.get_rank(group), [], [], "", ""
    try:
        for width, kind in sizes:
            made.append(symmetric_memory.empty(max(G, 1), width, dtype=kind, device=device))
    except RuntimeError as error:
        problem = str(error)
    # A rendezvous waits for all ranks, also for a rank whose allocation failed: ask first.
    if any(exchange(group, "symmetric", problem).values()):
        raise RuntimeError(problem or "another rank could not")
    try:
        for own in made:
            handle = symmetric_memory.rendezvous(own, group.group_name)
            owned.append((own, handle))
            # The tensor's offset in its allocation may differ from rank to rank.
            lies_at += f"{own.data_ptr() - handle.buffer_ptrs[rank]} "
    finally:
        offsets = [said.split() for said in exchange(group, "symmetric", lies_at).values()]
    if not all(len(each) == len(owned) for each in offsets):
        raise RuntimeError("another rank could not")
    parts = [
        tuple(
            handle.get_buffer(peer, own.shape, own.dtype, int(each[part]) // own.itemsize)[:G]
            for peer, each in enumerate(offsets)
        )
        for part, (own, handle) in enumerate(owned)
    ]
    barrier = functools.partial(owned[0][1].barrier, channel=0, timeout_ms=BARRIER_TIMEOUT)
    return PeerMemory.of(rank, parts, barrier, owned)


def _on_the_cpu(
    group: dist.ProcessGroup, shape: _Shape, dtype: torch.dtype, device: torch.device
) -> PeerMemory:
    (rank, world_size), (G, D, K) = rank_and_size(group), shape
    sizes = [(D, dtype), (K, torch.int64), (K, torch.float32)]
    lengths = [
        -(-max(G, 1) * width * kind.itemsize // _ALIGNED) * _ALIGNED for width, kind in sizes
    ]
    mapped = _mapped(group, world_size * sum(lengths)).view(world_size, -1).split(lengths, 1)
    parts = [
        tuple(bytes_[: G * width * kind.itemsize].view(kind).view(G, width) for bytes_ in part)
        for part, (width, kind) in zip(mapped, sizes, strict=True)
    ]
    return PeerMemory.of(rank, parts, _barrier_on_the_cpu(group))


def _mapped(group: dist.ProcessGroup, length: int) -> Tensor:
    """Map the memory of rank 0, which the other ranks open by its number in /proc."""
    file, path = None, ""
    if dist.get_rank(group) == 0:
        with contextlib.suppress(OSError):  # an empty path tells all ranks that this one failed
            file = os.memfd_create("moe_graphs")
            os.ftruncate(file, length)
            path = f"/proc/{os.getpid()}/fd/{file}"
    path = exchange(group, "symmetric", path)[0]
    if not path:
        raise OSError("rank 0 could not make a file in memory")
    try:
        return torch.from_file(path, shared=True, size=length, dtype=torch.uint8)
    finally:
        exchange(group, "symmetric", "mapped, or not")
        if file is not None:
            os.close(file)


def _barrier_on_the_cpu(group: dist.ProcessGroup) -> Callable[[], None]:
    def barrier() -> None:
        dist.all_reduce(torch.zeros(1), group=group)

    return barrier
