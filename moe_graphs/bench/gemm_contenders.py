"""Contenders of the grouped GEMM benchmark, with a call for each direction that they have.

Shapes: R rows, E experts, K and N. Per expert, forward is x_RK @ w_EKN, dgrad is dy_RN @ w.T, wgrad
is x.T @ dy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_graphs.bench.timing import group_ends, group_sizes, matrices
from moe_graphs.kernels.gemm import launch
from moe_graphs.kernels.gemm.heuristics import row_variant, weight_variant
from moe_graphs.kernels.gpu_architectures import architecture_of

Call = Callable[[], torch.Tensor]
DIRECTIONS = ("fwd", "dgrad", "wgrad")


@dataclass(frozen=True)
class Problem:
    """Operands on the GPU in bf16; the groups' ends are on the GPU alone."""

    x_RK: torch.Tensor
    w_EKN: torch.Tensor
    dy_RN: torch.Tensor
    ends_E: torch.Tensor

    @property
    def flops(self) -> float:
        return 2.0 * self.x_RK.numel() * self.w_EKN.shape[2]

    @property
    def rows_per_expert(self) -> float:
        return self.x_RK.shape[0] / self.w_EKN.shape[0]


def make_problem(rows: int, experts: int, K: int, N: int, routing: str) -> Problem:
    bf16 = torch.bfloat16
    torch.manual_seed(0)
    ends = group_ends(group_sizes(routing, rows, experts, 7))
    x, w = matrices(rows, K, dtype=bf16), matrices(experts, K, N, dtype=bf16)
    return Problem(x, w, matrices(rows, N, dtype=bf16), ends)


def dense(p: Problem) -> dict[str, Call]:
    """One cuBLAS GEMM of equal FLOPs per direction, as an upper bound of the speed."""
    y, dx = torch.empty_like(p.dy_RN), torch.empty_like(p.x_RK)
    dw = torch.empty_like(p.w_EKN[0])
    return {
        "fwd": lambda: torch.mm(p.x_RK, p.w_EKN[0], out=y),
        "dgrad": lambda: torch.mm(p.dy_RN, p.w_EKN[0].t(), out=dx),
        "wgrad": lambda: torch.mm(p.x_RK.t(), p.dy_RN, out=dw),
    }


def loop(p: Problem, streams: int = 1) -> dict[str, Call]:
    """One cuBLAS launch per expert, with sizes that are read on the host."""
    y, dx, dw = torch.empty_like(p.dy_RN), torch.empty_like(p.x_RK), torch.empty_like(p.w_EKN)
    side = [torch.cuda.Stream() for _ in range(streams)] if streams > 1 else []

    def per_expert(body: Callable[[int, slice], None], out: torch.Tensor) -> torch.Tensor:
        main, start = torch.cuda.current_stream(), 0
        for stream in side:
            stream.wait_stream(main)
        for e, end in enumerate(p.ends_E.tolist()):
            if side:
                with torch.cuda.stream(side[e % streams]):
                    body(e, slice(start, end))
            else:
                body(e, slice(start, end))
            start = end
        for stream in side:
            main.wait_stream(stream)
        return out

    def forward(e: int, own: slice) -> None:
        torch.mm(p.x_RK[own], p.w_EKN[e], out=y[own])

    def dgrad(e: int, own: slice) -> None:
        torch.mm(p.dy_RN[own], p.w_EKN[e].t(), out=dx[own])

    def wgrad(e: int, own: slice) -> None:
        torch.mm(p.x_RK[own].t(), p.dy_RN[own], out=dw[e])

    return {
        "fwd": lambda: per_expert(forward, y),
        "dgrad": lambda: per_expert(dgrad, dx),
        "wgrad": lambda: per_expert(wgrad, dw),
    }


def torch_grouped(p: Problem) -> dict[str, Call]:
    """Calls of `torch._grouped_mm` (CUTLASS on Hopper)."""
    return {
        "fwd": lambda: torch._grouped_mm(p.x_RK, p.w_EKN, offs=p.ends_E),
        "dgrad": lambda: torch._grouped_mm(p.dy_RN, p.w_EKN.transpose(1, 2), offs=p.ends_E),
        "wgrad": lambda: torch._grouped_mm(p.x_RK.t(), p.dy_RN, offs=p.ends_E),
    }


