"""Graphs under pipeline schedules: their number, their memory and how long the capture takes.

    python benchmarks/pipeline.py --out benchmarks/results/pipeline_h200.jsonl

Memory: one rank of an (interleaved) 1F1B pipeline, driven by its order alone, with chunks of MoE
layers. Eager's peak of saved activations is what is allocated after an action, at most, over what
was allocated before the step; its temporaries are the peak above that. The bound for the pools is
1.05 times the first plus the second once per slot. Next to the graphs counted here stands the
scheme of the seeds' systems: two per layer and microbatch.

Capture: 96 scopes and 4 microbatches in flight, against torch.cuda.make_graphed_callables on as
many callables of the same modules.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moe_graphs
from moe_graphs.bench import environment
from moe_graphs.layers import MoEConfig, TransformerConfig, TransformerLayer
from moe_graphs.pipelines.builders import gpipe, interleaved_1f1b
from moe_graphs.pipelines.schedule import Action
from timed_replays import check_replayed

CASES = tuple(
    (pp, vpp, microbatches, rank)
    for pp, vpp, ranks in ((4, 1, (0, 3)), (4, 2, (0,)), (8, 1, (0, 7)), (8, 4, (0,)))
    for microbatches in (8, 64)
    for rank in ranks
)


class Layers(nn.Module):
    def __init__(self, count: int, hidden: int, sequence: int) -> None:
        super().__init__()
        moe = MoEConfig(num_experts=32, top_k=4, ffn_hidden_size=hidden // 2)
        config = TransformerConfig(
            hidden_size=hidden, num_layers=count, num_heads=hidden // 128,
            ffn_hidden_size=2 * hidden, vocab_size=1, max_sequence_length=sequence, moe=moe,
        )  # fmt: skip
        options = {"device": "cuda", "dtype": torch.bfloat16}
        layers = [TransformerLayer(config, i, **options) for i in range(count)]
        for layer in layers:
            layer.init_weights(0.02, 0.02)
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD).hidden_BSD
        return hidden_BSD


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


def memory_row(pp: int, vpp: int, microbatches: int, rank: int) -> dict[str, Any]:
    schedule = interleaved_1f1b(pp, vpp, microbatches)
    order, layers = schedule.local_order(rank), 2
    chunks = nn.ModuleList(Layers(layers, 1024, 2048) for _ in range(vpp))
    x = torch.randn(1, 2048, 1024, device="cuda", dtype=torch.bfloat16)
    for parameter in chunks.parameters():
        parameter.grad = torch.zeros_like(parameter)
    drive(chunks, order, x, 0)
    torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_allocated()
    saved = drive(chunks, order, x, baseline)
    temporaries = torch.cuda.max_memory_allocated() - baseline - saved
    graphs = moe_graphs.graph(chunks, moe_graphs.GraphConfig("attn,moe", warmup_steps=1))
    for _ in range(3):
        with graphs.step():
            drive(chunks, order, x, baseline)
    report = graphs.report()
    check_replayed(report)
    slots = sum(report.slots)
    bound = 1.05 * saved + slots * temporaries
    row = {
        "benchmark": "pipeline memory", "pp": pp, "vpp": vpp, "microbatches": microbatches,
        "rank": rank, "layers": layers * vpp, "slots": report.slots,
        "graphs": 2 * report.captured, "graphs_of_the_seeds": 2 * layers * vpp * microbatches,
        "eager_calls": report.eager_calls, "pool_bytes": report.pool_bytes,
        "predicted_pool_bytes": report.predicted_pool_bytes, "static_bytes": report.static_bytes,
        "eager_saved_bytes": saved, "eager_temporary_bytes": temporaries,
        "bound_bytes": int(bound), "pool_over_bound": report.pool_bytes / bound,
        "pool_over_saved": report.pool_bytes / saved, "capture_seconds": report.capture_seconds,
    }  # fmt: skip
    graphs.release()
    return row


def mlps(count: int, width: int) -> list[nn.Module]:
    parts = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
             for _ in range(count))  # fmt: skip
    return [part.to("cuda", torch.bfloat16) for part in parts]


def capture_rows(count: int = 96, slots: int = 4, width: int = 512) -> Iterable[dict[str, Any]]:
    import torch._dynamo  # every optimizer imports it: three seconds that belong to neither

    modules = mlps(count, width)

    def sample() -> Tensor:
        return torch.randn(256, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    common = {"benchmark": "pipeline capture", "scopes": count, "slots": slots}
    model = nn.Sequential(*modules)
    for _ in range(3):  # libraries load their kernels
        model(sample()).sum().backward()
    config = moe_graphs.GraphConfig(["[0-9]", "[0-9][0-9]"], warmup_steps=1)
    graphs = moe_graphs.graph(model, config)
    with graphs.step():
        losses = [model(sample()).sum() for _ in range(slots)]
        for loss in losses:
            loss.backward()
    del losses
    report = graphs.report()
    assert report.captured == count * slots, report
    yield {**common, "contender": "moe_graphs.graph", "seconds": report.capture_seconds,
           "pool_bytes": report.pool_bytes}  # fmt: skip
    graphs.release()

    started = time.perf_counter()
    order = gpipe(1, slots).local_order(0)
    samples = ((sample(),),) * count
    moe_graphs.make_graphed_callables(tuple(modules), samples, schedule=order, warmup_steps=3)
    seconds = time.perf_counter() - started
    made = modules[0].graphs
    pool = sum(map(made.backend.pool_bytes, made.captured.pools))
    yield {**common, "contender": "moe_graphs.make_graphed_callables", "seconds": seconds,
           "pool_bytes": pool}  # fmt: skip
    made.release()

    gc.collect()
    torch.cuda.empty_cache()
    callables = tuple(functools.partial(m.forward) for _ in range(slots) for m in modules)
    before = torch.cuda.memory_reserved()
    started = time.perf_counter()
    kept = torch.cuda.make_graphed_callables(callables, tuple((sample(),) for _ in callables))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    yield {**common, "contender": "torch.cuda.make_graphed_callables", "seconds": seconds,
           "pool_bytes": torch.cuda.memory_reserved() - before}  # fmt: skip
    del kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--commit", help="for the stamp, where there is no .git")
    parser.add_argument("--only", choices=("memory", "capture"))
    parser.add_argument("--cases", type=int, default=len(CASES), help="of memory: the first ones")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    stamp = environment.stamp(options.commit)
    lines = []

    def note(row: dict[str, Any]) -> None:
        lines.append(json.dumps({**row, "environment": stamp}))
        print(json.dumps(row), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text("\n".join(lines) + "\n")
        gc.collect()
        torch.cuda.empty_cache()

    if options.only != "memory":
        for row in capture_rows():
            note(row)
    if options.only != "capture":
        for case in CASES[: options.cases]:
            note(memory_row(*case))


if __name__ == "__main__":
    main()
