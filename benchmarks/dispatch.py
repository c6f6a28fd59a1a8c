"""Time of dispatchers, which bring tokens to their experts' ranks, and of their kernels.

    torchrun --nproc-per-node 2 benchmarks/dispatch.py --out benchmarks/results/dispatch_h200.jsonl

Per case a line of layers (preprocess, dispatch and combine, without experts between them: forward,
and forward with backward) and one of kernels alone, in GB/s that leave a rank: the push and the
pull of the symmetric dispatcher by several numbers of programs, a plain copy of as many rows to
the next rank's memory, and NCCL's all-to-all of as many. All but `all_to_all`, which reads sizes on
the host, are CUDA graphs of several calls. Contenders take turns in random order, behind a
barrier; medians of the rounds, of the slowest rank. Gate: what `symmetric` returns is bitwise what
`all_gather` does, gradients included.

`--seconds` ends it before a case that starts later than that. `--smoke` is small, on gloo and the
CPU, where nothing is captured: a test of this file.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import environment
from moe_graphs.dispatch import Dispatcher, make_dispatcher
from moe_graphs.dispatch.peer_memory import peer_memory
from moe_graphs.kernels import peer_rows, permute, unpermute
from several_ranks import is_late, keep

EXPERTS, FACTOR, PROGRAMS = 64, 1.25, (132, 264, 528, 1056)
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Tokens of a rank; random routing."""

    tokens: int
    hidden_size: int
    top_k: int


WIDTHS = ((1024, 4), (2048, 8), (4096, 8))
# What decides comes first.
CASES = [Case(tokens, *width) for tokens in (2048, 8192, 256, 16384) for width in WIDTHS]


