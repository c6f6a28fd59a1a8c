"""The ops around the GEMMs on one GPU: routing, permutation, SwiGLU, the whole layer.

Part of kernel_check (kind `ops:all`); by itself it prints failures and times:

    python benchmarks/ops_check.py

Right: equal to the CPU path on the same numbers, the layer captured once and replayed bitwise with
other routings. Fast: microseconds of a graph replay, and GB/s of the bytes that must move.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moe_graphs.kernels import (
    RowOrder,
    grouped_gemm,
    permute,
    route_rows,
    swiglu,
    unpermute,
)
from moe_graphs.kernels.gemm import reference


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def top_k_ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices


def routing_failures() -> list[str]:
    sizes = [(1, 1, 1), (3, 2, 3), (4096, 8, 128), (16384, 10, 512), (32768, 8, 1024), (777, 6, 64)]
    failures = []
    for tokens, top_k, experts in sizes:
        ids = top_k_ids(tokens, top_k, experts)
        ours, want = route_rows(ids, experts), route_rows(ids.cpu(), experts)
        pairs = [(ours.order_R, want.order_R), (ours.inverse_R, want.inverse_R)]
        pairs.append((ours.offsets_E, want.offsets_E))
        if not all(torch.equal(a.cpu(), b) for a, b in pairs):
            failures.append(f"route_rows {tokens} x {top_k} of {experts} differs from the CPU")
    return failures


def gapped(order: RowOrder) -> RowOrder:
    """Every fifth pair without a row, as dropping by capacity leaves it."""
    inverse = order.inverse_R.clone()
    inverse[::5] = -1
    kept = inverse >= 0
    rows = torch.full_like(order.order_R, -1)
    pairs = torch.arange(len(inverse), dtype=rows.dtype, device=inverse.device)
    rows[inverse[kept]] = pairs[kept]
    return RowOrder(rows, inverse, order.offsets_E, True)


def moves(order: RowOrder):
    return lambda hidden, weights: unpermute(swiglu(permute(hidden, order)), order, weights)


def gradients(run, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def move_failures() -> list[str]:
    """permute, swiglu, unpermute and their gradients, against the CPU in the dtype."""
    failures = []
    for dtype, width in ((torch.bfloat16, 2880), (torch.float16, 72), (torch.float32, 7168)):
        order = route_rows(top_k_ids(300, 6, 40), 40)
        hidden, weights = random(300, width, dtype=dtype), torch.rand(300, 6, device="cuda")
        grad = random(300, width // 2, dtype=dtype)
        for where in (order, gapped(order)):
            host = RowOrder(where.order_R.cpu(), where.inverse_R.cpu(), where.offsets_E.cpu(),
                            where.has_gaps)  # fmt: skip
            ours = gradients(moves(where), [hidden, weights], grad)
            want = gradients(moves(host), [hidden.cpu(), weights.cpu()], grad.cpu())
            for name, a, b in zip(("out", "d hidden", "d weights"), ours, want, strict=True):
                off = (a.cpu().float() - b.float()).norm() / b.float().norm()
                limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
                if not off <= limit:
                    failures.append(f"{name} {dtype} gaps={where.has_gaps}: {off:.1e}")
    return failures


def layer(hidden, weights, ids, w1, w2) -> torch.Tensor:
    """The dropless path as LocalDispatcher and GroupedExperts take it."""
    order = route_rows(ids, w1.shape[0])
    up = grouped_gemm(permute(hidden, order), w1, order.offsets_E)
    rows = grouped_gemm(swiglu(up), w2, order.offsets_E, zero_tail=False)
    return unpermute(rows, order, weights)


def layer_failures() -> list[str]:
    """Forward and all gradients against fp32, then captured once and replayed bitwise."""
    T, D, F, E, K = 512, 256, 384, 32, 4
    leaves = [random(T, D), torch.rand(T, K, device="cuda"), random(E, D, 2 * F), random(E, F, D)]
    leaves = [(x * 0.2).requires_grad_() for x in leaves]
    ids, grad = top_k_ids(T, K, E), random(T, D)

    def step() -> list[torch.Tensor]:
        out = layer(leaves[0], leaves[1], ids, *leaves[2:])
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    exact = gradients(
        lambda h, w, w1, w2: layer(h, w, ids.cpu(), w1, w2),
        [x.detach().cpu().float() for x in leaves],
        grad.cpu().float(),
    )
    failures = []
    for name, got, want in zip(("out", "dh", "dweights", "dw1", "dw2"), step(), exact, strict=True):
        off = (got.cpu().float() - want).norm() / want.norm()
        if not off < 1.5e-2:
            failures.append(f"layer {name}: error {off:.1e} against fp32")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        ids.copy_(top_k_ids(T, K, E))
        for static in captured:
            static.fill_(777.0)
        graph.replay()
        if not all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True)):
            failures.append("layer: replay with another routing differs from eager")
    return failures


def tail_failures() -> list[str]:
    """Rows past the last end are zero in the output, and main_grad adds in fp32."""
    failures = []
    ends = torch.tensor([100, 100, 333], dtype=torch.int32, device="cuda")
    x, w = random(500, 64), random(3, 64, 48).requires_grad_()
    x[333:] = float("nan")
    if not bool((grouped_gemm(x, w, ends)[333:] == 0).all()):
        failures.append("grouped_gemm: rows past the end are not zero")
    main_grad, grad = torch.ones(w.shape, device="cuda"), random(500, 48)
    for _ in range(2):
        grouped_gemm(x, w, ends, main_grad_EKN=main_grad).backward(grad)
    want = 1 + 2 * reference.grouped_gemm_wgrad(x.float(), grad.float(), ends)
    if not (main_grad - want).norm() / want.norm() < 1e-5 or w.grad is not None:
        failures.append("grouped_gemm: main_grad is not 1 + twice the gradient")
    return failures


def failures() -> list[str]:
    torch.manual_seed(0)
    return [*routing_failures(), *move_failures(), *layer_failures(), *tail_failures()]


def microseconds(call, calls: int = 20, rounds: int = 5) -> float:
    call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / calls)
    return sorted(times)[rounds // 2]


def torch_route(ids: torch.Tensor, experts: int):
    """Compute the result of route_rows by torch's operations."""
    keys = ids.reshape(-1).to(torch.int16)
    in_order, order = torch.sort(keys, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cuda"))
    every = torch.arange(experts, device="cuda", dtype=torch.int16)
    return inverse, torch.searchsorted(in_order, every, right=True, out_int32=True)


def timed_jobs(T: int, D: int, F: int, E: int, K: int) -> dict:
    """Timed calls by name: call, bytes that must move or 0, torch's plain call or None."""
    from moe_graphs.kernels.gemm import tile_scheduler
    from moe_graphs.kernels.permute import triton_kernels as permute_triton
    from moe_graphs.kernels.swiglu import NO_CLAMP
    from moe_graphs.kernels.swiglu import reference as swiglu_reference
    from moe_graphs.kernels.swiglu import triton_kernels as swiglu_triton

    ids, R = top_k_ids(T, K, E), T * K
    order = route_rows(ids, E)
    ends, token = order.offsets_E, order.order_R // K
    inverse, weights = order.inverse_R.view(T, K), torch.rand(T, K, device="cuda")
    hidden, rows, x, dh = random(T, D), random(R, D), random(R, 2 * F), random(R, F)
    move = 2 * D * (T + R)
    return {
        "route": (lambda: route_rows(ids, E), 24 * R, lambda: torch_route(ids, E)),
        "row tiles": (lambda: tile_scheduler.row_tiles(ends, R, 128), 0, None),
        "expert order": (lambda: tile_scheduler.expert_order(ends, skip_empty=False), 0, None),
        "permute": (
            lambda: permute_triton.spread_rows(hidden, inverse, None, R, False),
            move,
            lambda: hidden.index_select(0, token),
        ),
        "unpermute": (lambda: permute_triton.collect_rows(rows, inverse, weights), move, None),
        "d weights": (lambda: permute_triton.dot_rows(rows, inverse, hidden), move, None),
        "swiglu": (
            lambda: swiglu_triton.swiglu_forward(x, *NO_CLAMP),
            6 * R * F,
            lambda: swiglu_reference.swiglu(x),
        ),
        "d swiglu": (lambda: swiglu_triton.swiglu_backward(x, dh, False), 10 * R * F, None),
    }


def print_times() -> None:
    """Per op: microseconds, GB/s of what must move, and torch's plain way beside it."""
    print("\nops around the GEMMs, graph replay: us and GB/s")
    sizes = [(16384, 2048, 768, 128, 8), (16384, 2048, 512, 512, 10), (8192, 4096, 14336, 8, 2)]
    for T, D, F, E, K in sizes:
        cells = []
        for name, (call, size, plain) in timed_jobs(T, D, F, E, K).items():
            us = microseconds(call)
            cell = f"{name} {us:.1f}" + (f" {size / us / 1000:.0f}GB/s" if size else "")
            cells.append(cell + (f" (torch {microseconds(plain):.1f})" if plain else ""))
        print(f"  T={T} D={D} F={F} E={E} K={K}: " + " | ".join(cells), flush=True)
    print_routing_times()


def print_routing_times() -> None:
    """Microseconds of ours / torch's stable sort, where the two meet."""
    from moe_graphs.kernels.row_order.triton_kernels import sort_pairs

    for tokens in (2048, 16384, 32768, 65536):
        cells = []
        for experts in (8, 32, 64, 128, 256, 512, 1024):
            ids = top_k_ids(tokens, 8, experts)
            calls = [partial(sort_pairs, ids, experts), partial(torch_route, ids, experts)]
            cells.append(f"E={experts} " + "/".join(f"{microseconds(c):.1f}" for c in calls))
        print(f"  route T={tokens} K=8, us ours/torch: " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    print("\n".join(failures()) or "ok")
    print_times()
