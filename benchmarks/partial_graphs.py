"""Time, host time, GPU idle share and memory of a training step, eager and with partial graphs.

    python benchmarks/partial_graphs.py --out benchmarks/results/partial_graphs_h200.jsonl

Two models, one where kernel launches are the limit and one where the GPU is. For each: a bitwise
gate, then all contenders side by side in shuffled rounds; and last each contender by itself, for
its memory and a trace. `README.md` beside this says what the columns mean and what to beware of.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import environment
import measure
from contenders import Contender, Run, Setting, contenders, free_memory, settings, tiny

Row = dict[str, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON lines, one per model and contender")
    parser.add_argument("--json", action="store_true", help="last line of stdout: all as JSON")
    parser.add_argument("--models", default=",".join(settings()), help="comma-separated")
    parser.add_argument("--dispatcher", default="local", help="local, padded or all_to_all")
    parser.add_argument("--compile", action="store_true", help="also torch.compile (cudagraphs)")
    parser.add_argument("--compile-limit", type=float, default=120.0, help="seconds per build")
    parser.add_argument("--rounds", type=int, help="instead of each model's own")
    parser.add_argument("--commit", help="for the stamp, where there is no .git")
    parser.add_argument("--device", help="default: cuda if there is a GPU")
    parser.add_argument("--tiny", action="store_true", help="small models, to test this on a CPU")
    options = parser.parse_args(arguments)
    unknown = set(options.models.split(",")) - set(settings())
    if unknown:
        parser.error(f"--models: {sorted(unknown)} unknown: choose from {list(settings())}")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} must be at least 1")
    options.device = torch.device(
        options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    if options.device.type != "cuda" and not options.tiny:
        parser.error("this needs a CUDA device: --tiny runs small models on the CPU, as a test")
    return options


class Benchmark:
    """Fills one row per model and contender, phase by phase, and saves after each of them."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.device = options.device
        self.environment = environment.stamp(options.commit)
        self.contenders = contenders(options.compile)
        self.settings = [self._setting(name) for name in options.models.split(",")]
        self.rows = {
            s.name: {c.name: self._row(s, c) for c in self.contenders} for s in self.settings
        }
        self._started = time.perf_counter()

    def run(self) -> list[Row]:
        for setting in self.settings:
            self._gate(setting)
            self._time(setting)
            self.save()
        # Last, and by themselves: once the profiler has been attached, launches may be slower.
        for setting in self.settings:
            self._alone(setting)
            self.save()
        return self.all_rows()

    def all_rows(self) -> list[Row]:
        return [row for rows in self.rows.values() for row in rows.values()]

    def save(self) -> None:
        if self.options.out is not None:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row) for row in self.all_rows()]
            self.options.out.write_text("\n".join(lines) + "\n")

    def _setting(self, name: str) -> Setting:
        setting = settings()[name]
        changes = {} if self.options.rounds is None else {"rounds": self.options.rounds}
        setting = tiny(setting, self.device) if self.options.tiny else setting
        return Setting(**{**vars(setting), **changes})

    def _row(self, setting: Setting, contender: Contender) -> Row:
        return {
            "benchmark": "partial_graphs",
            "model": setting.name,
            "setting": setting.describe(),
            "tokens": setting.tokens,
            "dispatcher": self.options.dispatcher,
            "contender": contender.name,
            "error": None,
            "gate": None,
            "environment": self.environment,
        }

    def _gate(self, setting: Setting) -> None:
        """Eager's first losses are the reference, for a second eager run as for the others."""
        rows = self.rows[setting.name]
        eager = self.contenders[0]
        arguments = setting, eager, self.options.dispatcher, self.device
        reference, error = measure.attempt(measure.first_losses, *arguments)
        if reference is None:
            for row in rows.values():
                row["error"] = f"no reference: eager: {error}"
            return
        for contender in self.contenders:
            self._note(f"{setting.name}: gate of {contender.name}")
            arguments = setting, contender, self.options.dispatcher, self.device
            losses, error = self._attempt(contender, measure.first_losses, *arguments)
            free_memory(self.device)
            row = rows[contender.name]
            row["error"] = error
            if losses is not None:
                gate = measure.judge(contender, losses, reference)
                row["gate"] = asdict(gate)
                row["error"] = None if gate.passed else f"gate: {gate.message}"

    def _time(self, setting: Setting) -> None:
        rows, runs = self.rows[setting.name], {}
        for contender in self._good(setting):
            self._note(f"{setting.name}: building {contender.name}")
            run, error = self._attempt(contender, self._warm_run, setting, contender)
            free_memory(self.device)
            rows[contender.name]["error"] = error
            if run is not None:
                runs[contender.name] = run
        if self.contenders[0].name in runs:
            self._note(f"{setting.name}: timing {len(runs)} contenders side by side")
            self._fill_timings(rows, measure.time_together(setting, list(runs), runs))
        else:
            for row in rows.values():
                row["error"] = row["error"] or "eager failed, nothing to compare with"
        for run in runs.values():
            run.release()

    def _fill_timings(self, rows: dict[str, Row], timings: dict[str, Any]) -> None:
        noise = timings.pop(measure.REPEATED)
        rows[self.contenders[0].name]["repeat"] = (
            None if isinstance(noise, str) else asdict(noise)["speedup"]
        )
        for name, timing in timings.items():
            failed = isinstance(timing, str)
            rows[name].update({"error": timing} if failed else asdict(timing))

    def _alone(self, setting: Setting) -> None:
        for contender in self._good(setting):
            self._note(f"{setting.name}: memory and trace of {contender.name}")
            arguments = setting, contender, self.options.dispatcher, self.device
            alone, error = self._attempt(contender, measure.measure_alone, *arguments)
            row = self.rows[setting.name][contender.name]
            row["error"] = error
            if alone is not None:
                row.update(asdict(alone))
                row.update(_idle(row))

    def _good(self, setting: Setting) -> list[Contender]:
        """Those that passed the gate and have not failed since."""
        rows = self.rows[setting.name]
        return [c for c in self.contenders if rows[c.name]["gate"] and not rows[c.name]["error"]]

    def _warm_run(self, setting: Setting, contender: Contender) -> Run:
        run = Run(setting, contender, self.options.dispatcher, self.device)
        try:
            run.warm_up()
        except BaseException:
            run.release()
            raise
        return run

    def _attempt(self, contender: Contender, action: Callable, *arguments: Any) -> tuple:
        if not contender.compiled:
            return measure.attempt(action, *arguments)

        def limited() -> Any:
            with measure.time_limit(self.options.compile_limit):
                return action(*arguments)

        return measure.attempt(limited)

    def _note(self, text: str) -> None:
        self.console.print(f"[dim]{time.perf_counter() - self._started:6.1f} s[/]  {text}")


def _idle(row: Row) -> Row:
    """Idle shares with the busy time of the trace, but the whole from runs without a profiler.

    Not clamped: a little under zero says how well the two agree.
    """
    timeline, replay = row["timeline"], row["graph_replay_ms"]
    if timeline is None:
        return {"idle_share": None, "graph_idle_share_replayed": None}
    inside = None
    if timeline["graph_busy_ms"] is not None and replay:
        inside = 1 - timeline["graph_busy_ms"] / replay
    whole = 1 - timeline["busy_ms"] / row["step_ms"]["median"]
    return {"idle_share": whole, "graph_idle_share_replayed": inside}


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
    """What does not fit into columns: the gate, the error, the counters, the noise."""
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
    # The profiler must not tear CUPTI down between traces: graphs crash on its second start. Read
    # when a trace starts; torch/profiler/profiler.py does the same for its own graphs.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    console = Console(stderr=options.json, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = 200
    benchmark = Benchmark(options, console)
    rows = benchmark.run()
    for setting in benchmark.settings:
        console.print(table([row for row in rows if row["model"] == setting.name]))
    console.print(environment.describe(benchmark.environment))
    if options.json:
        print(json.dumps({"benchmark": "partial_graphs", "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
