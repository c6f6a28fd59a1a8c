"""Real runs of `moe-graphs train`, several at once: what was learned, and in which time.

    lines=benchmarks/results/real_runs_h200.jsonl
    python benchmarks/real_runs.py --set small --gpus 0,1 --out $lines
    python benchmarks/real_runs.py --set optimizers --gpus 0,1 --jobs 13 --out $lines
    python benchmarks/plot_real_runs.py $lines

`small` trains the preset of that name with everything off and with everything on, from one seed,
each run alone on a GPU; `optimizers` trains `tiny` with every optimizer from five seeds; `fp8`
trains `small` from four seeds with experts in bf16 and in FP8 (on more text than Python's library:
`installed_text.py` and ``--train "--data FILE"``), and the table says how far the held-out loss of
a seed is from that in bf16, with the 95 % interval. Several runs on a GPU (``--jobs``) learn what
each would alone, but their seconds mean nothing. A run that fails, or is cut off after
``--seconds``, leaves a line with its error, and a file with all it printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.table import Table

import environment
from moe_graphs import registry
from moe_graphs.terminal import make_console
from timed_replays import NotReplayed, check_replayed

TRAIN = (sys.executable, "-m", "moe_graphs", "train")
TARGET = 0.85  # held-out bits per byte
# Quantiles of Student's distribution at 97.5 %, for 1 to 7 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
POINTS = 120  # of a stored curve of the training loss, at most
WHOLE = "--impl full_iteration --optimizer-in-graph"
BF16 = "--dtype bfloat16 --stochastic-rounding"  # parameters, gradients and, as they are, states
OFF, BASE = "everything off", "bf16"
SETS: Mapping[str, Mapping[str, str]] = {
    "small": {
        OFF: "--impl none --optimizer torch_adamw --no-deterministic",
        "everything on": f"{WHOLE} --optimizer adamw {BF16} --no-deterministic",
        "everything on, fp32 parameters": f"{WHOLE} --optimizer adamw --no-deterministic",
    },
    "optimizers": {
        "torch's AdamW": f"{WHOLE} --optimizer torch_adamw",
        "our AdamW": f"{WHOLE} --optimizer adamw",
        "our AdamW, bf16": f"{WHOLE} --optimizer adamw --optimizer-state bfloat16 {BF16}",
        "our AdamW, states of 8 bits": f"{WHOLE} --optimizer adamw --optimizer-state 8bit",
        "Muon": f"{WHOLE} --optimizer muon",
    },
    "fp8": {
        BASE: f"{WHOLE} {BF16} --no-deterministic",
        "experts in FP8": f"{WHOLE} {BF16} --no-deterministic --precision fp8",
    },
}
PRESETS = {"small": "small", "optimizers": "tiny", "fp8": "small"}
SEEDS = {"small": (0,), "optimizers": (0, 1, 2, 3, 4), "fp8": (0, 1, 2, 3)}
SMOKE = "--steps 5 --batch-size 2 --sequence-length 32 --warmup-steps 2"

# What `train` prints, of which the log has no time, and no evaluation.
STEP = re.compile(r"step: +(\d+) ")
HELD_OUT = re.compile(r"held out: ([\d.]+) bits per byte \(sample")
ENDED = re.compile(r"evaluating \w+ weights on all held-out")

Row = dict[str, Any]
Heard = list[tuple[float, str]]  # lines, each with the time when it came


@dataclass(frozen=True)
class Planned:
    """A run; ``options`` are those of the variant."""

    set: str
    preset: str
    variant: str
    seed: int
    options: str

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "_", f"{self.set} {self.variant} {self.seed}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--set", choices=SETS, required=True)
    made.add_argument("--variants", default="", help="some of a set's, between semicolons")
    made.add_argument("--seeds", default="", help="with commas between; default: the set's")
    made.add_argument("--steps", type=int, help="default: the preset's")
    made.add_argument("--train", default="", help="more options of moe-graphs train, in quotes")
    made.add_argument("--gpus", default="", help="with commas between; default: as it comes")
    made.add_argument("--jobs", type=int, default=1, help="runs at once, on each GPU")
    made.add_argument("--seconds", type=float, default=3600, help="then what still runs is ended")
    made.add_argument("--folder", type=Path, help="of the runs, new; default: a temporary one")
    made.add_argument("--out", type=Path, help="lines are added to this file")
    made.add_argument("--smoke", action="store_true", help="two variants and seeds, on the CPU")
    made.add_argument("--commit", help="for the stamp, where there is no .git")
    options = made.parse_args(arguments)
    every = list(SETS[options.set])
    options.variants = [name.strip() for name in options.variants.split(";") if name.strip()]
    options.variants = options.variants or (every[:2] if options.smoke else every)
    if unknown := sorted(set(options.variants) - set(every)):
        made.error(f"--variants: {unknown} are none of {'; '.join(every)}")
    try:
        options.seeds = [int(seed) for seed in options.seeds.split(",") if seed]
    except ValueError:
        made.error(f"--seeds: {options.seeds!r} are no whole numbers with commas between")
    options.seeds = options.seeds or ([0, 1] if options.smoke else SEEDS[options.set])
    options.gpus = [gpu.strip() for gpu in options.gpus.split(",") if gpu.strip()] or [None]
    if options.jobs < 1 or not options.seconds > 0:
        made.error(f"--jobs {options.jobs}, --seconds {options.seconds:g}: must be above 0")
    return options


def plan(options: argparse.Namespace) -> list[Planned]:
    """All variants of the first seed before the second one: what time cuts off is whole seeds."""
    preset = "tiny" if options.smoke else PRESETS[options.set]
    return [
        Planned(options.set, preset, variant, seed, SETS[options.set][variant])
        for seed, variant in itertools.product(options.seeds, options.variants)
    ]


def more_options(options: argparse.Namespace, folder: Path) -> list[str]:
    """Options of `train` that every run has."""
    more = [] if options.steps is None else ["--steps", str(options.steps)]
    if options.smoke:
        text = folder / "text"
        text.mkdir()
        (text / "a.txt").write_text("Every token goes to two of four experts.\n" * 40)
        (text / "b.txt").write_text("A graph is captured once and replayed often.\n" * 40)
        more = [*shlex.split(SMOKE), *more, "--data", str(text), "--device", "cpu"]
    return [*more, *shlex.split(options.train)]


def measure(run: Planned, more: Sequence[str], gpu: str | None, folder: Path, end: float) -> Row:
    """A run in a process of its own, on ``gpu``, ended when ``time.monotonic()`` is ``end``."""
    started = time.monotonic()
    out = folder / run.name
    given = ["--preset", run.preset, *shlex.split(run.options), "--seed", str(run.seed), *more]
    row: Row = {"benchmark": "real_runs", "set": run.set, "model": run.preset}
    row |= {"contender": run.variant, "seed": run.seed, "options": given, "error": None}
    if started >= end:
        return row | {"error": "not started: --seconds are over"}
    code, heard = listen([*TRAIN, *given, "--no-save", "--out", str(out)], gpu, end)
    out.with_suffix(".txt").write_text("".join(text for _, text in heard))
    row["process_seconds"] = time.monotonic() - started
    if code:
        last = " | ".join(text.strip() for _, text in heard[-8:])
        late = "ended as --seconds are over; " if time.monotonic() >= end else ""
        return row | {"error": f"{late}exit status {code}: {last}"}
    try:
        row |= collect(out, heard, registry.PRESETS[run.preset]().evaluate_every)
        check_replayed(None if row["report"] is None else SimpleNamespace(**row["report"]))
    except (NotReplayed, ValueError) as error:
        row["error"] = str(error)  # beside what it has measured
    return row


def listen(command: Sequence[str], gpu: str | None, end: float) -> tuple[int, Heard]:
    """The exit status, and what was printed."""
    device = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"} | device,
    )
    alarm = threading.Timer(max(0.0, end - time.monotonic()), process.kill)
    alarm.start()
    try:
        with process:
            heard = [(time.monotonic(), text) for text in process.stdout or ()]
    finally:
        alarm.cancel()
    return process.returncode, heard


def collect(out: Path, heard: Heard, evaluate_every: int) -> Row:
    """Row of a run that ended well, from its files in ``out`` and its output.

    Seconds are since its first step began; compiling, capturing and earlier evaluations count.
    Held-out points but for the last one are of a sample of the text, as `train` evaluates while it
    goes on. The training loss is in nats per byte, of single steps.

    Raises:
        ValueError: it printed no other time or held-out loss where there should be one.
    """
    summary = json.loads((out / "summary.json").read_text())
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    ended = next((at for at, text in heard if ENDED.match(text)), None)
    if ended is None:
        raise ValueError("nothing printed says when training ended")
    seconds: dict[int, float] = {}
    held_out, step = [], 0
    for at, text in heard:
        if found := STEP.match(text):
            step = int(found[1])
            seconds[step] = at - ended + summary["seconds"]
        elif found := HELD_OUT.match(text):
            held_out.append([step, seconds[step], float(found[1])])
    expected = list(range(evaluate_every, summary["steps"], evaluate_every))
    if [point[0] for point in held_out] != expected or set(seconds) != {x["step"] for x in log}:
        raise ValueError(f"{expected} should have been evaluated, and all that was logged printed")
    held_out.append([summary["steps"], summary["seconds"], summary["held_out_bits_per_byte"]])
    every = -(-len(log) // POINTS)
    row = {key: summary[key] for key in ("steps", "held_out_bits_per_byte", "seconds", "report")}
    return row | {
        "parameters": summary["parameters"],
        "tokens_per_second": summary["tokens_per_second"],
        "held_out_curve": held_out,
        "train_curve": [[x["step"], seconds[x["step"]], x["loss"]] for x in log[::every]],
        "target": TARGET,
        "seconds_to_target": seconds_to(TARGET, held_out),
        "memory": log[-1]["memory"],
    }


def seconds_to(target: float, curve: Sequence[Sequence[float]]) -> float | None:
    """Seconds until ``curve`` first goes down to ``target``; None if never, or from the start.

    The curve is linear between its points ``(step, seconds, bits per byte)``.
    """
    for (_, early, high), (_, late, low) in itertools.pairwise(curve):
        if high > target >= low:
            return early + (late - early) * (high - target) / (high - low)
    return None


def run_all(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Rows, as the runs end."""
    end = time.monotonic() + options.seconds
    more = more_options(options, folder)
    places: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for gpu in options.gpus * options.jobs:
        places.put(gpu)

    def one(run: Planned) -> Row:
        gpu = places.get()
        try:
            return measure(run, more, gpu, folder, end) | {"jobs_per_gpu": options.jobs}
        finally:
            places.put(gpu)

    with ThreadPoolExecutor(len(options.gpus) * options.jobs) as pool:
        try:
            for future in as_completed([pool.submit(one, run) for run in plan(options)]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    some = f" +- {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{some}"


def apart(rows: Sequence[Row], others: Sequence[Row]) -> str:
    """Percent by which runs held out more than others from the same seeds, and its 95 % interval.

    The interval is Student's, of the differences.
    """
    bits = [{r["seed"]: r["held_out_bits_per_byte"] for r in some} for some in (rows, others)]
    found = [100 * (bits[0][seed] / bits[1][seed] - 1) for seed in bits[0].keys() & bits[1].keys()]
    if rows == others or not 2 <= len(found) <= len(STUDENT) + 1:
        return "-"
    half = STUDENT[len(found) - 2] * statistics.stdev(found) / len(found) ** 0.5
    return f"{statistics.mean(found):+.2f} +- {half:.2f} %"


def table(rows: Sequence[Row]) -> Table:
    made = Table("", "runs", "held out, bits per byte", f"from {BASE}", f"s to {TARGET}", "x",
                 "tokens/s", "GiB")  # fmt: skip
    base = [row for row in rows if row["contender"] == BASE and row["error"] is None]
    reference: float | None = None
    for variant in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == variant]
        good = [row for row in own if row["error"] is None]
        times = [row["seconds_to_target"] for row in good if row["seconds_to_target"] is not None]
        mean = statistics.mean(times) if len(times) == len(good) > 0 else None
        reference = mean if variant == OFF else reference
        ratio = f"{reference / mean:.2f}x" if reference and mean else "-"
        bits = spread([row["held_out_bits_per_byte"] for row in good], ".4f")
        rate = spread([row["tokens_per_second"] for row in good], ",.0f")
        memory = spread([row["memory"]["bytes"] / 2**30 for row in good], ".1f")
        counted = f"{len(good)} of {len(own)}"
        times_to = spread(times, ".1f")
        made.add_row(variant, counted, bits, apart(good, base), times_to, ratio, rate, memory)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    console = make_console(stderr=False)
    stamp, rows = environment.stamp(options.commit), []
    folder = options.folder or Path(tempfile.mkdtemp(prefix="real_runs_"))
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"runs and what they print: {folder}", markup=False)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    for row in run_all(options, folder):
        row |= {"environment": stamp}
        rows.append(row)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        said = row["error"] or f"{row['held_out_bits_per_byte']:.4f} bits per byte"
        taken = row.get("process_seconds", 0)
        console.print(
            f"{taken:6.1f} s  {row['contender']}, seed {row['seed']}: {said}", markup=False
        )
    order = list(SETS[options.set])
    console.print(table(sorted(rows, key=lambda row: order.index(row["contender"]))))
    console.print(environment.describe(stamp), markup=False)


if __name__ == "__main__":
    main()
