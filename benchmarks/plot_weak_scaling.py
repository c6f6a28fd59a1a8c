"""Draws weak scaling from the results of `parallel_steps.py`: a row per model, a bar per way.

    python benchmarks/plot_weak_scaling.py benchmarks/results/parallel_steps_h200.jsonl

Writes `weak_scaling_h200.png` beside them (the ending of their name), or to ``--out``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from environment import describe
from parallel_tables import SHARED
from result_lines import Line
from weak_scaling import Point, points

Value = Callable[[Point], float | None]
PANELS: tuple[tuple[str, Value, str, str], ...] = (
    ("tokens per second of a GPU", lambda point: point.tokens_per_second, "{:,.0f}", "#33658a"),
    ("parallel efficiency", lambda point: point.efficiency, "{:.2f}", "#6a994e"),
)


def read_lines(path: Path) -> list[Line]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [Line(row, path.name) for row in rows if row["benchmark"] == "parallel_steps"]


def draw(lines: Sequence[Line]) -> Figure:
    """Draw the picture of weak scaling.

    Raises:
        ValueError: none of the lines is a whole step of a model whose experts are shared.
    """
    found = points(lines)
    if not found:
        raise ValueError("no line is a whole step of a model whose experts are shared")
    heights = [1.2 + 0.28 * len(every) for every in found.values()]
    figure = pyplot.figure(figsize=(12, 0.4 + sum(heights)), layout="constrained")
    parts = figure.subfigures(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (model, every), part in zip(found.items(), parts, strict=True):
        part.suptitle(SHARED[model], x=0.01, ha="left", weight="bold", fontsize=10)
        axes = part.subplots(1, len(PANELS), sharey=True)
        for (title, value, form, color), axis in zip(PANELS, axes, strict=True):
            axis.set_title(title, fontsize=9, loc="left")
            _draw_panel(axis, [value(point) for point in every], form, color)
        labels = [f"{point.way}: {point.ranks} GPU{'s' * (point.ranks > 1)}" for point in every]
        axes[0].set_yticks(range(len(every)), labels, fontsize=8)
        axes[0].invert_yaxis()
    shown = [point.line for every in found.values() for point in every]
    newest = max(shown, key=lambda line: line.run)
    figure.supxlabel(describe(newest["environment"]), fontsize=7, color="#555555")
    return figure


def _draw_panel(axis: Axes, values: Sequence[float | None], form: str, color: str) -> None:
    highest = max((value for value in values if value is not None), default=1.0)
    for place, value in enumerate(values):
        if value is None:
            axis.text(0, place, " no number", va="center", fontsize=8, color="#888888")
            continue
        axis.barh(place, value, 0.62, color=color)
        axis.text(1.02 * value, place, form.format(value), va="center", fontsize=8)
    axis.set_xlim(0, 1.18 * highest)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, help="the ending says the format")
    options = parser.parse_args(arguments)
    results: Path = options.results
    name = results.stem.replace("parallel_steps", "weak_scaling")
    if options.out is None and name == results.stem:
        parser.error(f"{results.name} is no parallel_steps_...: say --out")
    out = options.out or results.with_name(f"{name}.png")
    draw(read_lines(results)).savefig(out, dpi=150)
    print(out)


if __name__ == "__main__":
    main()
