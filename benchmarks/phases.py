"""Phases of every benchmark of training steps: gate, time, memory and trace."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import environment
import measure
from contenders import Contender, Run, Setting, free_memory
from moe_graphs.profiling.profiler import keep_profiler_ready

Row = dict[str, Any]


def parser(description: str, models: Sequence[str]) -> argparse.ArgumentParser:
    """Parser with the options that all of these benchmarks have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, help="JSON lines, one per model and contender")
    made.add_argument("--json", action="store_true", help="last line of stdout: all as JSON")
    made.add_argument("--models", default=",".join(models), help="comma-separated")
    made.add_argument("--compile", action="store_true", help="also torch.compile (cudagraphs)")
    made.add_argument("--compile-limit", type=float, default=120.0, help="seconds per build")
    made.add_argument("--rounds", type=int, help="instead of each model's own")
    made.add_argument("--contenders", default="", help="expression: those besides eager")
    made.add_argument("--batch-size", type=int, help="sequences, instead of each model's own")
    made.add_argument("--commit", help="for the stamp, where there is no .git")
    made.add_argument("--device", help="default: cuda if there is a GPU")
    made.add_argument("--tiny", action="store_true", help="small models, to test this on a CPU")
    made.add_argument("--microbatches", type=int, help="batches of a step, accumulated")
    made.set_defaults(dispatcher="local")
    return made


