"""Time, host time, GPU idle share and memory of a training step, eager and with partial graphs.

    python benchmarks/partial_graphs.py --out benchmarks/results/partial_graphs_h200.jsonl

Two models, one where kernel launches are the limit and one where the GPU is. For each: a bitwise
gate, then all contenders side by side in shuffled rounds; and last each contender by itself, for
its memory and a trace. `README.md` beside this says what the columns mean and what to beware of.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich import box
from rich.table import Table

import environment
import phases
from contenders import EAGER, Contender, contenders, settings
from moe_graphs.registry import DISPATCHERS
from phases import Row


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    made = phases.parser(__doc__.splitlines()[0], list(settings()))
    made.add_argument("--scopes", help="compare only these with eager: attn,moe")
    made.add_argument("--dispatcher", default="local", help=DISPATCHERS.words())
    return phases.parse(made, list(settings()), arguments)


def table(rows: list[Row]) -> Table:
    """The rows of one model."""
    first = rows[0]
    title = f"{first['model']}: {first['setting']}, dispatcher {first['dispatcher']}"
    drawn = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    headings = (
        "contender", "step ms", "p10 to p90", "x eager", "p10 to p90", "host ms", "GPU busy ms",
        "idle", "in graphs", "replayed", "launches", "graphs", "reserved", "allocated", "capture s",
    )  # fmt: skip
    for heading in headings:
        drawn.add_column(heading, justify="left" if heading == "contender" else "right")
    for row in rows:
        drawn.add_row(row["contender"], *_cells(row))
    drawn.caption = "\n".join(_notes(row) for row in rows)
    return drawn


def _cells(row: Row) -> list[str]:
    step, speedup, host = (row.get(key) for key in ("step_ms", "speedup", "host_ms"))
    if step is None:
        return ["-"] * 14
    timeline = row.get("timeline") or {}
    return [
        f"{step['median']:.2f}",
        f"{step['p10']:.2f} to {step['p90']:.2f}",
        f"{speedup['median']:.3f}",
        f"{speedup['p10']:.3f} to {speedup['p90']:.3f}",
        f"{host['median']:.2f}",
        _number(timeline.get("busy_ms"), ".2f"),
        _number(row.get("idle_share"), ".1%"),
        _number(timeline.get("graph_idle_share"), ".1%"),
        _number(row.get("graph_idle_share_replayed"), ".1%"),
        _number(timeline.get("kernel_launches"), ",.0f"),
        _number(timeline.get("graph_launches"), ",.0f"),
        _gib(row.get("reserved_bytes")),
        _gib(row.get("max_allocated_bytes")),
        _number((row.get("graphs") or {}).get("capture_seconds"), ".2f"),
    ]


def _notes(row: Row) -> str:
    """Notes beside the columns: the gate, the error, the counters, the noise."""
    texts = [row["error"] or row["gate"]["message"]]
    graphs = row.get("graphs")
    if graphs:
        reasons = ", ".join(f"{count} {why}" for why, count in graphs["eager_calls"].items())
        texts.append(
            f"captured {graphs['captured']}, replayed {graphs['replayed']}, eager calls: "
            f"{reasons or 'none'}"
        )
    if row.get("repeat"):
        noise = row["repeat"]
        texts.append(f"eager over eager {noise['p10']:.3f} to {noise['p90']:.3f}")
    return f"{row['contender']}: {'; '.join(texts)}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f} GiB"


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    console = phases.console_for(options)
    compared = contenders(options.compile)
    if options.scopes is not None:
        compared = [EAGER, Contender(options.scopes, options.scopes)]
    plan = [(settings()[name], compared) for name in options.models.split(",")]
    benchmark = phases.Benchmark("partial_graphs", plan, options, console)
    show(benchmark.run(), benchmark)


def show(rows: list[Row], benchmark: phases.Benchmark) -> None:
    """A table per model, and with ``--json`` everything on the last line."""
    for name in benchmark.rows:
        benchmark.console.print(table([row for row in rows if row["model"] == name]))
    benchmark.console.print(environment.describe(benchmark.environment))
    if benchmark.options.json:
        print(json.dumps({"benchmark": benchmark.name, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