class Inputs:
    """One rank's tokens, weights, experts and incoming gradient."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(dist.get_rank())
        shape = (case.tokens, case.hidden_size)
        dtype = torch.bfloat16
        self.hidden_TD = torch.randn(shape, device=device).to(dtype).requires_grad_()
        self.grad_TD = torch.randn(shape, device=device).to(dtype)
        chosen = torch.rand(case.tokens, EXPERTS, device=device).topk(case.top_k)
        self.experts_TK, self.weights_TK = chosen.indices, chosen.values.requires_grad_()

    def forward(self, dispatcher: Dispatcher) -> Tensor:
        plan = dispatcher.preprocess(self.hidden_TD, self.weights_TK, self.experts_TK, EXPERTS)
        dispatched = dispatcher.dispatch(plan)
        tokens_XD, order = dispatched.tokens_XD, dispatched.order
        rows_RD = tokens_XD if dispatched.is_sorted else permute(tokens_XD, order)
        sums_XD = unpermute(rows_RD, order, dispatched.weights_XK)
        return dispatcher.combine(sums_XD, dispatched, plan)

    def both(self, dispatcher: Dispatcher) -> list[Tensor]:
        output_TD = self.forward(dispatcher)
        leaves = (self.hidden_TD, self.weights_TK)
        return [output_TD, *torch.autograd.grad(output_TD, leaves, self.grad_TD)]


def dispatchers() -> dict[str, Dispatcher]:
    """Dispatchers by their names in the lines; with the factor there is room for fewer rows."""
    made = {name: make_dispatcher(name) for name in ("all_to_all", "all_gather", "symmetric")}
    bounded = {
        f"{name} {FACTOR}": make_dispatcher(name, rows_factor=FACTOR)
        for name in ("all_gather", "symmetric")
    }
    return made | bounded


def kernels(case: Case, inputs: Inputs) -> tuple[dict[str, Call], int]:
    """Calls of the kernels, and the bytes that leave this rank in each: a token per other rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hidden_TD, experts_TK = inputs.hidden_TD.detach(), inputs.experts_TK
    device, local = hidden_TD.device, EXPERTS // world_size
    shape = (case.tokens, case.hidden_size, case.top_k)
    number = peer_memory(dist.group.WORLD, *shape, hidden_TD.dtype, device)
    peers = peer_rows.memory_of(number)
    holder_TK = experts_TK // local
    leaving = [int((holder_TK == peer).any(1).sum()) for peer in range(world_size)]
    leaving[rank] = 0
    rows = sum(leaving)
    # All ranks send as much: what they have to agree on is the smallest.
    least = torch.tensor(min(n for peer, n in enumerate(leaving) if peer != rank), device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    splits = [0 if peer == rank else int(least) for peer in range(world_size)]
    source = hidden_TD.repeat(world_size, 1)[: sum(splits)].contiguous()
    target = torch.empty_like(source)
    target_of_next = peers.rows[(rank + 1) % world_size][: min(rows, len(source))]
    calls: dict[str, Call] = {
        f"{name} by {programs}": lambda call=call, programs=programs: with_programs(programs, call)
        for name, call in {
            "push": lambda: peer_rows.push_rows(hidden_TD, experts_TK, None, local, peers),
            "pull": lambda: peer_rows.pull_rows(experts_TK, local, peers, False),
        }.items()
        for programs in PROGRAMS
    }
    calls |= {
        "peer copy": lambda: target_of_next.copy_(source[: len(target_of_next)]),
        "nccl all_to_all": lambda: dist.all_to_all_single(target, source, splits, splits),
        "two barriers": lambda: (peers.barrier(), peers.barrier()),
    }
    return calls, rows * case.hidden_size * hidden_TD.element_size()


def with_programs(programs: int, call: Call) -> None:
    """Run a push or a pull with ``programs`` programs; the CPU has no programs."""
    if not torch.cuda.is_available():
        call()
        return
    from moe_graphs.kernels.peer_rows import triton_kernels as peer_rows_triton

    kept = peer_rows_triton.PUSHING, peer_rows_triton.PULLING
    peer_rows_triton.PUSHING = peer_rows_triton.PULLING = programs
    try:
        call()
    finally:
        peer_rows_triton.PUSHING, peer_rows_triton.PULLING = kept


def captured(call: Call, calls: int, stream: torch.cuda.Stream, pool: Any) -> Call:
    """Capture several calls in one graph, while NCCL's own thread goes on."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph.replay


def timed(call: Call, on_gpu: bool) -> float:
    """Milliseconds of a call on the slowest rank."""
    dist.barrier()
    if on_gpu:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        took = start.elapsed_time(end)
    else:
        began = time.perf_counter()
        call()
        took = 1e3 * (time.perf_counter() - began)
    slowest = torch.tensor(took, device="cuda" if on_gpu else "cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def medians(contenders: dict[str, Call], calls: int, rounds: int, on_gpu: bool) -> dict[str, float]:
    """Milliseconds per call, by contender."""
    # Graphs of one stream and one pool work in the same memory, one after the other.
    where = (torch.cuda.Stream(), torch.cuda.graph_pool_handle()) if on_gpu else ()
    runs = {}
    for name, call in contenders.items():
        if on_gpu and not name.startswith("all_to_all"):
            runs[name] = captured(call, calls, *where)
        else:
            runs[name] = lambda call=call: [call() for _ in range(calls)]
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)  # the same on all ranks
    for _ in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            times[name].append(timed(runs[name], on_gpu) / calls)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def gate(inputs: Inputs) -> bool:
    """Whether symmetric is bitwise all_gather on every rank."""
    names = ("all_gather", "symmetric")
    expected, found = (inputs.both(make_dispatcher(name)) for name in names)
    same = all(map(torch.equal, expected, found))
    everywhere = torch.tensor(float(same), device=inputs.grad_TD.device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere)


def records(case: Case, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    inputs, on_gpu = Inputs(case, device), device.type == "cuda"
    calls = max(2, min(10, 2**25 // (case.tokens * case.hidden_size))) if on_gpu else 2
    common = {**asdict(case), "ranks": dist.get_world_size(), "captured": on_gpu}
    passed = gate(inputs)
    made = dispatchers()
    both = {name: lambda d=d: inputs.both(d) for name, d in made.items()}
    forward = {name: lambda d=d: inputs.forward(d) for name, d in made.items()}
    layers = {
        "kind": "layer",
        **common,
        "bitwise": passed,
        "forward_ms": medians(forward, calls, rounds, on_gpu),
        "both_ms": medians(both, calls, rounds, on_gpu),
    }
    alone, nbytes = kernels(case, inputs)
    ms = medians(alone, calls, rounds, on_gpu)
    rates = {name: nbytes / took / 1e6 for name, took in ms.items() if "barrier" not in name}
    return [layers, {"kind": "kernel", **common, "bytes": nbytes, "ms": ms, "gb_per_s": rates}]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--smoke", action="store_true", help="on the CPU, as a test")
    parser.add_argument("--commit", help="where there is no .git to ask")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    began, args = time.monotonic(), parse(arguments)
    owner = not dist.is_initialized()
    device = torch.device("cpu" if args.smoke else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if owner:
        on = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group("gloo" if args.smoke else "nccl", **on)
    constant = {"benchmark": "dispatch", "environment": environment.stamp(args.commit)}
    for case in [Case(8, 16, 2)] if args.smoke else CASES:
        if is_late(began + args.seconds, device):
            break
        for record in records(case, device, args.rounds):
            keep(record, constant, args.out)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    if owner:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
