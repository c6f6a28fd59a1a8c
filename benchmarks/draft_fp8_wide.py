"""Draft, never run: products of rows in FP8 by `sm90_fp8` and `sm90_fp8_wide`; same bits, and time.

    python benchmarks/draft_fp8_wide.py; FP8_IN_REGISTERS=1 python benchmarks/draft_fp8_wide.py
"""

import os
from dataclasses import replace

import torch

from moe_graphs.kernels.gemm import launch as gemm
from moe_graphs.kernels.gemm import sm90_fp8_wide as wide
from moe_graphs.kernels.gemm.heuristics import row_variant, sm_count
from moe_graphs.kernels.gemm.tile_scheduler import row_tiles

SHAPES = [  # rows, experts, K, N
    (131072, 128, 2048, 1536), (131072, 128, 768, 2048), (131072, 128, 2048, 768),
    (131072, 128, 1536, 2048), (65536, 128, 2048, 1536), (16384, 8, 4096, 28672),
    (16384, 8, 14336, 4096), (16384, 8, 4096, 14336), (65536, 32, 7168, 4096), (1000, 8, 256, 384),
]  # fmt: skip


def medians(runs, rounds=15):
    flush = torch.empty(128 << 20, device="cuda", dtype=torch.uint8)
    spans = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            flush.zero_()
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            run()
            end.record()
            spans[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: sorted(b.elapsed_time(e) for b, e in s[2:])[rounds // 2] for n, s in spans.items()}


for rows, experts, K, N in SHAPES:
    torch.manual_seed(0)
    chosen = torch.randint(experts, (rows,), device="cuda")
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).int()
    x, w = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        for s in ((rows, K), (experts, N, K))
    )
    sx = torch.rand(K // 128, rows, device="cuda")
    sw = torch.rand(experts, N // 128, K // 128, device="cuda")
    v = row_variant("fp8", N)
    work, grid = row_tiles(ends, rows, 128), sm_count(x.device)
    outs = {n: torch.empty(rows, N, device="cuda", dtype=torch.bfloat16) for n in ("now", "a", "b")}

    def run_wide(out, held, v=v, given=(x, sx, w, sw), work=work, grid=grid):
        wide.fp8_rows_launch(replace(v, stages=4), *given, out, work, grid, held).run()

    runs = {
        "now": lambda: gemm.matmul_rows_fp8(x, sx, w, sw, ends, torch.bfloat16, out=outs["now"]),
        "wide": lambda: run_wide(outs["a"], False),
        "wide, registers": lambda: run_wide(outs["b"], True),
    }
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
    equal = [torch.equal(outs["now"], outs[name]) for name in ("a", "b")]
    flops = 2 * rows * K * N
    rates = {n: round(flops / ms / 1e9) for n, ms in medians(runs).items()}
    print(rows, experts, K, N, os.environ.get("FP8_IN_REGISTERS"), equal, rates, flush=True)