def ours(p: Problem, name: str | None) -> dict[str, Call]:
    """Our kernels: the variant ``name``, or for None the variant chosen from static averages."""
    y, dx, dw = torch.empty_like(p.dy_RN), torch.empty_like(p.x_RK), torch.empty_like(p.w_EKN)
    _, K, N = p.w_EKN.shape
    forward, dgrad, wgrad = None, None, None
    if name is not None:
        gpu = architecture_of(p.x_RK.device)
        forward, dgrad = row_variant(name, N, gpu), row_variant(name, K, gpu)
        wgrad = weight_variant(name, N, torch.bfloat16, gpu)
    return {
        "fwd": lambda: launch.matmul_rows(p.x_RK, p.w_EKN, p.ends_E, out=y, variant=forward),
        "dgrad": lambda: launch.matmul_rows(
            p.dy_RN, p.w_EKN, p.ends_E, transposed=True, out=dx, variant=dgrad
        ),
        "wgrad": lambda: launch.matmul_weights(p.x_RK, p.dy_RN, p.ends_E, out=dw, variant=wgrad),
    }


def ours_fp32(p: Problem, *, accumulate: bool) -> dict[str, Call]:
    """Our weight gradients in fp32, stored or added to a gradient."""
    dw = torch.zeros(p.w_EKN.shape, device="cuda")
    return {
        "wgrad": lambda: launch.matmul_weights(
            p.x_RK, p.dy_RN, p.ends_E, out=dw, accumulate=accumulate
        )
    }


def grouped_gemm_package(p: Problem) -> dict[str, Call]:
    """Calls of the package `grouped_gemm` (MegaBlocks), with sizes on the host."""
    from grouped_gemm.ops import gmm

    def sizes() -> torch.Tensor:
        return torch.diff(p.ends_E.cpu().long(), prepend=torch.zeros(1, dtype=torch.int64))

    return {
        "fwd": lambda: gmm(p.x_RK, p.w_EKN, sizes(), trans_b=False),
        "dgrad": lambda: gmm(p.dy_RN, p.w_EKN, sizes(), trans_b=True),
        "wgrad": lambda: gmm(p.x_RK, p.dy_RN, sizes(), trans_a=True),
    }


def te_grouped_linear(p: Problem) -> dict[str, Call]:
    """Forward of Transformer Engine's GroupedLinear, with sizes on the host."""
    from transformer_engine.pytorch import GroupedLinear

    experts, K, N = p.w_EKN.shape
    layer = GroupedLinear(experts, K, N, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for e in range(experts):
            getattr(layer, f"weight{e}").copy_(p.w_EKN[e].t())

    def forward() -> torch.Tensor:
        ends = p.ends_E.tolist()
        with torch.no_grad():
            return layer(p.x_RK, [b - a for a, b in zip([0, *ends], ends, strict=False)])

    return {"fwd": forward}


def contenders(p: Problem) -> dict[str, dict[str, Call]]:
    """Calls of all contenders, by name and direction."""
    found = {
        "dense": dense(p),
        "loop": loop(p),
        "loop 4 streams": loop(p, streams=4),
        "torch": torch_grouped(p),
        "ours": ours(p, None),
        **{f"ours {name}": ours(p, name) for name in _variants(p)},
        "ours f32": ours_fp32(p, accumulate=False),
        "ours f32 add": ours_fp32(p, accumulate=True),
    }
    if _installed("grouped_gemm.ops"):
        found["grouped_gemm"] = grouped_gemm_package(p)
    if _installed("transformer_engine.pytorch"):
        found["TE"] = te_grouped_linear(p)
    return found


def _variants(p: Problem) -> list[str]:
    """Variants that the chosen one is compared with, as far as this GPU runs them."""
    return [
        n for n in ("tma", "cooperative", "pingpong") if n in architecture_of(p.x_RK.device).gemms
    ]


def _installed(module: str) -> bool:
    """Whether a module can be imported; another file may have the name of its package."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
