"""The table GPU architecture x kernels: shared memory, spills, and where a kernel has run.

PYTHONPATH=. python tests/support/architecture_table.py           # compiles all, writes the page
PYTHONPATH=. python tests/support/architecture_table.py 90 120    # two architectures of it

The page is written from lines, one for each Triton and architecture; a new run replaces its own.
No GPU is needed. A run takes some 20 minutes of one core for each Triton.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import triton

from compiled import launch_compiler
from kernel_cases import kernel_cases
from moe_graphs.kernels.gpu_architectures import TABLE

ROOT = Path(__file__).resolve().parents[2]
LINES = ROOT / "docs" / "development" / "architectures.jsonl"
PAGE = LINES.with_suffix(".md")
HEAD = """# Kernels on seven GPU architectures

Every kernel is compiled ahead of time for every architecture in the table of
`moe_graphs/kernels/gpu_architectures.py`. `tests/kernels/test_architectures.py` holds that each
fits into a block's shared memory and spills at most 96 bytes.
`PYTHONPATH=. python tests/support/architecture_table.py` compiles them without a GPU, and writes
this page from [architectures.jsonl](architectures.jsonl).

**Only sm_90 has run.** All other architectures compile and fit; nothing was ever run or measured
there. An architecture without a row (sm_87, sm_110, sm_121) gets the portable kernels in tiles that
fit every row, with a warning and a count in `graphs.report().portable_launches`. A GPU older than
sm_80 is refused by name before a launch.

With the newest Triton only those kernels were compiled that come nearest to a limit. A cell is the
largest shared memory of a block in bytes, and behind it the bytes of registers that were spilled,
if any. `AxBxC, S stages, W warps` is the tile of the grouped GEMM: rows, columns, step of the sum.
"""


def compiled_lines(numbers: list[int]) -> dict[tuple[str, int], dict[str, list[int]]]:
    """Compile every case for these architectures: (Triton, architecture) -> case -> numbers."""
    compiled = launch_compiler(pytest.MonkeyPatch())
    found = {}
    for number in numbers:
        cells = {}
        for case, call in kernel_cases().items():
            kernels = compiled(call, arch=number)
            most = [max((getattr(k, n) for k in kernels), default=0) for n in ("shared", "spills")]
            cells[case] = [len(kernels), *most]
            print(f"sm_{number} {case}: {cells[case]}", flush=True)
        found[triton.__version__, number] = cells
    return found


def read_lines() -> dict[tuple[str, int], dict[str, list[int]]]:
    lines = LINES.read_text().splitlines() if LINES.exists() else []
    read = [json.loads(line) for line in lines]
    return {(line["triton"], line["architecture"]): line["cases"] for line in read}


def write_lines(found: dict[tuple[str, int], dict[str, list[int]]]) -> None:
    LINES.write_text(
        "".join(
            json.dumps({"triton": version, "architecture": number, "cases": cells}) + "\n"
            for (version, number), cells in sorted(found.items())
        )
    )


def page(found: dict[tuple[str, int], dict[str, list[int]]]) -> str:
    """The page for these lines."""
    versions = sorted({version for version, _ in found})
    text = HEAD + _overview(found, versions)
    for version in versions:
        numbers = [number for number in TABLE if (version, number) in found]
        rows = [["kernel", *(f"sm_{number}" for number in numbers)]]
        for case in kernel_cases():
            cells = [found[version, number].get(case) for number in numbers]
            if any(cells):
                rows.append([case, *map(_cell, cells)])
        text += f"\n## Triton {version}\n\n{_table(rows)}"
    return text


def _overview(found: dict[tuple[str, int], dict[str, list[int]]], versions: list[str]) -> str:
    head = ["architecture", "GPUs", "a block may use", "grouped GEMM", "its tile", "where it ran"]
    rows = [[*head, *(f"most used, Triton {version}" for version in versions)]]
    for number, gpu in TABLE.items():
        t = gpu.tile
        tile = "by shape (`gemm/heuristics.py`)"
        if t is not None:
            tile = f"{t.block_m}x{t.block_n}x{t.block_k}, {t.stages} stages, {t.warps} warps"
        most = [_most(found.get((version, number))) for version in versions]
        ran = gpu.gpus.replace(", ", " and ") if gpu.ran else "compiles, never run"
        rows.append([gpu.name, gpu.gpus, f"{gpu.shared:,}", gpu.gemms[0], tile, ran, *most])
    return f"\n{_table(rows)}"


def _most(cells: dict[str, list[int]] | None) -> str:
    if cells is None:
        return "not compiled"
    shared, spills = (max(cell[i] for cell in cells.values()) for i in (1, 2))
    return f"{shared:,}" + (f", {spills} spilled" if spills else "")


def _cell(cell: list[int] | None) -> str:
    if cell is None:
        return "not compiled"
    if not cell[0]:
        return "no kernel"
    return f"{cell[1]:,}" + (f", {cell[2]} spilled" if cell[2] else "")


def _table(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |\n" for row in rows]
    return head + "|---" * len(rows[0]) + "|\n" + "".join(body)


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:]] or list(TABLE)
    lines = read_lines() | compiled_lines(numbers)
    write_lines(lines)
    PAGE.write_text(page(lines))
