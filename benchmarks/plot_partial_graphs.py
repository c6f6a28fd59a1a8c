"""Draws the results of `partial_graphs.py`: a row per model, and a bar per contender.

    python benchmarks/plot_partial_graphs.py benchmarks/results/partial_graphs_h200.jsonl

Writes a picture with the same name beside the results, or to ``--out``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from environment import describe

Row = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One column of the picture; ``value`` gives a row's bar with its low and high end, or None."""

    title: str
    value: Callable[[Row], tuple[float, float, float] | None]
    form: str
    color: str


def _spread(key: str) -> Callable[[Row], tuple[float, float, float] | None]:
    def value(row: Row) -> tuple[float, float, float] | None:
        spread = row.get(key)
        return (spread["median"], spread["p10"], spread["p90"]) if spread else None

    return value


def _number(key: str, scale: float) -> Callable[[Row], tuple[float, float, float] | None]:
    def value(row: Row) -> tuple[float, float, float] | None:
        number = row.get(key)
        return None if number is None else (scale * number,) * 3

    return value


PANELS = (
    Panel("time per step, ms", _spread("step_ms"), "{:.1f}", "#33658a"),
    Panel("host time per step, ms", _spread("host_ms"), "{:.1f}", "#6a994e"),
    Panel("GPU idle, % of the step", _number("idle_share", 100), "{:.1f}", "#bc4749"),
    Panel("reserved memory, GiB", _number("reserved_bytes", 2**-30), "{:.1f}", "#7d6b91"),
)


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def draw(rows: Sequence[Row]) -> Figure:
    """Medians with lines from p10 to p90. A contender without a number keeps its place, empty."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = pyplot.figure(figsize=(15, 0.4 + 2.6 * len(models)), layout="constrained")
    parts = figure.subfigures(len(models), 1, squeeze=False)[:, 0]
    for model, part in zip(models, parts, strict=True):
        own = [row for row in rows if row["model"] == model]
        first = own[0]
        title = f"{model.replace('_', '-')}: {first['setting']}, dispatcher {first['dispatcher']}"
        part.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=10)
        axes = part.subplots(1, len(PANELS), sharey=True)
        for panel, axis in zip(PANELS, axes, strict=True):
            _draw_panel(axis, own, panel)
        axes[0].invert_yaxis()
    figure.supxlabel(describe(rows[0]["environment"]), fontsize=7, color="#555555")
    return figure


def _draw_panel(axis: Axes, rows: Sequence[Row], panel: Panel) -> None:
    values = [panel.value(row) for row in rows]
    highest = max((high for value in values if value for high in value), default=1.0)
    for place, value in enumerate(values):
        if value is None:
            axis.text(0, place, " no number", va="center", fontsize=8, color="#888888")
            continue
        median, low, high = value
        axis.barh(place, median, 0.62, color=panel.color)
        if high > low:
            axis.plot((low, high), (place, place), color="black", linewidth=1.2)
        axis.text(
            max(median, high) + 0.02 * highest,
            place,
            panel.form.format(median),
            va="center",
            fontsize=8,
        )
    axis.set_xlim(0, 1.22 * highest if highest > 0 else 1)
    axis.set_yticks(range(len(rows)), [row["contender"] for row in rows], fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(panel.title, fontsize=9, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def draw_file(
    draw: Callable[[Sequence[Row]], Figure], about: str | None, arguments: Sequence[str] | None
) -> None:
    """The command line of a script that draws all rows of a file; ``about`` is its docstring."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, help="the ending says the format; default: .png")
    options = parser.parse_args(arguments)
    out = options.out or options.results.with_suffix(".png")
    draw(read_rows(options.results)).savefig(out, dpi=150)
    print(out)


def main(arguments: Sequence[str] | None = None) -> None:
    draw_file(draw, __doc__, arguments)


if __name__ == "__main__":
    main()
