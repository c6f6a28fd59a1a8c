"""Experts of one layer with LoRA beside them: forward and backward, with checkpointing or without.

    python benchmarks/lora_experts.py --out benchmarks/results/lora_experts_h200.jsonl
    python benchmarks/lora_experts.py --op qwen3_16k

All contenders share one process, its weights and its routing, and take turns in random order; CUDA
graphs of several calls, median of the rounds. Factors are those of PEFT: fp32, in PEFT's layout.

- `frozen`: experts without adapters.
- `ours`: one pass over the rows multiplies them by the weight and by the first factor.
- `two passes`: the product with the first factor has a kernel of its own.
- `copied rows`: the gradient of the first factor reads a copy of the rows, not the tokens.
- `apart`: two products that are rounded, and a pass that adds them.
- `ScatterMoE`: axolotl's kernels with LoRA, if they can be imported (a folder of axolotl's wheel,
  `axolotl/integrations/kernels/libs/scattermoe_lora`, with empty packages above it). Its
  `bincount`, which no graph can hold, is made from a sum.

Gate first: gradients of `ours` and of `apart` are as far apart as bf16 rounds. The line has the
time of single products, too. `--tiny` runs a small shape on the CPU, without times.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measured_cases import measure_cases
from moe_graphs.bench.timing import capture_burst, elapsed
from moe_graphs.kernels import gemm, route_rows
from moe_graphs.kernels.choose_experts.reference import pairs_per_expert
from moe_graphs.kernels.gemm import heuristics
from moe_graphs.kernels.routed_experts import lora, sums

CALLS, APART = 4, 2e-2
SCATTERMOE = "ScatterMoE"
Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Tokens, columns of tokens and of experts, experts, experts of a token, rank."""

    T: int
    D: int
    F: int
    E: int
    K: int
    r: int = 16


SIZES = {
    "qwen3_16k": Sizes(16384, 2048, 768, 128, 8),
    "qwen3_2k": Sizes(2048, 2048, 768, 128, 8),
    "gpt_oss_16k": Sizes(16384, 2880, 2880, 32, 4),
}
TINY = {"tiny": Sizes(16, 32, 16, 4, 2, 8)}


class Layer:
    """Frozen weights, PEFT's factors, tokens and routing of a layer of experts."""

    def __init__(self, n: Sizes, device: str) -> None:
        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return (shape[-1] ** -0.5 * torch.randn(shape, device=device)).to(dtype)

        self.sizes, fp32 = n, torch.float32
        self.tokens_TD = torch.randn(n.T, n.D, device=device).bfloat16().requires_grad_()
        self.experts_TK = torch.rand(n.T, n.E, device=device).argsort(1)[:, : n.K].contiguous()
        self.weights_TK = torch.rand(n.T, n.K, device=device).requires_grad_()
        self.w1, self.w2 = normal(n.E, 2 * n.F, n.D).mT, normal(n.E, n.D, n.F).mT
        self.factors = []
        for inputs, outputs in ((n.D, 2 * n.F), (n.F, n.D)):
            self.factors.append(normal(n.E * n.r, inputs, dtype=fp32).requires_grad_())
            self.factors.append(normal(outputs, n.r * n.E, dtype=fp32).requires_grad_())
        self.grad_TD = torch.randn(n.T, n.D, device=device).bfloat16()

    def loras(self) -> list[lora.LoRA]:
        """Factors as ``integrations.peft`` hands them over."""
        found, n = [], self.sizes
        for a, b in zip(self.factors[::2], self.factors[1::2], strict=True):
            a_ErM = a.reshape(n.E, n.r, -1)
            b_ENr = b.reshape(len(b), n.r, n.E).permute(2, 0, 1)
            found.append(lora.LoRA(a_ErM.mT, b_ENr.mT, 2.0))
        return found

    def forward(self, has_factors: bool) -> Tensor:
        factors = self.loras() if has_factors else [None, None]
        order = route_rows(self.experts_TK, self.sizes.E)
        given = self.tokens_TD, order, self.weights_TK, self.w1, self.w2, *factors
        return lora.routed_experts_with_lora(*given)

    def by_scattermoe(self) -> Tensor:
        """The layer on axolotl's kernels, called as its forward for transformers calls them."""
        theirs, n = scattermoe(), self.sizes
        *indices, ends = theirs.flatten_sort_count(self.experts_TK, n.E)
        factors = []
        for a, b in zip(self.factors[::2], self.factors[1::2], strict=True):
            by_expert = b.view(len(b), n.r, n.E).transpose(1, 2).reshape(len(b), -1)
            factors.append((a.bfloat16(), by_expert.bfloat16(), 2.0))
        given, weights = (*indices, ends), self.weights_TK.bfloat16()
        gate_up = theirs.parallel_linear_lora(
            self.tokens_TD, self.w1, n.K, *given, *factors[0], grouped_out=True
        )
        gate, up = gate_up.chunk(2, dim=-1)
        rows, last = torch.nn.functional.silu(gate) * up, dict(grouped_in=True, gates=weights)
        return theirs.parallel_linear_lora(rows, self.w2, 1, *given, *factors[1], **last)

    def step(self, name: str, checkpointing: bool) -> list[Tensor]:
        has_factors = name != "frozen"
        run = functools.partial(self.forward, has_factors)
        if name == SCATTERMOE:
            run = self.by_scattermoe
        if checkpointing:
            run = functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        leaves = [self.tokens_TD, self.weights_TK, *(self.factors if has_factors else [])]
        return list(torch.autograd.grad(run(), leaves, self.grad_TD))


