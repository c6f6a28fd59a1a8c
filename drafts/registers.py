"""On the GPU: products in FP8 with rows in registers beside those of before: bits, then TFLOP/s.

python3 drafts/registers.py CASES
"""
import random, shutil, sys
from dataclasses import replace
sys.path[:0] = ["."]
for name in ("sm90_fp8_base", "sm90_fp8_weights_base"): shutil.copy(f"drafts/{name}.py", "moe_graphs/kernels/gemm/")
import torch
import moe_graphs.kernels.gemm.sm90_fp8 as new, moe_graphs.kernels.gemm.sm90_fp8_base as old
import moe_graphs.kernels.gemm.sm90_fp8_weights as new_w, moe_graphs.kernels.gemm.sm90_fp8_weights_base as old_w
from moe_graphs.bench.timing import elapsed
from moe_graphs.kernels import fp8, route_rows
from moe_graphs.kernels.fp8 import triton_kernels as f
from moe_graphs.kernels.gemm.heuristics import row_variant, weight_variant
from moe_graphs.kernels.gemm.tile_scheduler import expert_order, padded_tiles, row_tiles
bf = torch.bfloat16
# tokens, top-k, experts, D, F, Zipf's law
CASES = {"1024": (16384, 8, 128, 2048, 768, 0), "512": (8192, 8, 128, 2048, 768, 0), "128": (2048, 8, 128, 2048, 768, 0), "skewed": (16384, 8, 128, 2048, 768, 1), "mixtral": (8192, 2, 8, 4096, 14336, 0), "7168": (16384, 4, 32, 7168, 2048, 0)}
grid = torch.cuda.get_device_properties(0).multi_processor_count
def case(name):
    T, K, E, D, F, skewed = CASES[name]
    R = T * K
    torch.manual_seed(0)
    logits = torch.rand(T, E, device="cuda")
    if skewed: logits = logits.log() - (torch.randperm(E, device="cuda") + 1).log()
    order = route_rows(logits.topk(K, 1).indices, E)
    ends, pairs = order.offsets_E, order.order_R
    random_ = lambda *s: torch.randn(*s, device="cuda", dtype=bf)
    runs = {}
    work, live = row_tiles(ends, R, 128), int(ends[-1])
    for label, k, n in (("X w1", D, 2 * F), ("A w2", F, D), ("dY w2'", D, F), ("dH w1'", 2 * F, D)):
        x = fp8.quantized(random_(R, k), True)
        w, ws = f.fp8_weights(random_(E, k, n) * 0.02, False, True, False)[2:]
        v = row_variant("fp8", n)
        outs = {}
        for who, m, variant in (("before", old, v), ("registers", new, v), ("registers, no turns", new, replace(v, pingpong=False))):
            outs[who] = torch.full((R, n), float("nan"), device="cuda", dtype=bf)
            go = m.fp8_rows_launch(variant, x.codes, x.scales, w, ws, outs[who], work, grid)
            go.run(); runs[label, who] = go.run, 2.0 * R * k * n
        torch.cuda.synchronize()
        print(name, label, {who: torch.equal(o[:live], outs["before"][:live]) for who, o in outs.items()}, "nan", bool(outs["registers"][:live].isnan().any()), flush=True)
    for label, m_, n in (("dw1", D, 2 * F), ("dw2", F, D)):
        a, b = fp8.quantized(random_(R, m_), True), fp8.quantized(random_(R, n), True)
        x, dy = fp8.columns_of(a, ends), fp8.columns_of(b, ends)
        v = weight_variant("fp8", n, bf)
        _, padded = padded_tiles(ends, R, v.block_k)
        experts, outs = expert_order(padded, skip_empty=False), {}
        for who, mod, variant in (("before", old_w, v), ("registers", new_w, v), ("registers, no turns", new_w, replace(v, pingpong=False))):
            outs[who] = torch.full((E, m_, n), float("nan"), device="cuda", dtype=bf)
            go = mod.fp8_weights_launch(variant, *x, *dy, outs[who], experts, grid)
            go.run(); runs[label, who] = go.run, 2.0 * R * m_ * n
        torch.cuda.synchronize()
        print(name, label, {who: torch.equal(o, outs["before"]) for who, o in outs.items()}, "nan", bool(outs["registers"].isnan().any()), flush=True)
    return runs
for name in sys.argv[1].split(","):
    runs = case(name)
    spent, order = {k: [] for k in runs}, list(runs)
    for _ in range(7):
        random.shuffle(order)
        for k in order:
            run = runs[k][0]; once = elapsed(run); n = max(3, int(20 / once))
            for _ in range(n): run()
            spent[k].append(elapsed(lambda: [run() for _ in range(n)]) / n)
    for (label, who), ms in spent.items():
        ms = sorted(ms); print(f"{name:8s} {label:7s} {who:20s} {ms[3]*1e3:8.1f} us ({ms[0]*1e3:.1f} to {ms[-1]*1e3:.1f}) {runs[label, who][1] / ms[3] / 1e9:7.0f} TFLOP/s", flush=True)
    del runs; torch.cuda.empty_cache()
