"""A training step of one model by every library that trains it, side by side on one machine.

    python benchmarks/peers.py --smoke --parallel 6  # does each contender start?
    python benchmarks/peers.py --rounds 2 --out benchmarks/results/peers_h200.jsonl

Same weights, same tokens, no auxiliary loss, bf16 parameters, torch's fused AdamW (a row says so
where it is ours), `zero_grad(set_to_none=True)`. Every contender has a process of its own and a
time limit: one that fails leaves a line with its error, and the others go on. With `--rounds 2`
the list is gone through forwards, then backwards. Weights are such that experts are chosen evenly,
with `--routing zipf` by Zipf's law, the same for every contender, and AdamW's rate is zero, so that
they stay so; `--routing untrained` leaves weights as they are drawn, and trains. `load` in a line
is the fullest expert's number of tokens over the mean.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import environment
from peer_models import worker
from peer_models.cases import ROUTINGS, Case, cases
from peer_models.entries import ENTRIES
from peer_models.lines import line, table

Record = dict[str, Any]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = list(cases())
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--cases", default=known[0], help=f"comma-separated: {', '.join(known)}")
    made.add_argument("--routing", default="even", help=f"comma-separated: {', '.join(ROUTINGS)}")
    made.add_argument("--contenders", default="*", help="comma-separated names, * and ? allowed")
    made.add_argument("--rounds", type=int, default=1, help="forwards, backwards, forwards, ...")
    made.add_argument("--time-limit", type=float, default=120.0, help="seconds per process")
    made.add_argument("--total-limit", type=float, help="nothing starts after so many seconds")
    made.add_argument(
        "--parallel",
        type=int,
        default=1,
        help="processes at once; without --smoke one computes and the others import ahead",
    )
    made.add_argument(
        "--compiling",
        type=int,
        default=worker.COMPILING,
        help="processes that compile their library's kernels at once, before they are ready",
    )
    made.add_argument(
        "--ready-limit",
        type=float,
        default=260.0,
        help="seconds that the first turn waits for imports and compilers of the others",
    )
    made.add_argument("--smoke", action="store_true", help="tiny sizes, few steps")
    made.add_argument("--no-trace", action="store_true", help="no GPU busy time; saves seconds")
    made.add_argument("--out", type=Path, help="JSON lines are appended here")
    made.add_argument("--json", action="store_true", help="last line of stdout: all as JSON")
    made.add_argument("--list", action="store_true", help="names of the contenders, then stop")
    made.add_argument("--device", help="default: cuda if there is a GPU")
    made.add_argument("--commit", help="for the stamp, where there is no .git")
    made.add_argument("--worker", nargs=2, metavar=("NAME", "RECORD"), help=argparse.SUPPRESS)
    made.add_argument("--gate", type=Path, help="file that one process at a time locks to compute")
    options = made.parse_args(arguments)
    unknown = set(options.cases.split(",")) - set(known)
    if unknown:
        made.error(f"--cases: {sorted(unknown)} unknown: choose from {known}")
    unknown = set(options.routing.split(",")) - set(ROUTINGS)
    if unknown:
        made.error(f"--routing: {sorted(unknown)} unknown: choose from {list(ROUTINGS)}")
    patterns = options.contenders.split(",")
    unmatched = [p for p in patterns if not fnmatch.filter(ENTRIES, p)]
    if unmatched:
        made.error(f"--contenders: {unmatched} match none of {list(ENTRIES)}")
    options.names = [n for n in ENTRIES if any(fnmatch.fnmatch(n, p) for p in patterns)]
    if min(options.rounds, options.parallel, options.compiling) < 1:
        made.error("--rounds, --parallel and --compiling must be at least 1")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cpu":
        if not options.smoke:
            made.error("this needs a CUDA device: --smoke runs small models on the CPU, as a test")
        options.names = [n for n in options.names if ENTRIES[n].runs_on_cpu]
    return options


def sized(name: str, routing: str, options: argparse.Namespace) -> Case:
    case = replace(cases()[name], routing=routing)
    return case.smoke(trace=False) if options.smoke else case.traced(not options.no_trace)


class Processes:
    """Runs contenders, each by itself, within their limits."""

    def __init__(self, options: argparse.Namespace, console: Console, folder: Path) -> None:
        self.options, self.console, self.folder = options, console, folder
        self.gate = options.gate or folder / "gate"
        self.started = time.perf_counter()

    def run_all(self, case: Case, done: Callable[[str, list[Record]], None]) -> None:
        """``done`` gets each name with what its processes have found, one after the other."""
        names, rounds = self.options.names, self.options.rounds
        order = [name for r in range(rounds) for name in (names if r % 2 == 0 else names[::-1])]
        found: dict[str, list[Record]] = {name: [] for name in names}
        with ThreadPoolExecutor(self.options.parallel) as pool:
            # Whoever gives a gate keeps it locked until all processes that it starts are ready.
            gate = None if self.options.gate else worker.take_turn(self.gate)
            running = {pool.submit(self.run, name, case): name for name in order}
            if gate is not None:
                self._wait_for_imports(running)
                gate.close()
            for process in as_completed(running):
                name = running[process]
                found[name].append(process.result())
                if len(found[name]) == rounds:
                    done(name, found[name])

    def _wait_for_imports(self, running: Collection[Future]) -> None:
        """Wait for processes that start at once; their imports would disturb host times."""
        first = min(self.options.parallel, len(running))
        deadline = time.monotonic() + self.options.ready_limit
        while time.monotonic() < deadline:
            ended = sum(process.done() for process in running)
            if ended + len(list(self.folder.glob(f"*/*{worker.IMPORTED}"))) >= first:
                return
            time.sleep(0.05)

    def run(self, name: str, case: Case) -> Record:
        begun = time.perf_counter()
        if self._is_over():
            return {"error": self._not_started}
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            record = self._run_in(Path(folder), name, case)
        seconds = time.perf_counter() - begun
        last = (record["error"] or "ok").splitlines()[-1]
        self.console.print(
            f"[dim]{seconds:6.1f} s[/]  {case.name}, {case.routing}: {name}: {last}", markup=True
        )
        return record | {"process_s": seconds}

    def _is_over(self) -> bool:
        limit = self.options.total_limit
        return limit is not None and time.perf_counter() - self.started > limit

    @property
    def _not_started(self) -> str:
        return f"not started: --total-limit of {self.options.total_limit} s had passed"

    def _run_in(self, folder: Path, name: str, case: Case) -> Record:
        record, output = folder / "record.json", folder / "output.txt"
        with output.open("w") as text:
            process = subprocess.Popen(
                self._command(name, case, record),
                stdout=text,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what it starts itself, as compilers, ends with it
            )
            timed_out = not self._ended(process, worker.started_file(record))
            if timed_out:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if record.exists():
            return json.loads(record.read_text())
        said = worker.last_lines(output.read_text(errors="replace"))
        why = f"exit status {process.returncode}"
        if timed_out:
            waited = self._is_over() and not worker.started_file(record).exists()
            took = f"took more than {self.options.time_limit:g} s"
            why = self._not_started if waited else took
        return {"error": f"{said}\n{why}"}

    def _command(self, name: str, case: Case, record: Path) -> list[str]:
        options = self.options
        command = [sys.executable, __file__, "--cases", case.name, "--routing", case.routing]
        command += ["--device", options.device]
        command += ["--smoke"] * options.smoke + ["--no-trace"] * options.no_trace
        if not options.smoke:
            command += ["--gate", str(self.gate), "--compiling", str(options.compiling)]
        return [*command, "--worker", name, str(record)]

    def _ended(self, process: subprocess.Popen, started: Path) -> bool:
        """Whether it does within its limit, which those that wait their turn have before, too."""
        limit, parallel = self.options.time_limit, self.options.parallel
        waits = self.options.ready_limit + limit * parallel
        deadline, counting = time.monotonic() + waits, False
        while process.poll() is None:
            if not counting and started.exists():
                deadline, counting = time.monotonic() + limit, True
            if time.monotonic() > deadline or (not counting and self._is_over()):
                return False
            time.sleep(0.05)
        return True


def compare(options: argparse.Namespace, console: Console, folder: Path) -> list[Record]:
    """All lines, case by case, printed and appended as they come."""
    stamp = environment.stamp(options.commit)
    processes, lines = Processes(options, console, folder), []
    for name, routing in product(options.cases.split(","), options.routing.split(",")):
        case, made = sized(name, routing, options), []

        def keep(contender: str, found: list[Record], case: Case = case, made: list = made) -> None:
            made.append(line(contender, case, found, stamp))
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(made[-1]) + "\n")

        processes.run_all(case, keep)
        made.sort(key=lambda each: options.names.index(each["contender"]))
        console.print(table(case, made))
        lines += made
    console.print(environment.describe(stamp))
    return lines


def work(options: argparse.Namespace) -> None:
    """Measure one contender, in a process of its own."""
    name, record = options.worker
    worker.prepare()
    case, device = sized(options.cases, options.routing, options), torch.device(options.device)
    worker.write_record(name, case, device, Path(record), options.gate, options.compiling)
    sys.stdout.flush()
    os._exit(0)  # graphs that hold a process group of NCCL's may hang when they are torn down


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.list:
        print("\n".join(f"{name:28}{entry.title}" for name, entry in ENTRIES.items()))
        return
    if options.worker:
        work(options)
        return
    console = Console(stderr=options.json, highlight=False)
    if not console.is_terminal:
        console.width = 200
    with tempfile.TemporaryDirectory() as folder:
        lines = compare(options, console, Path(folder))
    if options.json:
        print(json.dumps({"benchmark": "peers", "lines": lines}))


if __name__ == "__main__":
    sys.exit(main())
