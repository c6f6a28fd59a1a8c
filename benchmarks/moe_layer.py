"""The whole MoE layer, router included, forward and forward + backward, on one GPU.

    python benchmarks/moe_layer.py --out benchmarks/results/moe_layer_h200.jsonl
    python benchmarks/moe_layer.py --separate  # beside the ops one by one, each step as one graph
    python benchmarks/moe_layer.py --fp8  # experts in bf16 and in FP8, each step as one graph
    python benchmarks/moe_layer.py --peers SonicMoE,ScatterMoE --routing even,zipf

Contenders: ours eager, ours with scope `moe` captured, and blocks of other libraries
(`peer_models/moe_blocks.py`; where transformers is installed by default Qwen3-MoE's with
`grouped_mm` experts), all with the same weights. Gate first: captured is bitwise eager, the others
are close to it. Zipf: a feature that is 1 in all tokens gives each expert a logit of its own, so
that a few experts get most rows; `load` is the fullest expert's share, over that of an even one.
Sustained: contenders take turns in random order, each timed behind a stretch of its own; p10,
median, p90 of the rounds, and of our graph's time in bf16 over a contender's in the same round
(`train_speedup`). FLOPs are 6TKDF forward and 18TKDF with backward. Saved: memory that a forward in
training leaves allocated besides its output. Peak: memory of a step besides weights and tokens.
"""

from __future__ import annotations

import argparse
import contextvars
import functools
import gc
import itertools
import json
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moe_graphs
from moe_graphs.bench import environment
from moe_graphs.bench.timing import elapsed
from moe_graphs.kernels import grouped_gemm, permute, swiglu, unpermute
from moe_graphs.layers.model_config import MoEConfig, Precision
from moe_graphs.layers.moe import MoELayer, MoEOutput, Prepared
from moe_graphs.weight_codes import unchanged_weights
from peer_models.moe_blocks import BLOCKS, BlockWeights
from peer_models.worker import COMPILING, take_slot, take_turn
from timed_replays import check_replayed

WARMUP_STEPS = 3
ROUTINGS = ("even", "zipf")
PREPARED_TOKENS = 4096  # with which kernels are compiled and tuned: several processes fit then
# A contender runs so long before it is timed, and so long while it is. Power limits the clock of a
# GPU under such loads, so what ran before decides about the clock for a while.
STRETCH_MS = 200.0


@dataclass(frozen=True)
class Size:
    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int

    @property
    def forward_flops(self) -> float:
        return 6.0 * self.tokens * self.top_k * self.hidden * self.ffn


SIZES = (
    Size(16384, 2048, 768, 128, 8),
    Size(2048, 2048, 768, 128, 8),
    Size(16384, 2048, 1024, 64, 8),
    Size(8192, 4096, 14336, 8, 2),
    Size(32768, 4096, 1024, 128, 8),
    Size(16384, 7168, 2048, 32, 4),
    Size(8192, 2048, 768, 128, 8),
)


