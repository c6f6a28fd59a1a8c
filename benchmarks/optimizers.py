"""An optimizer's update: moe_graphs.optim.AdamW, also with states of 8 bits, and torch's fused one.

    python benchmarks/optimizers.py --out benchmarks/results/optimizers_h200.jsonl

The update and nothing else, as CUDA graphs of several steps; contenders take turns in random order,
median of the rounds. TB/s counts what has to move: parameter, gradient and two states read, all but
the gradient written (of states of 8 bits 1/64 byte of scales, too). `host_us`: until the Python of
an eager step returns, with an empty queue before it. Gate first: after three steps the error
against fp64, over the first million numbers of every parameter, is at most twice that of torch's;
with states of 8 bits a fifth of the steps more. `--tiny` runs small shapes on the CPU, where both
others are torch's, without times: a test of this file.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measured_cases import measure_cases
from moe_graphs.bench.timing import capture_burst, elapsed
from moe_graphs.optim import AdamW

CALLS, GATE_STEPS, COMPARED, SIZE = 5, 3, 1 << 20, 0.02
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
CONTENDERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "ours": lambda p: AdamW(p, **OPTIONS),
    "8bit": lambda p: AdamW(p, **OPTIONS, state_dtype=torch.uint8),
    "torch": lambda p: torch.optim.AdamW(p, **OPTIONS, fused=True, capturable=True),
}


@dataclass(frozen=True)
class Case:
    """Parameters of one dtype, by their shapes."""

    parameters: str
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


def model_shapes(layers: int, D: int, E: int, F: int, V: int) -> list[tuple[int, ...]]:
    """D model, E experts, F ffn, V vocabulary: matrices, norms, routers, as a model has them."""
    layer = [(E, D, 2 * F), (E, F, D), (D, 3 * D // 2), (D, D), (E, D), (D,), (D,), (64,), (64,)]
    return layers * layer + [(V, D), (V, D), (D,)]


def cases(tiny: bool) -> list[Case]:
    if tiny:
        return [Case("tiny", model_shapes(1, 8, 2, 4, 16), torch.bfloat16)]
    experts = [(128, 2048, 1536), (128, 768, 2048)]
    both = {
        "experts of a layer of Qwen3-30B-A3B": experts,
        "12 layers of 1024, 32 experts of 512": model_shapes(12, 1024, 32, 512, 32768),
    }
    dtypes = (torch.bfloat16, torch.float32)
    return [Case(name, shapes, dtype) for dtype in dtypes for name, shapes in both.items()]


class Contenders:
    """Contenders with equal parameters of their own and common gradients."""

    def __init__(self, case: Case, device: str) -> None:
        start = [torch.randn(shape, device=device).mul_(SIZE) for shape in case.shapes]
        start = [p.to(case.dtype) for p in start]
        gradients = [torch.randn_like(p).mul_(1e-3) for p in start]
        self.held, self.optimizers = {}, {}
        for name, make in CONTENDERS.items():
            held = self.held[name] = [nn.Parameter(p.clone()) for p in start]
            for p, gradient in zip(held, gradients, strict=True):
                p.grad = gradient
            self.optimizers[name] = make(held)
        self.exact = [nn.Parameter(_compared(p).double()) for p in start]
        for p, gradient in zip(self.exact, gradients, strict=True):
            p.grad = _compared(gradient).double()

    def errors(self) -> dict[str, float]:
        """Relative errors of all parameters together, after the steps of the gate."""
        exact = torch.optim.AdamW(self.exact, **OPTIONS, foreach=False)
        for optimizer in (exact, *self.optimizers.values()):
            for _ in range(GATE_STEPS):
                optimizer.step()
        return {name: self._error(held) for name, held in self.held.items()}

    def _error(self, held: list[nn.Parameter]) -> float:
        pairs = list(zip(held, self.exact, strict=True))
        off = sum((_compared(p).double() - x).square().sum() for p, x in pairs)
        return (off / sum(x.square().sum() for _, x in pairs)).sqrt().item()


def _compared(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)[:COMPARED]


def measure(case: Case, device: str, rounds: int) -> dict:
    """One record. Raises if ours is not as right as torch's."""
    contenders = Contenders(case, device)
    errors = contenders.errors()
    allowed = {"ours": 1e-7, "8bit": 0.2 * GATE_STEPS * OPTIONS["lr"] / SIZE}
    if not all(errors[name] <= 2 * errors["torch"] + more for name, more in allowed.items()):
        raise RuntimeError(f"{case.parameters}, {case.dtype}: errors {errors}")
    record = {"parameters": case.parameters, "tensors": len(case.shapes), "numbers": case.numbers}
    record |= {"dtype": str(case.dtype).removeprefix("torch.")}
    record |= {f"{name}_error": error for name, error in errors.items()}
    if device == "cpu":
        return record
    steps = {name: optimizer.step for name, optimizer in contenders.optimizers.items()}
    host: dict[str, list[float]] = {name: [] for name in steps}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    graphs = {name: capture_burst(step, CALLS) for name, step in steps.items()}
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            steps[name]()
            host[name].append((time.perf_counter() - begin) * 1e6)
            spent[name].append(elapsed(graphs[name].replay) / CALLS * 1e3)
    of_states = {"8bit": 4 + 4 / 64}
    for name in steps:
        own = of_states.get(name, 4 * case.dtype.itemsize)
        moved = (3 * case.dtype.itemsize + own) * case.numbers
        median = sorted(spent[name])[rounds // 2]
        record[f"{name}_us"] = round(median, 1)
        record[f"{name}_tb_s"] = round(moved / median / 1e6, 2)
        record[f"{name}_host_us"] = round(sorted(host[name])[rounds // 2], 1)
    record["8bit_ratio"] = round(record["torch_us"] / record["8bit_us"], 2)
    record["ratio"] = round(record["torch_us"] / record["ours_us"], 2)
    return record


def main(arguments: list[str] | None = None) -> None:
    def records(args: argparse.Namespace) -> Iterator[dict]:
        for case in cases(args.tiny):
            yield measure(case, "cpu" if args.tiny else "cuda", args.rounds)

    measure_cases("optimizers", __doc__, 21, records, arguments)


if __name__ == "__main__":
    main()