@functools.cache
def scattermoe() -> Any:
    """Axolotl's kernels, or None."""
    try:
        return importlib.import_module("axolotl.integrations.kernels.libs.scattermoe_lora")
    except ImportError:
        return None


def added_apart(x: Tensor, w: Tensor, low: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    first = gemm.grouped_gemm_forward(x, w, offsets, False)
    return first.add_(gemm.grouped_gemm_forward(low, b, offsets, False))


def both_apart(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    low = gemm.grouped_gemm_forward(x, a, offsets, False)
    return added_apart(x, w, low, b, offsets), low


def of_copied_rows(
    tokens: Tensor, low: Tensor, factor: Tensor, *given: Any, is_sorted: bool = False
) -> Tensor:
    order, inverse, ends, has_gaps = given
    rows = lora._rows(tokens, order, inverse, has_gaps, is_sorted)
    return gemm.gradient_of_weights(rows, low, ends, gemm.is_transposed(factor))


def rows_of_experts(experts: Tensor, minlength: int) -> Tensor:
    """Rows of each expert, as `bincount` counts them, in operations that a graph can hold."""
    return pairs_per_expert(experts.long().unsqueeze(1), minlength)


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """The way in which a contender computes."""
    with contextlib.ExitStack() as stack:
        if name == "two passes":
            two_passes = mock.patch.object(heuristics.Variant, "adds_lora", return_value=False)
            stack.enter_context(two_passes)
        if name == "copied rows":
            stack.enter_context(mock.patch.object(lora, "_gradient_of_factor", of_copied_rows))
        if name == SCATTERMOE:
            stack.enter_context(mock.patch.object(torch.Tensor, "bincount", rows_of_experts))
        if name == "apart":
            stack.enter_context(mock.patch.object(sums, "lora_gemm", both_apart))
        yield


def contenders(layer: Layer, checkpointing: bool) -> dict[str, Step]:
    def run(name: str) -> list[Tensor]:
        with way(name):
            return layer.step(name, checkpointing)

    names = ["frozen", "ours", "two passes", "copied rows", "apart"]
    if layer.tokens_TD.is_cuda and scattermoe() is not None:
        names.append(SCATTERMOE)
    return {name: functools.partial(run, name) for name in names}


def products(layer: Layer) -> dict[str, Callable[[], Any]]:
    """Single products of the first weight and of its factors."""
    n, (first, _) = layer.sizes, layer.loras()
    a, b = (each.detach() for each in lora._in_dtype(torch.bfloat16, first, True))
    ends = route_rows(layer.experts_TK, n.E).offsets_E
    rows, columns = (torch.randn(n.T * n.K, width, device=ends.device).bfloat16()
                     for width in (n.D, 2 * n.F))  # fmt: skip
    low = gemm.grouped_gemm_forward(rows, a, ends, False)
    return {
        "x w": lambda: gemm.grouped_gemm_forward(rows, layer.w1, ends, False),
        "x w + low b": lambda: gemm.grouped_gemm_with_lora(rows, layer.w1, low, b, ends),
        "x w + (x a) b": lambda: gemm.lora_gemm(rows, layer.w1, a, b, ends),
        "x w + low b, apart": lambda: added_apart(rows, layer.w1, low, b, ends),
        "x a": lambda: gemm.grouped_gemm_forward(rows, a, ends, False),
        "dy bT": lambda: gemm.grouped_gemm_dgrad(columns, b, ends, False),
        "xT dlow": lambda: gemm.gradient_of_weights(rows, low, ends, True),
        "lowT dy": lambda: gemm.gradient_of_weights(low, columns, ends, True),
        "factors": lambda: [lora._in_dtype(torch.bfloat16, x, True) for x in layer.loras()],
    }


def difference(found: list[Tensor], others: list[Tensor]) -> float:
    pairs = ((a.float(), b.float()) for a, b in zip(found, others, strict=True))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def microseconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    gc.collect()  # frames of a recomputation that ended early hold nodes of another stream
    replays = {name: capture_burst(call, CALLS).replay for name, call in calls.items()}
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            spent[name].append(elapsed(replays[name]) / CALLS * 1e3)
    return {name: round(sorted(times)[len(times) // 2], 1) for name, times in spent.items()}


def measure(name: str, layer: Layer, checkpointing: bool, rounds: int) -> dict[str, Any]:
    steps = contenders(layer, checkpointing)
    ours, found = steps["ours"](), {"op": name, "checkpointing": checkpointing}
    for other in ("apart", SCATTERMOE):
        if other in steps:
            apart_by = difference(ours, steps[other]())
            if not apart_by < APART:
                raise RuntimeError(
                    f"{name}, {other}: gradients are {apart_by:.2e} of their size apart"
                )
            found |= {"difference" if other == "apart" else f"difference, {other}": apart_by}
    if layer.tokens_TD.is_cuda:
        for step in steps.values():
            step()
        found["step_us"] = microseconds(steps, rounds)
        if not checkpointing:
            found["product_us"] = microseconds(products(layer), rounds)
    return found


def main(arguments: list[str] | None = None) -> None:
    def records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
        for name, sizes in (TINY if args.tiny else SIZES).items():
            if args.op in (None, name):
                layer = Layer(sizes, "cpu" if args.tiny else "cuda")
                for checkpointing in (True, False):
                    yield measure(name, layer, checkpointing, args.rounds)

    measure_cases("lora_experts", __doc__, 11, records, arguments)


if __name__ == "__main__":
    main()
