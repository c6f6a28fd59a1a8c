"""A run of `small` from its own checkpoint on text that it has not seen, beside one from the seed.

    python benchmarks/continued_runs.py --out benchmarks/results/continued_runs_h200.jsonl

`moe-graphs train` trains `small` on Python's library, `export` writes its model for transformers,
and `train --init` goes on from it with the text of this project's `docs`. The other run has the
same options and begins from the seed. Both have whole steps as graphs. A file of transformers has
no dropout, so the run from the checkpoint has none (`small` has 0.1). Leaves a line for each run,
with its curves, and one picture beside the lines. `--smoke` takes `tiny` and few steps, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure

import environment
from real_runs import TRAIN, WHOLE, Row, collect, listen

EXPORT = (*TRAIN[:-1], "export")
FIRST, FROM_SEED, CONTINUED = "Python's library", "from the seed", "from its own checkpoint"
EVALUATED = 20  # steps between two evaluations
DOCS = Path(__file__).resolve().parent.parent / "docs"


def run_all(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Rows of all runs, each once its run has ended.

    Raises:
        RuntimeError: a run failed; the message has the end of its output.
    """
    preset = "tiny" if options.smoke else "small"
    device = ["--device", "cpu"] if options.smoke else []
    first, model = folder / "first", folder / "model"
    sizes = ["--batch-size", "8", "--sequence-length", "1024"]
    short = ["--batch-size", "2", "--sequence-length", "32", "--impl", "none"]
    length: list[str] = []
    if options.smoke:  # evaluating on the library takes minutes there
        length = [*short, "--data", str(options.text)]
    given = ["--preset", preset, *options.first, *(length or WHOLE.split()), *device]
    yield _trained(options, FIRST, first, given)
    _run([*EXPORT, str(first), "--out", str(model), "--format", "transformers"], options.end)
    common = ["--steps", str(options.steps), *device]
    common += ["--learning-rate", "3e-4", "--warmup-steps", str(options.steps // 10)]
    common += length or [*sizes, *WHOLE.split(), "--data", str(options.text)]
    for contender, begin in {
        FROM_SEED: ["--preset", preset],
        CONTINUED: ["--init", str(model)],
    }.items():
        out = folder / contender.replace(" ", "_")
        yield _trained(options, contender, out, [*begin, *common, "--no-save"])


def _trained(options: argparse.Namespace, contender: str, out: Path, given: list[str]) -> Row:
    more = ["--no-deterministic", "--evaluate-every", str(EVALUATED), "--out", str(out)]
    heard = _run([*TRAIN, *given, *more], options.end)
    row: Row = {"benchmark": "continued_runs", "contender": contender, "options": given}
    summary = json.loads((out / "summary.json").read_text())
    before = summary["held_out_before"]
    row |= collect(out, heard, EVALUATED)
    if before is not None:
        row["held_out_curve"].insert(0, [0, 0.0, before / math.log(2)])
    return row


def _run(command: Sequence[str], end: float) -> list[tuple[float, str]]:
    code, heard = listen(command, None, end)
    if code:
        raise RuntimeError("".join(text for _, text in heard[-8:]))
    return heard


def draw(rows: Sequence[Row]) -> Figure:
    """Draw held-out bits per byte over steps, training behind, for the runs on the new text."""
    figure = pyplot.figure(figsize=(7.5, 4.5), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(row for row in rows if row["contender"] != FIRST):
        steps, _, losses = zip(*row["train_curve"], strict=True)
        axis.plot(steps, [loss / math.log(2) for loss in losses], color=f"C{place}", alpha=0.4)
        steps, _, bits = zip(*row["held_out_curve"], strict=True)
        label = f"{row['contender']}: {row['held_out_bits_per_byte']:.3f}"
        axis.plot(steps, bits, "o-", color=f"C{place}", label=label)
    axis.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axis.set_title("text that is new: points held out, lines behind them training", loc="left")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    made_on = textwrap.fill(environment.describe(rows[-1]["environment"]), 110)
    figure.supxlabel(made_on, fontsize=7, color="#555555")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="lines are added to this file")
    parser.add_argument("--commit", help="the commit to stamp, where .git does not say it")
    parser.add_argument("--text", type=Path, default=DOCS, help="a file or folder of text")
    parser.add_argument("--first-steps", type=int, default=200, help="on Python's library")
    parser.add_argument("--steps", type=int, default=150, help="on the new text, of each run")
    parser.add_argument("--seconds", type=float, default=400, help="for all runs together")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on the CPU")
    options = parser.parse_args(arguments)
    options.end = time.monotonic() + options.seconds
    warmup = str(max(1, options.first_steps // 10))
    options.first = ["--steps", str(options.first_steps), "--warmup-steps", warmup]
    stamp = environment.stamp(options.commit)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, options.out.open("a") as file:
        for row in run_all(options, Path(folder)):
            rows.append(row | {"environment": stamp})
            print(json.dumps(rows[-1]), file=file, flush=True)
            curve = [[step, round(bits, 4)] for step, _, bits in row["held_out_curve"]]
            print(row["contender"], "held out, by steps:", curve, f"in {row['seconds']:.0f} s",
                  flush=True)  # fmt: skip
    picture = options.out.with_suffix(".png")
    draw(rows).savefig(picture, dpi=150)
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
