"""What work needs at least, and how fast this machine does such work at its best."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_graphs.profiling.kernel_groups import group_of_operator

# Wide enough that a GPU is at its full speed, and gone in 2 ms; and what a CPU does in as many.
_MATMUL = {"cuda": 8192, "cpu": 768}
_COPY_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}


@dataclass(frozen=True)
class Rates:
    """Measured on this machine: ``describe`` says how.

    Attributes:
        bytes_per_second: read and written together.
    """

    flops_per_second: float
    bytes_per_second: float
    dtype: str

    def describe(self) -> str:
        return (
            f"this machine: {self.flops_per_second / 1e12:,.3g} TFLOP/s in a dense matrix product "
            f"of {self.dtype}, {self.bytes_per_second / 1e9:,.4g} GB/s read and written in a copy"
        )


@dataclass(frozen=True)
class Floor:
    """The least that a group of a step computes, and moves to and from memory."""

    flops: float = 0.0
    bytes: float = 0.0

    def milliseconds(self, rates: Rates) -> float:
        """The longer of the two, as if they overlapped entirely."""
        return 1e3 * max(self.flops / rates.flops_per_second, self.bytes / rates.bytes_per_second)


def measure_rates(device: torch.device | str, dtype: torch.dtype | None = None) -> Rates:
    """The best of a few dense matrix products and copies. A tenth of a second.

    Args:
        dtype: of the product; by default bf16 on a GPU and fp32 on the CPU.
    """
    device = torch.device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    size, count = _MATMUL[device.type], _COPY_BYTES[device.type]
    product = _product_seconds(size, device, dtype)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copied = best_of(lambda: target.copy_(source), device)
    name = str(dtype).removeprefix("torch.")
    return Rates(2 * size**3 / product, 2 * count / copied, name)


def _product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a_NN, b_NN, c_NN = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
    return best_of(lambda: torch.mm(a_NN, b_NN, out=c_NN), device)


def best_of(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Seconds of the shortest call, after two that are not counted."""
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            call()
            marks[1].record()
            marks[1].synchronize()
            times.append(marks[0].elapsed_time(marks[1]) / 1e3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return min(times[2:])


def counted_floors(step: Callable[[], object]) -> dict[str, Floor]:
    """FLOPs by group of one more step, which has to run its operators: a replay has none.

    Torch's ``FlopCounterMode`` knows matrix products, convolutions and attention; it is told of our
    grouped GEMMs, whose rows it takes to be all in use. Attention is left out: the mode counts the
    whole square where the causal half would do. No bytes.
    """
    from torch.utils.flop_counter import FlopCounterMode  # half a second of other imports

    with FlopCounterMode(display=False, custom_mapping=_ours()) as counter:
        step()
    floors: dict[str, float] = {}
    for operator, flops in counter.get_flop_counts().get("Global", {}).items():
        name = str(operator).replace(".", "::", 1)
        group = group_of_operator(name)
        floors[group] = floors.get(group, 0.0) + flops
    floors.pop("attention", None)
    return {group: Floor(flops=flops) for group, flops in floors.items() if flops}


def _ours() -> dict[Any, Any]:
    """Formulas for the ops that are there; none if ``moe_graphs.kernels`` is not in use."""

    def product(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
        return 2 * rows[0] * weight[-1] * weight[-2]

    def weight_gradient(rows: Any, gradient: Any, *_: Any, **__: Any) -> int:
        return 2 * rows[0] * rows[1] * gradient[1]

    def gathered(_: Any, order: Any, weight: Any, *__: Any, **___: Any) -> int:
        return product(order, weight)

    formulas = {
        "gather_gemm_forward": gathered,
        "grouped_gemm_forward": product,
        "grouped_gemm_dgrad": product,
        "grouped_gemm_wgrad": weight_gradient,
        "grouped_gemm_wgrad_add": weight_gradient,
    }
    ops = torch.ops.moe_graphs
    return {getattr(ops, n): formula for n, formula in formulas.items() if hasattr(ops, n)}


def bytes_of(tensors: Any) -> int:
    """Of all of them together."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