def parse(
    made: argparse.ArgumentParser, models: Sequence[str], arguments: list[str] | None
) -> argparse.Namespace:
    options = made.parse_args(arguments)
    unknown = set(options.models.split(",")) - set(models)
    if unknown:
        made.error(f"--models: {sorted(unknown)} unknown: choose from {list(models)}")
    if options.rounds is not None and options.rounds < 1:
        made.error(f"--rounds: {options.rounds} must be at least 1")
    options.device = torch.device(
        options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    if options.device.type != "cuda" and not options.tiny:
        made.error("this needs a CUDA device: --tiny runs small models on the CPU, as a test")
    return options


def console_for(options: argparse.Namespace) -> Console:
    """Make a console, and set the variables that the profiler reads when a trace starts."""
    keep_profiler_ready()
    console = Console(stderr=options.json, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = 200
    return console


class Benchmark:
    """Fills one row per model and contender, phase by phase, and saves after each of them."""

    def __init__(
        self,
        name: str,
        plan: Sequence[tuple[Setting, list[Contender]]],
        options: argparse.Namespace,
        console: Console,
    ) -> None:
        self.name, self.options, self.console = name, options, console
        self.device = options.device
        self.environment = environment.stamp(options.commit)
        self.plan = [(self._sized(setting), self._chosen(found)) for setting, found in plan]
        self.rows = {s.name: {c.name: self._row(s, c) for c in cs} for s, cs in self.plan}
        self._references: dict[str, torch.Tensor] = {}
        self._started = time.perf_counter()

    def run(self) -> list[Row]:
        for setting, contenders in self.plan:
            self._gate(setting, contenders)
            self._time(setting, contenders)
            self.save()
        # Last, and by themselves: once the profiler has been attached, launches may be slower.
        # Compiled models have to be built again for it, which takes longest.
        for compiled in (False, True):
            for setting, contenders in self.plan:
                for contender in self._good(setting, contenders):
                    if contender.compiled is compiled:
                        self._alone(setting, contender)
                        self.save()
        return self.all_rows()

    def all_rows(self) -> list[Row]:
        return [row for rows in self.rows.values() for row in rows.values()]

    def save(self) -> None:
        if self.options.out is not None:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row) for row in self.all_rows()]
            self.options.out.write_text("\n".join(lines) + "\n")

    def _sized(self, setting: Setting) -> Setting:
        chosen = {n: getattr(self.options, n) for n in ("rounds", "batch_size", "microbatches")}
        changes = {name: value for name, value in chosen.items() if value is not None}
        if missing := [name for name in changes if not hasattr(setting, name)]:
            raise SystemExit(f"--{missing[0]}: the model {setting.name} has none")
        return replace(setting.tiny(self.device) if self.options.tiny else setting, **changes)

    def _chosen(self, contenders: list[Contender]) -> list[Contender]:
        first, *others = contenders
        return [first, *(c for c in others if re.search(self.options.contenders, c.name))]

    def _row(self, setting: Setting, contender: Contender) -> Row:
        return {
            "benchmark": self.name,
            "model": setting.name,
            "setting": setting.describe(),
            "tokens": setting.tokens,
            "dispatcher": self.options.dispatcher,
            "contender": contender.name,
            "error": None,
            "gate": None,
            "environment": self.environment,
        }

    def _gate(self, setting: Setting, contenders: list[Contender]) -> None:
        """Eager's first losses are the reference, for a second eager run as for the others.

        Compiled models are judged when they are built to be timed: building them takes long.
        """
        rows = self.rows[setting.name]
        arguments = contenders[0], self.options.dispatcher, self.device
        reference, error = measure.attempt(measure.first_losses, setting, *arguments)
        if reference is None:
            for row in rows.values():
                row["error"] = f"no reference: eager: {error}"
            return
        self._references[setting.name] = reference
        for contender in contenders:
            if contender.compiled:
                continue
            self._note(f"{setting.name}: gate of {contender.name}")
            arguments = contender, self.options.dispatcher, self.device
            losses, error = measure.attempt(measure.first_losses, setting, *arguments)
            free_memory(self.device)
            rows[contender.name]["error"] = error
            if losses is not None:
                self._judge(setting, contender, losses)

    def _judge(self, setting: Setting, contender: Contender, losses: torch.Tensor) -> None:
        row = self.rows[setting.name][contender.name]
        gate = measure.judge(contender, losses, self._references[setting.name])
        row["gate"] = asdict(gate)
        row["error"] = None if gate.passed else f"gate: {gate.message}"

    def _time(self, setting: Setting, contenders: list[Contender]) -> None:
        rows, runs = self.rows[setting.name], {}
        for contender in self._good(setting, contenders):
            self._note(f"{setting.name}: building {contender.name}")
            run, error = self._attempt(contender, self._warm_run, setting, contender)
            free_memory(self.device)
            row = rows[contender.name]
            row["error"] = row["error"] or error
            if row["error"] is None:
                runs[contender.name], row["load"] = run, run.load
            elif run is not None:
                run.release()
        if contenders[0].name in runs:
            self._note(f"{setting.name}: timing {len(runs)} contenders side by side")
            self._fill_timings(contenders, rows, measure.time_together(setting, list(runs), runs))
        else:
            for row in rows.values():
                row["error"] = row["error"] or "eager failed, nothing to compare with"
        for run in runs.values():
            run.release()

    def _fill_timings(
        self, contenders: list[Contender], rows: dict[str, Row], timings: dict[str, Any]
    ) -> None:
        noise = timings.pop(measure.REPEATED)
        rows[contenders[0].name]["repeat"] = (
            None if isinstance(noise, str) else asdict(noise)["speedup"]
        )
        for name, timing in timings.items():
            failed = isinstance(timing, str)
            rows[name].update({"error": timing} if failed else asdict(timing))

    def _alone(self, setting: Setting, contender: Contender) -> None:
        self._note(f"{setting.name}: memory and trace of {contender.name}")
        arguments = setting, contender, self.options.dispatcher, self.device
        alone, error = self._attempt(contender, measure.measure_alone, *arguments)
        row = self.rows[setting.name][contender.name]
        row["error"] = error
        if alone is not None:
            row.update(asdict(alone))
            row.update(_idle(row))

    def _good(self, setting: Setting, contenders: list[Contender]) -> list[Contender]:
        """Contenders that have not failed so far."""
        return [c for c in contenders if not self.rows[setting.name][c.name]["error"]]

    def _warm_run(self, setting: Setting, contender: Contender) -> Run:
        run = setting.run(contender, self.options.dispatcher, self.device)
        try:
            if contender.compiled:
                self._judge(setting, contender, measure.gate_losses(run))
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
