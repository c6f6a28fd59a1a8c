import sys

sys.path.insert(0, "benchmarks")
import torch
from ops_check import microseconds, top_k_ids, torch_route
from moe_graphs.kernels.routing_triton import sort_pairs

for T, K in [(2048, 8), (16384, 8), (65536, 8)]:
    cells = []
    for E in (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024):
        ids = top_k_ids(T, K, E)
        cells.append(
            f"E={E} {microseconds(lambda: sort_pairs(ids, E)):.1f}/{microseconds(lambda: torch_route(ids, E)):.1f}"
        )
    print(f"route T={T} K={K} ours/torch us:", " ".join(cells), flush=True)
