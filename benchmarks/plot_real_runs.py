"""Draws the lines of `real_runs.py`: `small` over seconds, the optimizers over steps.

    python benchmarks/plot_real_runs.py benchmarks/results/real_runs_h200.jsonl

Writes a picture with the same name beside the lines, or to ``--out``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from environment import describe
from plot_partial_graphs import draw_file
from real_runs import SETS, Row, spread

TITLES = {
    "small": "everything on, everything off: points held out, lines behind them training",
    "fp8": "experts in FP8 and in bf16: means over seeds, held out from least to most",
    "optimizers": "optimizers: means over seeds, held out from least to most, training behind",
}


def draw(rows: Sequence[Row]) -> Figure:
    """Draw a panel for each set with a run that ended well.

    If a variant has two runs from the same seed, the later one counts.

    Raises:
        ValueError: no run ended well, or a variant's runs have different steps.
    """
    newest = {
        (row["set"], row["contender"], row["seed"]): row for row in rows if row["error"] is None
    }
    sets = [name for name in SETS if any(key[0] == name for key in newest)]
    if not sets:
        raise ValueError("no line is of a run that ended well")
    figure = pyplot.figure(figsize=(7.5 * len(sets), 5), layout="constrained")
    panels = figure.subplots(1, len(sets), squeeze=False)[0]
    for name, axis in zip(sets, panels, strict=True):
        own = [row for row in newest.values() if row["set"] == name]
        over_seconds = name == "small"
        for place, variant in enumerate(SETS[name]):
            if some := [row for row in own if row["contender"] == variant]:
                _draw_variant(axis, some, f"C{place}", column=1 if over_seconds else 0)
        if over_seconds:
            axis.axhline(own[0]["target"], color="0.4", linewidth=1, linestyle=":")
        axis.set_title(TITLES[name], fontsize=9, loc="left")
        seconds = "seconds since the first step began"
        axis.set(xlabel=seconds if over_seconds else "step", ylabel="bits per byte")
        lowest = min(row["held_out_bits_per_byte"] for row in own)
        axis.set_ylim(0.8 * lowest, (2.6 if over_seconds else 1.8) * lowest)
        axis.legend(frameon=False, fontsize=8, loc="upper right")
        axis.spines[["top", "right"]].set_visible(False)
    last = max(newest.values(), key=lambda row: row["environment"]["date"])
    figure.supxlabel(describe(last["environment"]), fontsize=7, color="#555555")
    return figure


def _draw_variant(axis: Axes, rows: Sequence[Row], color: str, column: int) -> None:
    """``column`` of the points is what they lie over: of several runs it has to be the step."""
    if len({tuple(point[0] for point in row["held_out_curve"]) for row in rows}) > 1:
        raise ValueError(f"{rows[0]['contender']}: runs of other steps than one another")
    reached = [row["seconds_to_target"] for row in rows if row["seconds_to_target"] is not None]
    label = f"{rows[0]['contender']}: "
    label += spread([row["held_out_bits_per_byte"] for row in rows], ".3f")
    if column == 1 and reached:
        label += f", {rows[0]['target']} after {statistics.mean(reached):.0f} s"
    for key, unit in (("train_curve", math.log(2)), ("held_out_curve", 1.0)):
        points = list(zip(*(row[key] for row in rows), strict=True))
        where = [statistics.mean(point[column] for point in group) for group in points]
        values = [[point[2] / unit for point in group] for group in points]
        means = [statistics.mean(group) for group in values]
        if key == "train_curve":
            axis.plot(where, means, color=color, linewidth=0.7, alpha=0.4)
            continue
        axis.plot(where, means, "o-", color=color, markersize=3.5, linewidth=1.4, label=label)
        if len(rows) > 1:
            low, high = [min(group) for group in values], [max(group) for group in values]
            axis.fill_between(where, low, high, color=color, alpha=0.18, linewidth=0)


def main(arguments: Sequence[str] | None = None) -> None:
    draw_file(draw, __doc__, arguments)


if __name__ == "__main__":
    main()
