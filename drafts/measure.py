"""On the GPU: one variant of the tree in sys.argv[1]; prepares, waits for its turn, measures.

python3 drafts/measure.py TREE LABEL CASES LOCK
"""
import fcntl, random, sys
tree, label, cases, lock = sys.argv[1:5]
sys.path[:0] = [tree]
import torch
import moe_graphs.kernels.gemm.sm90_fp8 as m
from moe_graphs.kernels import fp8, route_rows
from moe_graphs.kernels.fp8 import triton_kernels as f
from moe_graphs.kernels.gemm.heuristics import Quantizing, Turning, row_variant
from moe_graphs.kernels.gemm.tile_scheduler import row_tiles
assert m.__file__.startswith(tree), m.__file__
bf = torch.bfloat16
CASES = {"1024": (16384, 8, 128, 2048, 768), "512": (8192, 8, 128, 2048, 768), "256": (4096, 8, 128, 2048, 768), "mixtral": (8192, 2, 8, 4096, 14336), "7168": (16384, 4, 32, 7168, 2048)}

def timed(run, n=20):
    s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run(); s.record()
    for _ in range(n): run()
    e.record(); e.synchronize()
    return s.elapsed_time(e) / n * 1e3

def bits(t): return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t

def case(name):
    T, K, E, D, F = CASES[name]
    R = T * K
    torch.manual_seed(0)
    order = route_rows(torch.rand(T, E, device="cuda").topk(K, 1).indices, E)
    ends, pairs = order.offsets_E, order.order_R
    random_ = lambda *s: torch.randn(*s, device="cuda", dtype=bf)
    w1, w2 = random_(E, D, 2 * F) * 0.02, random_(E, F, D) * 0.02
    *made1, _ = f.fp8_weights(w1, True, True, False)
    *made2, _ = f.fp8_weights(w2, True, True, False)
    factors1 = f.fp8_weights(w1, False, True, False)[4]
    rows = lambda *s: fp8.quantized(random_(*s), True)
    X, A, dY, dH, tokens = rows(R, D), rows(R, F), rows(R, D), rows(R, 2 * F), rows(T, D)
    grid = torch.cuda.get_device_properties(0).multi_processor_count
    runs, P = {}, R + 128 * E
    new1, new2 = ([torch.zeros_like(t) for t in made] for made in (made1, made2))
    work, live = row_tiles(ends, R, 128), int(((ends.diff(prepend=ends.new_zeros(1)) + 127) // 128).sum())
    def turned(*sources):
        made = [fp8._columns_like(*s[:2], ends, R, False)[:2] for s in sources]
        want = [fp8.fp8_columns(*s, ends, R, K if s[2] is not None else 1, False)[:2] for s in sources]
        pairs_ = [(a[..., : live * 128 if i == 0 else live], b[..., : live * 128 if i == 0 else live]) for one, two in zip(made, want) for i, (a, b) in enumerate(zip(one, two))]
        return Turning([*sources], made, K), pairs_
    W1 = Quantizing(w1, new1[0], None, None, None, factors1, False), [(new1[0], made1[0])]
    places = {
        "X W1 + W2 both": (X, made1[2:], (Quantizing(w2, *new2, None, False), list(zip(new2, made2)))),
        "X W1 + W1 lying": (X, made1[2:], W1),
        "A W2 + W1 lying": (A, made2[2:], W1),
        "dY W2' + columns of dY": (dY, made2[:2], turned((*dY, None))),
        "dH W1' + columns of dH": (dH, made1[:2], turned((*dH, None))),
        "dH W1' + columns of dH, A, X": (dH, made1[:2], turned((*dH, None), (*A, None), (*tokens, pairs))),
    }
    for place, (x, (w, ws), (beside, checked)) in places.items():
        N = w.shape[1]
        v = row_variant("fp8", N)
        out = torch.full((R, N), float("nan"), device="cuda", dtype=bf)
        got = torch.full_like(out, float("nan"))
        base = m.fp8_rows_launch(v, x.codes, x.scales, w, ws, out, work, grid)
        go = m.fp8_rows_launch(v, x.codes, x.scales, w, ws, got, work, grid, beside)
        for mine, _ in checked: bits(mine).fill_(7)
        base.run(); go.run(); torch.cuda.synchronize()
        same = [torch.equal(bits(a), bits(c)) for a, c in checked]
        print(f"{label} {name} {place}: product same {torch.equal(got, out)}, codes same {same}", flush=True)
        runs[place.split(" + ")[0] + " alone"], runs[place] = base.run, go.run
        if isinstance(beside, Quantizing):
            args = list(go.args)
            args[-2] = args[-2]._replace(blocks=0)
            idle = type(go)(go.kernel, go.grid, tuple(args), go.options)
            idle.run()
            runs[place + ", warps idle"] = idle.run
    for which, w in (("W1", w1), ("W2", w2)):
        runs[f"codes of {which}, both"] = lambda w=w: f.fp8_weights(w, True, True, False)
        runs[f"codes of {which}, transposed"] = lambda w=w: f.fp8_weights(w, False, True, False)
    for which, s in (("dY", (*dY, None)), ("dH", (*dH, None)), ("A", (*A, None)), ("X", (*tokens, pairs))):
        runs[f"columns of {which}"] = lambda s=s: fp8.fp8_columns(*s, ends, R, K if s[2] is not None else 1, False)
    runs["rows of dY"] = lambda g=random_(T, D): f.fp8_spread(g, order.inverse_R.view(T, K), R, False, False, True)
    runs["rows and columns of dY"] = lambda: fp8.spread_columns(tokens, pairs, order.inverse_R.view(T, K), ends, with_rows=True)
    return runs

def measure(name, runs):
    spent, order = {k: [] for k in runs}, list(runs)
    for _ in range(5):
        random.shuffle(order)
        for k in order: spent[k].append(timed(runs[k], 10))
    for k in runs: print(f"{label:22s} {name:8s} {sorted(spent[k])[2]:8.1f} us ({min(spent[k]):.1f} to {max(spent[k]):.1f})  {k}", flush=True)

for name in cases.split(","):
    runs = case(name)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        measure(name, runs)
    del runs; torch.cuda.empty_cache()