@dataclass
class Contender:
    """A layer; with `graphs`, trained under them."""

    name: str
    module: nn.Module
    run: Callable[[Tensor], Tensor]
    graphs: moe_graphs.Graphs | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.run(x)

    def train(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the gradient of x."""
        x.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None
        if self.graphs is None:
            out = self.run(x)
            out.backward(grad)
        else:
            with self.graphs.step():
                out = self.run(x)
                out.backward(grad)
        return out, x.grad


class OneGraph(Contender):
    """A layer whose forward and backward are one CUDA graph of torch; nothing else runs."""

    captured: torch.cuda.CUDAGraph | None = None
    static: tuple[Tensor, Tensor]

    def train(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        if self.captured is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._gradients(x, grad)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()
            self.captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.captured):
                self.static = self._gradients(x, grad)
        self.captured.replay()
        return self.static

    def _gradients(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()  # a leaf that no other stream has used
        out = self.run(x)
        gradients = torch.autograd.grad(out, (x, *self.module.parameters()), grad)
        return out.detach(), gradients[0]


class SeparateOps(MoELayer):
    """Each op by itself, which keeps rows, both products' operands and their results."""

    def run_experts(self, prepared: Prepared) -> MoEOutput:
        plan, (w1, w2) = prepared.plan, (self.experts.w1, self.experts.w2)
        rows_RD, ends_E = permute(plan.tokens.flatten(0, -2), plan.order), plan.order.offsets_E
        rows_RF = swiglu(grouped_gemm(rows_RD, w1, ends_E, zero_tail=False))
        rows_RD = grouped_gemm(rows_RF, w2, ends_E, zero_tail=False)
        hidden_TD = unpermute(rows_RD, plan.order, plan.weights_TK)
        return MoEOutput(hidden_TD.view(prepared.shape), prepared.aux_loss, plan.dropped)


OURS = "ours, one graph"
CODES_KEPT = "ours in FP8, codes of weights at hand, one graph"
IN_FP8: dict[str, Precision] = {
    "ours in FP8, one graph": "fp8",
    CODES_KEPT: "fp8",
    "ours in FP8 but gradients of weights, one graph": "fp8_rows",
}
KINDS = {
    OURS: MoELayer,
    **dict.fromkeys(IN_FP8, MoELayer),
    "separate ops, one graph": SeparateOps,
}
# The median over tokens of an output's or gradient's distance from eager's, by contender.
APART = dict.fromkeys(IN_FP8, 1.5e-1)


def make_layer(
    size: Size, kind: type[MoELayer] = MoELayer, precision: Precision = "weights"
) -> MoELayer:
    sizes = dict(num_experts=size.experts, top_k=size.top_k, ffn_hidden_size=size.ffn)
    config = MoEConfig(**sizes, precision=precision)
    torch.manual_seed(0)
    layer = kind(config, size.hidden, device="cuda", dtype=torch.bfloat16)
    layer.init_weights()
    return layer


def one_graph(size: Size, name: str) -> Contender:
    layer = make_layer(size, KINDS[name], IN_FP8.get(name, "weights"))
    if name == CODES_KEPT:  # as microbatches behind the first have them
        block, context = unchanged_weights(), contextvars.copy_context()
        context.run(block.__enter__)
        weakref.finalize(layer, context.run, block.__exit__, None, None, None)
        return OneGraph(name, layer, lambda x: context.run(layer, x).hidden)
    return OneGraph(name, layer, lambda x: layer(x).hidden)


def ours(size: Size, captured: bool) -> Contender:
    layer, graphs = make_layer(size), None
    if captured:
        graph_config = moe_graphs.GraphConfig("moe", warmup_steps=WARMUP_STEPS, audit_every=None)
        graphs = moe_graphs.graph(layer, graph_config)
    name = "ours, scope moe" if captured else "ours, eager"
    return Contender(name, layer, lambda x: layer(x).hidden, graphs)


def peer(size: Size, name: str, like: MoELayer) -> Contender:
    """Another library's block with the weights of ours."""
    w1_EFD, w2_EDF = (
        weight.detach().transpose(1, 2) for weight in (like.experts.w1, like.experts.w2)
    )
    weights = BlockWeights(like.router.weight.detach(), *w1_EFD.chunk(2, dim=1), w2_EDF, size.top_k)
    block = BLOCKS[name](weights).train()
    return Contender(name, block, block)


def skew(layer: MoELayer, x: Tensor, routing: str) -> float:
    """Give the experts logits by Zipf's law, if asked for; returns the fullest expert's load."""
    router_ED = layer.router.weight
    with torch.no_grad():
        if routing == "zipf":
            ranks_E = torch.randperm(len(router_ED), generator=torch.Generator().manual_seed(0)) + 1
            x[:, 0] = 1
            router_ED[:, 0] = -ranks_E.log().to(router_ED)
        counts_E = layer.router(x).tokens_per_expert_E.float()
    return round((counts_E.max() / counts_E.mean()).item(), 2)


def saved_bytes(contender: Contender, x: Tensor) -> int:
    gc.collect()  # or memory of a contender before this one may be freed meanwhile
    before = torch.cuda.memory_allocated()
    out = contender.run(x)
    return torch.cuda.memory_allocated() - before - out.numel() * out.element_size()


def peak_bytes(contender: Contender, x: Tensor, grad: Tensor) -> int:
    """Memory of a step at its highest, besides weights and tokens; gradients are part of it."""
    parameters = list(contender.module.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(contender.run(x), (x, *parameters), grad)
    return torch.cuda.max_memory_allocated() - before


def spread(samples: list[float]) -> list[float]:
    samples = sorted(samples)
    return [round(samples[int(q * (len(samples) - 1))], 4) for q in (0.1, 0.5, 0.9)]


def data(size: Size) -> tuple[Tensor, Tensor]:
    """Tokens and the gradient of the output."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(size.tokens, size.hidden, device="cuda", generator=generator)
    x = x.to(torch.bfloat16).requires_grad_()
    grad = torch.randn(x.shape, device="cuda", generator=generator).to(torch.bfloat16)
    return x, grad


def prepare(size: Size, names: list[str]) -> None:
    """Compile and tune all kernels; a failure comes again, and is told, when measured."""
    fewer = replace(size, tokens=min(size.tokens, PREPARED_TOKENS))
    like = make_layer(size)
    jobs = {name: functools.partial(peer, fewer, name, like) for name in names}
    jobs |= {"ours": lambda: ours(size, captured=False)}
    for name, build in jobs.items():
        try:
            build().train(*data(size if name == "ours" else fewer))
        except Exception as problem:
            print(f"{name}, {size}: {type(problem).__name__}: {problem}"[:500], flush=True)
        torch.cuda.empty_cache()


def measure(
    size: Size, rounds: int, graphs: Collection[str], peers: list[str], routing: str
) -> list[dict]:
    """One record per contender; what failed its gate or raised has `error` and no speed."""
    x, grad = data(size)
    eager, failed = ours(size, captured=False), {}
    load = skew(eager.module, x, routing)
    running, saved, peak = [eager], {}, {}
    builds = {name: functools.partial(one_graph, size, name) for name in graphs}
    if not graphs:
        builds = {"ours, scope moe": lambda: ours(size, captured=True)}
        builds |= {name: functools.partial(peer, size, name, eager.module) for name in peers}
    for name, build in builds.items():
        try:
            contender = build()
            if isinstance(contender.module, MoELayer):
                contender.module.load_state_dict(eager.module.state_dict())
            gate(contender, eager, x, grad)
            if contender.graphs is None:
                saved[name] = saved_bytes(contender, x)
                peak[name] = peak_bytes(contender, x, grad)
            running.append(contender)
        except Exception as problem:
            failed[name] = f"{type(problem).__name__}: {problem}"[:500]
    saved[eager.name], peak[eager.name] = saved_bytes(eager, x), peak_bytes(eager, x, grad)
    spent = time_together(running, x, grad, rounds)
    case = asdict(size) | {"routing": routing, "load": load}
    records = [case | {"contender": name, "error": why} for name, why in failed.items()]
    for contender in running:
        forward, train = (spread(ms) if ms else None for ms in spent[contender.name])
        record = case | {"contender": contender.name, "error": None}
        record |= {"forward_ms": forward, "train_ms": train}
        if OURS in spent:  # machines drift, so contenders of the same round are compared
            pairs = zip(spent[OURS][1], spent[contender.name][1], strict=True)
            record["train_speedup"] = spread([bf16 / each for bf16, each in pairs])
        record["forward_tflops"] = forward and round(size.forward_flops / forward[1] / 1e9, 1)
        record["train_tflops"] = round(3 * size.forward_flops / train[1] / 1e9, 1)
        record["saved_mib"] = round(saved.get(contender.name, 0) / 2**20) or None
        record["peak_mib"] = round(peak.get(contender.name, 0) / 2**20) or None
        records.append(record)
    for contender in running:
        if contender.graphs is not None:
            contender.graphs.release()
    return records


def gate(contender: Contender, eager: Contender, x: Tensor, grad: Tensor) -> None:
    want = [t.clone() for t in eager.train(x, grad)]
    for _ in range(WARMUP_STEPS + 1):
        got = [t.clone() for t in contender.train(x, grad)]
    for name, a, b in zip(("output", "gradient of x"), got, want, strict=True):
        if contender.graphs is not None and not torch.equal(a, b):
            raise RuntimeError(f"{name}: not bitwise eager's")
        # Compare most tokens: if two experts are nearly equal, rounding decides between them.
        off_T = (a - b).float().norm(dim=1) / b.float().norm(dim=1).clamp_min(1e-30)
        if not off_T.median() < APART.get(contender.name, 2e-2):
            raise RuntimeError(f"{name}: {off_T.median():.1e} from eager's, median over tokens")
    check_replayed(contender.graphs and contender.graphs.report())


def time_together(
    running: list[Contender], x: Tensor, grad: Tensor, rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds of forwards and of forwards with backwards, per contender."""
    jobs = [(c, c.train, (x, grad), 1) for c in running]
    jobs += [(c, c.forward, (x,), 0) for c in running if c.graphs is None]
    spent = {c.name: ([], []) for c in running}
    calls = {}
    for contender, run, arguments, kind in jobs:
        once = elapsed(lambda: (run(*arguments), run(*arguments))) / 2  # noqa: B023
        calls[contender.name, kind] = max(3, int(STRETCH_MS / once))
    shuffler = random.Random(1)
    for _ in range(rounds):
        shuffler.shuffle(jobs)
        for contender, run, arguments, kind in jobs:
            stretch = range(calls[contender.name, kind])
            for _ in stretch:
                run(*arguments)
            ms = elapsed(lambda: [run(*arguments) for _ in stretch])  # noqa: B023
            spent[contender.name][kind].append(ms / len(stretch))
    return spent


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument(
        "--separate", action="store_true", help="beside the ops one by one, each step as one graph"
    )
    parser.add_argument(
        "--fp8", action="store_true", help="bf16 beside FP8, each step as one graph"
    )
    parser.add_argument(
        "--peers",
        type=_names(BLOCKS),
        default=["HF grouped_mm"],
        help=f"all, or some of {', '.join(BLOCKS)}",
    )
    parser.add_argument("--routing", type=_names(ROUTINGS), default=["even"], help="even,zipf")
    indices = ",".join(str(index) for index in range(len(SIZES)))
    parser.add_argument("--sizes", default=indices, help="indices of the sizes")
    parser.add_argument(
        "--gate", type=Path, help="compile first, make a file beside it, wait, then lock it"
    )
    parser.add_argument(
        "--compiling", type=int, default=COMPILING, help="processes at a gate that compile at once"
    )
    parser.add_argument("--commit", help="where there is no .git to ask")
    options = parser.parse_args(arguments)
    options.sizes = [SIZES[int(index)] for index in options.sizes.split(",")]
    return options


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    """Reader of names with commas between them, or "all"."""

    def read(text: str) -> list[str]:
        found = list(known) if text == "all" else text.split(",")
        if unknown := sorted(set(found) - set(known)):
            raise argparse.ArgumentTypeError(f"{unknown} unknown: choose from {list(known)}")
        return found

    return read


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    stamp, held = environment.stamp(args.commit), None
    if args.gate is not None:
        slot = take_slot(args.gate, args.compiling)
        for size in args.sizes:
            prepare(size, args.peers)
        del slot
        args.gate.with_suffix(f".{os.getpid()}.ready").touch()
        held = take_turn(args.gate)
    started = time.time()
    print(environment.describe(stamp))
    name = "moe_layer_separate" if args.separate else "moe_layer"
    graphs: Collection[str] = [each for each in KINDS if each not in APART] if args.separate else []
    if args.fp8:
        name, graphs = "moe_layer_fp8", (OURS, *IN_FP8)
    for size, routing in itertools.product(args.sizes, args.routing):
        if time.time() - started > args.budget:
            print(f"budget spent: {size} left out")
            continue
        constant = {"benchmark": name + "_zipf" * (routing == "zipf"), "environment": stamp}
        for record in measure(size, args.rounds, graphs, args.peers, routing):
            print(json.dumps(record), flush=True)
            if args.out:
                with args.out.open("a") as lines:
                    lines.write(json.dumps(record | constant) + "\n")
        torch.cuda.empty_cache()
    del held


if __name__ == "__main__":
    main()
