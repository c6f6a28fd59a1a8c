"""Kernels around the experts (attention's heads, norms, router, loss): ours against torch's.

    python benchmarks/layer_kernels.py --out benchmarks/results/layer_kernels_h200.jsonl

Forward and backward together and nothing else (the gradients of the outputs are there before),
bf16, as CUDA graphs of several calls; contenders take turns in random order, median of the rounds.
Gate first: the error against fp64 is at most twice that of the plain path. Held: memory that the
forward leaves allocated besides its outputs. Where Liger-Kernel is installed, its fused head is in
the same line. It waits for the device, so it is timed eagerly. `--tiny` runs small shapes on the
CPU, where both are the plain path, without times: a test of this file.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measured_cases import measure_cases
from moe_graphs.bench.timing import capture_burst, elapsed
from moe_graphs.kernels import cross_entropy, linear_cross_entropy, rms_norm, split_heads
from moe_graphs.kernels.choose_experts import RoutingRule, choose, route
from moe_graphs.kernels.heads import plain_split_heads
from moe_graphs.kernels.rms_norm import plain_rms_norm

CALLS, EPS = 5, 1e-6
Function = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """Two functions from leaves to outputs; gradients flow back through the first ``graded``.

    Attributes:
        transposed: whether the outputs' gradients come as attention leaves them, heads first.
        eager: functions of other libraries by name, which read values on the host: no graph has
            them, and their error is told but not judged.
        exact: in fp64, in less memory than ``plain``; None takes ``plain``.
    """

    op: str
    shape: str
    ours: Function
    plain: Function
    leaves: list[Tensor]
    graded: int
    transposed: bool = False
    eager: Mapping[str, Function] = field(default_factory=dict)
    exact: Function | None = None

    def outputs(self, function: Function, leaves: list[Tensor]) -> list[Tensor]:
        return list(function(*leaves))[: self.graded]

    def step(self, function: Function, leaves: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Make the timed call: from leaves to outputs, and back from gradients made beforehand."""
        gradients = [self._gradient(o) for o in self.outputs(function, leaves)]
        return lambda: list(torch.autograd.grad(self.outputs(function, leaves), leaves, gradients))

    def _gradient(self, output: Tensor) -> Tensor:
        """Random gradient that bf16 holds exactly, the same for every contender."""
        generator = torch.Generator(output.device).manual_seed(0)
        numbers = torch.randn(output.shape, device=output.device, generator=generator)
        gradient = numbers.bfloat16().to(output.dtype)
        return (
            gradient.transpose(1, 2).contiguous().transpose(1, 2) if self.transposed else gradient
        )


