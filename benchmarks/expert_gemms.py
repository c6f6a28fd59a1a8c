"""Grouped GEMM, measured into this folder's results: the command ``moe-graphs bench gemm``.

    python benchmarks/expert_gemms.py                            all models, within --budget seconds
    python benchmarks/expert_gemms.py --quick                    four models, one token count
    python benchmarks/expert_gemms.py --plot benchmarks/results/grouped_gemm_h200.png

JSON lines are appended to benchmarks/results/grouped_gemm_h200.jsonl unless --out says otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from moe_graphs.bench.command import bench_app  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "grouped_gemm_h200.jsonl"

if __name__ == "__main__":
    bench_app()(["gemm", "--out", str(RESULTS), *sys.argv[1:]])
