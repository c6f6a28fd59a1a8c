"""Floors of work (the least time it needs), and the best rates of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_graphs.profiling.kernel_groups import group_of_operator

# Sizes of the measured products and copies. A GPU reaches its full speed with them and needs 2 ms
# for each; a CPU needs about as long.
_MATMUL = {"cuda": 8192, "cpu": 768}
_COPY_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}


@dataclass(frozen=True)
class Rates:
    """Rates measured on this machine; ``describe`` says how.

    Attributes:
        bytes_per_second: bytes read plus bytes written.
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
    """Least work of a group in a step: FLOPs, and bytes moved to and from memory."""

    flops: float = 0.0
    bytes: float = 0.0

    def milliseconds(self, rates: Rates) -> float:
        """Milliseconds of the longer of computing and moving, as if the two overlapped entirely."""
        return 1e3 * max(self.flops / rates.flops_per_second, self.bytes / rates.bytes_per_second)


def measure_rates(device: torch.device | str) -> Rates:
    """Measure the best of a few dense matrix products and copies, in a tenth of a second.

    Products are in bf16 on a GPU and in fp32 on the CPU.
    """
    device = torch.device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
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


def best_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the shortest of ten calls, after two calls that do not count."""
    times = []
    for _ in range(12):
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
    """Count the FLOPs of one more step, by group.

    The step has to run its operators; a replay has none. Torch's ``FlopCounterMode`` knows matrix
    products, convolutions and attention, and gets formulas for our grouped GEMMs, which take all
    rows to be in use. Attention is left out, because the mode counts the whole square although the
    causal half would do. Bytes are not counted.
    """
    from torch.utils.flop_counter import FlopCounterMode  # its imports take half a second

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
    """FLOP formulas of our registered ops; none if ``moe_graphs.kernels`` is not imported."""

    def product(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
        return 2 * rows[0] * weight[-1] * weight[-2]

    def products(rows: Any, weight: Any, low: Any, factor: Any, *_: Any, **__: Any) -> int:
        return product(rows, weight) + product(low, factor)

    def weight_gradient(rows: Any, gradient: Any, *_: Any, **__: Any) -> int:
        return 2 * rows[0] * rows[1] * gradient[1]

    formulas = {
        "grouped_gemm_forward": product,
        "grouped_gemm_dgrad": product,
        "grouped_gemm_with_lora": products,
        "grouped_gemm_wgrad": weight_gradient,
        "grouped_gemm_wgrad_add": weight_gradient,
    }
    ops = torch.ops.moe_graphs
    return {getattr(ops, n): formula for n, formula in formulas.items() if hasattr(ops, n)}


def bytes_of(tensors: Any) -> int:
    """Bytes of all tensors in a tree together."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