def heads(device: str, B: int, S: int, H: int, G: int, Q: int) -> Case:
    angles = torch.rand(S, Q // 2, device=device) * 100
    tables = angles.cos(), angles.sin()
    qkv = torch.randn(B, S, (H + 2 * G) * Q, device=device).bfloat16()
    weights = [(torch.rand(Q, device=device) + 0.5).bfloat16() for _ in range(2)]
    return Case(
        "split_heads", f"{B}x{S} tokens, {H}/{G} heads of {Q}, norm per head",
        lambda x, q, k: split_heads(x, *tables, H, G, q, k, EPS),
        lambda x, q, k: plain_split_heads(x, *(t.to(x.dtype) if x.dtype == torch.float64 else t
                                               for t in tables), q, k, H, G, EPS),
        [qkv, *weights], 3, transposed=True,
    )  # fmt: skip


def router(device: str, T: int, D: int, E: int, K: int, groups: int = 1) -> Case:
    rule = RoutingRule(K, groups > 1, True, 1.0, groups, max(groups // 2, 1), 0.01, 1e-3)
    hidden = torch.randn(T, D, device=device).bfloat16()
    weight = (0.02 * torch.randn(E, D, device=device)).bfloat16()

    def plain(hidden_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        found = choose(functional.linear(hidden_TD.to(wide), weight_ED.to(wide)), None, rule)
        return found.weights_TK, found.aux_loss

    def ours(hidden_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
        found = route(hidden_TD, weight_ED, None, rule)
        return found.weights_TK, found.aux_loss

    shape = f"{T} tokens of {D}, {K} of {E} experts, {groups} groups"
    return Case("route", shape, ours, plain, [hidden, weight], 2)


def loss(device: str, N: int, V: int) -> Case:
    logits = (3 * torch.randn(N, V, device=device)).bfloat16()
    targets = torch.randint(V, (N,), device=device)

    def plain(logits_NV: Tensor) -> tuple[Tensor]:
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        return (functional.cross_entropy(logits_NV.to(wide), targets),)

    def ours(logits_NV: Tensor) -> tuple[Tensor]:
        return (cross_entropy(logits_NV, targets),)

    def exact(logits_NV: Tensor) -> tuple[Tensor]:
        return (by_chunks(lambda x: x, logits_NV, targets),)

    shape = f"{N} tokens, vocabulary {V}"
    return Case("cross_entropy", shape, ours, plain, [logits], 1, exact=exact)


def by_chunks(logits_of: Callable[[Tensor], Tensor], rows: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy, of which only the logits of 1,024 rows are there at once."""

    def summed(rows: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits_of(rows), targets, reduction="sum")

    chunks = zip(rows.split(1024), targets.split(1024), strict=True)
    sums = [checkpoint(summed, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum() / len(targets)


def norm(device: str, T: int, D: int) -> Case:
    x = torch.randn(T, D, device=device).bfloat16()
    weight = (torch.rand(D, device=device) + 0.5).bfloat16()

    def plain(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (plain_rms_norm(x, weight, EPS),)

    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (rms_norm(x, weight, EPS),)

    return Case("rms_norm", f"{T} rows of {D}", ours, plain, [x, weight], 1)


def head(device: str, N: int, D: int, V: int) -> Case:
    """Projection onto the vocabulary and its cross entropy; the plain one has whole logits."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(N, D, device=device).to(dtype)
    weight = (D**-0.5 * torch.randn(V, D, device=device)).to(dtype)
    targets = torch.randint(V, (N,), device=device)

    def plain(hidden_ND: Tensor, weight_VD: Tensor) -> Sequence[Tensor]:
        logits_NV = functional.linear(hidden_ND, weight_VD)
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        return (functional.cross_entropy(logits_NV.to(wide), targets),)

    def ours(hidden_ND: Tensor, weight_VD: Tensor) -> Sequence[Tensor]:
        return (linear_cross_entropy(hidden_ND, weight_VD, targets),)

    def exact(hidden_ND: Tensor, weight_VD: Tensor) -> Sequence[Tensor]:
        return (by_chunks(lambda x: functional.linear(x, weight_VD), hidden_ND, targets),)

    eager = {}
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        for name, dtype in (("liger", None), ("liger_fp32_sums", torch.float32)):
            loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=dtype)
            eager[name] = lambda h, w, loss=loss: (loss(w, h, targets),)
    shape = f"{N} tokens of {D}, vocabulary {V}"
    leaves = [hidden, weight]
    return Case("linear_cross_entropy", shape, ours, plain, leaves, 1, eager=eager, exact=exact)


Made = tuple[Callable[..., Case], Sequence[tuple[int, ...]]]

TINY: dict[str, Made] = {
    "split_heads": (heads, [(2, 8, 4, 2, 8)]),
    "route": (router, [(16, 32, 8, 2)]),
    "cross_entropy": (loss, [(8, 33)]),
    "rms_norm": (norm, [(16, 24)]),
    "linear_cross_entropy": (head, [(24, 16, 33)]),
}
FULL: dict[str, Made] = {
    "split_heads": (heads, [(4, 4096, 32, 4, 128), (2, 1024, 16, 4, 64), (8, 1024, 12, 12, 64)]),
    "route": (
        router,
        [(16384, 2048, 128, 8), (2048, 1024, 32, 4), (8192, 4096, 8, 2), (8192, 7168, 256, 8, 8)],
    ),
    "cross_entropy": (loss, [(16384, 32768), (16384, 151936), (2048, 32768), (8192, 256)]),
    "rms_norm": (norm, [(16384, 2048), (524288, 128), (16384, 2880), (8192, 7168), (2048, 1024)]),
    "linear_cross_entropy": (
        head,
        [(8192, 2048, 32768), (4096, 2048, 151936), (16384, 2048, 151936)],
    ),
}


def cases(device: str, tiny: bool, op: str | None = None) -> Iterator[Case]:
    """``op``: only its cases."""
    for name, (make, shapes) in (TINY if tiny else FULL).items():
        for shape in shapes if op in (None, name) else ():
            yield make(device, *shape)


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative error of the tensors, as they differ in the median row."""
    worst = 0.0
    for a, b in zip(found, exact, strict=True):
        a, b = a.double().reshape(len(a), -1), b.reshape(len(b), -1)
        # Rows in which two experts are nearly equal may choose the other one.
        worst = max(worst, ((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)).median().item())
    return worst


def measure(case: Case, rounds: int) -> dict:
    """One record. Raises if ours is not as right as plain torch."""
    leaves = [leaf.requires_grad_() for leaf in case.leaves]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = case.step(case.exact or case.plain, wide)()
    functions = {"ours": case.ours, "torch": case.plain, **case.eager}
    errors = {name: error(case.step(f, leaves)(), exact) for name, f in functions.items()}
    if not errors["ours"] <= 2 * errors["torch"] + 1e-6:
        raise RuntimeError(f"{case.op}, {case.shape}: errors {errors}")
    record = {"op": case.op, "shape": case.shape, "error": errors.pop("ours")}
    record |= {f"{name}_error": value for name, value in errors.items()}
    if not leaves[0].is_cuda:
        return record
    del exact, wide
    for name, function in functions.items():
        record |= memory(case, name, function, leaves)
    steps = {n: case.step(f, leaves) for n, f in functions.items()}
    calls = {n: functools.partial(repeat, step) for n, step in steps.items()}
    for name in functions.keys() - case.eager.keys():
        calls[name] = capture_burst(steps[name], CALLS).replay
    spent: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            spent[name].append(elapsed(calls[name]) / CALLS * 1e3)
    for name, times in spent.items():
        record[f"{name}_us"] = round(sorted(times)[len(times) // 2], 1)
    record["ratio"] = round(record["torch_us"] / record["ours_us"], 2)
    return record


def repeat(step: Callable[[], list[Tensor]]) -> None:
    for _ in range(CALLS):
        step()


def memory(case: Case, name: str, function: Function, leaves: list[Tensor]) -> dict[str, float]:
    """Memory that the forward holds besides its outputs, and the peak of a step, in MiB."""
    before = torch.cuda.memory_allocated()
    outputs = case.outputs(function, leaves)
    own = {o.untyped_storage().data_ptr(): o.untyped_storage().nbytes() for o in outputs}
    for leaf in leaves:
        own.pop(leaf.untyped_storage().data_ptr(), None)
    held = torch.cuda.memory_allocated() - before - sum(own.values())
    del outputs
    step = case.step(function, leaves)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    found = {"held": held, "peak": peak}
    return {f"{name}_{key}_mib": round(count / 2**20, 1) for key, count in found.items()}


def main(arguments: list[str] | None = None) -> None:
    def records(args: argparse.Namespace) -> Iterator[dict]:
        for case in cases("cpu" if args.tiny else "cuda", args.tiny, args.op):
            yield measure(case, args.rounds)
            if not args.tiny:
                torch.cuda.empty_cache()

    measure_cases("layer_kernels", __doc__, 11, records, arguments)


if __name__ == "__main__":
    main()
