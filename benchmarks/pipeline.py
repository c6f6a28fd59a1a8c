"""Graphs under pipeline schedules: their number, their memory and how long the capture takes.

    python benchmarks/pipeline.py --out benchmarks/results/pipeline_h200.jsonl

Memory: one rank of an (interleaved) 1F1B pipeline, driven by its order alone, with chunks of MoE
layers. Eager's peak of saved activations is what is allocated after an action, at most, over what
was allocated before the step; its temporaries are the peak above that. The bound for the pools is
1.05 times the first plus the second once per slot. Next to the graphs counted here stands the
scheme of the seeds' systems: two per layer and microbatch.

Capture: 96 scopes and 4 microbatches in flight, against torch.cuda.make_graphed_callables on as
many modules. Seconds: of graphs the steps that capture, with their proofs; of
callables the call that makes them, with its warm-up.

A row that fails says so, and the others go on. `--smoke`: tiny modules on the CPU, as a test.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it: three seconds that belong to no capture
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moe_graphs
from moe_graphs.bench import environment
from moe_graphs.engine.backends.cuda import CudaGraphs
from moe_graphs.engine.callables.order import Action
from moe_graphs.engine.report import Report
from moe_graphs.layers import MoEConfig, TransformerConfig, TransformerLayer
from moe_graphs.pipelines.builders import gpipe, interleaved_1f1b
from timed_replays import NotReplayed, check_replayed

CASES = tuple(
    (pp, vpp, microbatches, rank)
    for pp, vpp, ranks in ((4, 1, (0, 3)), (4, 2, (0,)), (8, 1, (0, 7)), (8, 4, (0,)))
    for microbatches in (8, 64)
    for rank in ranks
)
SMOKE_CASES = ((2, 1, 4, 0), (2, 2, 4, 0))
STEPS = 4  # one to watch, one to capture: the first microbatch that takes a slot records it
LAYERS = 2  # of a chunk
SLOTS = 4  # of what is captured against the clock
Row = dict[str, Any]
Attempt = Callable[[], Row]


class Layers(nn.Module):
    def __init__(self, hidden: int, sequence: int, device: torch.device) -> None:
        super().__init__()
        moe = MoEConfig(num_experts=32, top_k=4, ffn_hidden_size=hidden // 2)
        config = TransformerConfig(
            hidden_size=hidden, num_layers=LAYERS, num_heads=hidden // 128,
            ffn_hidden_size=2 * hidden, vocab_size=1, max_sequence_length=sequence, moe=moe,
        )  # fmt: skip
        options = {"device": device, "dtype": dtype_on(device)}
        layers = [TransformerLayer(config, i, **options) for i in range(LAYERS)]
        for layer in layers:
            layer.init_weights(0.02, 0.02)
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD).hidden_BSD
        return hidden_BSD


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def drive(chunks: nn.ModuleList, order: Iterable[Action], x: Tensor, baseline: int) -> int:
    """Runs a step by its order; returns the most bytes allocated between two actions."""
    outputs: dict[tuple[int, int], Tensor] = {}
    most = 0
    for action in order:
        key = action.chunk, action.microbatch
        if action.kind == "F":
            outputs[key] = chunks[action.chunk](x.detach().requires_grad_())
        else:
            output = outputs.pop(key)
            output.backward(output.detach())
            del output
        most = max(most, torch.cuda.memory_allocated() - baseline)
    return most


@contextlib.contextmanager
def trained(
    model: nn.Module, config: moe_graphs.GraphConfig, step: Callable[[], object]
) -> Iterator[Report]:
    """The report behind some steps, when what eager ones have left is given back.

    Raises:
        NotReplayed: not everything was captured, or replayed since.
    """
    graphs = moe_graphs.graph(model, config)
    try:
        for _ in range(STEPS):
            with graphs.step():
                step()
        give_back()
        report = graphs.report()
        if report.state != "captured":
            raise NotReplayed(f"{report.state}, eager calls {dict(report.eager_calls)}")
        check_replayed(report)
        yield report
    finally:
        graphs.release()


def give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def memory_row(device: torch.device, pp: int, vpp: int, microbatches: int, rank: int) -> Row:
    """Bytes are 0 on the CPU, where nobody counts them."""
    on_gpu = device.type == "cuda"
    hidden, sequence = (1024, 2048) if on_gpu else (128, 8)
    order = interleaved_1f1b(pp, vpp, microbatches).local_order(rank)
    chunks = nn.ModuleList(Layers(hidden, sequence, device) for _ in range(vpp))
    x = torch.randn(1, sequence, hidden, device=device, dtype=dtype_on(device))
    for parameter in chunks.parameters():
        parameter.grad = torch.zeros_like(parameter)
    drive(chunks, order, x, 0)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_allocated()
    saved = drive(chunks, order, x, baseline)
    temporaries = torch.cuda.max_memory_allocated() - baseline - saved
    config = moe_graphs.GraphConfig("attn,moe", warmup_steps=1, audit_every=None)
    with trained(chunks, config, lambda: drive(chunks, order, x, baseline)) as report:
        bound = 1.05 * saved + sum(report.slots) * temporaries
        over = report.pool_bytes / bound if on_gpu else None
        return {
            "layers": LAYERS * vpp, "slots": report.slots, "graphs": 2 * report.captured,
            "graphs_of_the_seeds": 2 * LAYERS * vpp * microbatches,
            "eager_calls": report.eager_calls, "pool_bytes": report.pool_bytes,
            "predicted_pool_bytes": report.predicted_pool_bytes,
            "static_bytes": report.static_bytes, "eager_saved_bytes": saved,
            "eager_temporary_bytes": temporaries, "bound_bytes": int(bound),
            "pool_over_bound": over,
            "pool_over_saved": report.pool_bytes / saved if on_gpu else None,
            "capture_seconds": report.capture_seconds,
        }  # fmt: skip


class Modules:
    """Warm modules, as many as there are scopes, and a sample of their input."""

    def __init__(self, device: torch.device) -> None:
        count, self.width = (96, 512) if device.type == "cuda" else (12, 8)
        self.options = {"device": device, "dtype": dtype_on(device)}
        linear = functools.partial(nn.Linear, self.width, self.width, **self.options)
        parts = (nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(count))
        self.model = nn.Sequential(*parts)
        for _ in range(3):  # libraries load their kernels
            self.model(self.sample()).sum().backward()
        give_back()

    def sample(self) -> Tensor:
        return torch.randn(256, self.width, requires_grad=True, **self.options)


def captured_as_graphs(device: torch.device) -> Row:
    modules = Modules(device)
    model = modules.model

    def step() -> None:
        losses = [model(modules.sample()).sum() for _ in range(SLOTS)]
        for loss in losses:
            loss.backward()

    config = moe_graphs.GraphConfig(["[0-9]", "[0-9][0-9]"], warmup_steps=1, audit_every=None)
    with trained(model, config, step) as report:
        return counted(len(model), report.captured, report.capture_seconds, report.pool_bytes)


def captured_as_callables(device: torch.device) -> Row:
    modules = Modules(device)
    parts, order = tuple(modules.model), gpipe(1, SLOTS).local_order(0)
    samples = ((modules.sample(),),) * len(parts)
    started = time.perf_counter()
    moe_graphs.make_graphed_callables(parts, samples, schedule=order, warmup_steps=3)
    seconds = time.perf_counter() - started
    made = parts[0].graphs
    pool = sum(map(made.backend.pool_bytes, made.captured.pools))
    made.release()
    return counted(len(parts), SLOTS * len(parts), seconds, pool)


def captured_by_torch(device: torch.device) -> Row:
    """Row of torch's graphed callables, made of copies of the modules.

    Torch's function gives weights gradients only if the callables are modules.
    """
    modules = Modules(device)
    scopes = len(modules.model)
    parts = tuple(part for _ in range(SLOTS) for part in copy.deepcopy(modules.model))
    samples = tuple((modules.sample(),) for _ in parts)
    pool = torch.cuda.graph_pool_handle()
    started = time.perf_counter()
    torch.cuda.make_graphed_callables(parts, samples, pool=pool)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    give_back()  # what its warm-up has left is no graph's
    return counted(scopes, len(parts), seconds, CudaGraphs(device).pool_bytes(pool))


def counted(scopes: int, recordings: int, seconds: float, pool_bytes: int) -> Row:
    """Row of the counted scopes.

    Raises:
        NotReplayed: not every scope was recorded for every slot.
    """
    if recordings != scopes * SLOTS:
        raise NotReplayed(f"{recordings} recordings of {scopes} scopes and {SLOTS} slots")
    return {"scopes": scopes, "slots": SLOTS, "seconds": seconds, "pool_bytes": pool_bytes}


CAPTURES = {
    "moe_graphs.graph": captured_as_graphs,
    "moe_graphs.make_graphed_callables": captured_as_callables,
    "torch.cuda.make_graphed_callables": captured_by_torch,
}


def rows(device: torch.device, only: str | None, cases: int) -> Iterator[tuple[Row, Attempt]]:
    """Rows with their measurements; memory comes first, since it decides."""
    on_gpu = device.type == "cuda"
    if only != "capture":
        for case in (CASES if on_gpu else SMOKE_CASES)[:cases]:
            named = dict(zip(("pp", "vpp", "microbatches", "rank"), case, strict=True))
            attempt = functools.partial(memory_row, device, *case)
            yield {"benchmark": "pipeline memory", **named}, attempt
    if only != "memory":
        for name, captured in CAPTURES.items():
            if on_gpu or "torch" not in name:
                named = {"benchmark": "pipeline capture", "contender": name}
                yield named, functools.partial(captured, device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--commit", help="for the stamp, where there is no .git")
    parser.add_argument("--only", choices=("memory", "capture"))
    parser.add_argument("--cases", type=int, default=len(CASES), help="of memory: the first ones")
    parser.add_argument("--smoke", action="store_true", help="tiny modules on the CPU, as a test")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        parser.error("this needs a CUDA device, or --smoke")
    device = torch.device("cpu" if options.smoke else "cuda")
    stamp, lines, failed = environment.stamp(options.commit), [], 0
    for named, attempt in rows(device, options.only, options.cases):
        try:
            row = {**named, **attempt()}
        except Exception as error:
            row, failed = {**named, "error": repr(error)[:500]}, failed + 1
        lines.append(json.dumps({**row, "environment": stamp}))
        print(json.dumps(row), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text("\n".join(lines) + "\n")
        give_back()
    if failed:
        sys.exit(f"{failed} of {len(lines)} rows failed")


if __name__ == "__main__":
    main()
