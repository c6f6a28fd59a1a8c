"""Weak scaling from the lines of `parallel_steps.py`: as many tokens per GPU on more GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markdown_cells import table
from parallel_tables import SHARED
from result_lines import Line, Select, sources

ALONE = {False: "whole step, alone", True: "whole step, alone, our AdamW"}
OURS = ", our AdamW"


@dataclass(frozen=True)
class Point:
    """A way to run a step on a number of GPUs.

    Attributes:
        alone: line of one GPU with all experts, the same optimizer and as many tokens; None if it
            was not measured.
    """

    line: Line
    alone: Line | None

    @property
    def ranks(self) -> int:
        return self.line["ranks"]

    @property
    def way(self) -> str:
        name = self.line["contender"].removeprefix("whole step, ")
        return name.replace("alone", "all experts")

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on each GPU."""
        return 1e3 * self.line["tokens_per_rank"] / self.line["step_ms"]

    @property
    def efficiency(self) -> float | None:
        return None if self.alone is None else self.alone["step_ms"] / self.line["step_ms"]


def points(lines: Iterable[Line]) -> dict[str, list[Point]]:
    """Newest line of whole steps for each model, way and number of GPUs, one GPU first."""
    newest: dict[tuple[str, int, str], Line] = {}
    for line in sorted(lines, key=lambda line: line.run):
        name = line.get("contender") or ""
        if not line.failed and name.startswith("whole step, ") and line["model"] in SHARED:
            newest[line["model"], line["ranks"], name] = line
    found: dict[str, list[Point]] = {}
    for (model, _, name), line in sorted(newest.items(), key=lambda item: item[0][1]):
        alone = newest.get((model, 1, ALONE[name.endswith(OURS)]))
        if alone is not None and alone["tokens_per_rank"] != line["tokens_per_rank"]:
            alone = None
        found.setdefault(model, []).append(Point(line, alone))
    return {model: found[model] for model in SHARED if model in found}


def weak_scaling(lines: Sequence[Line]) -> str:
    """A row per way."""
    rows, used = [], []
    for model, every in points(Select("parallel_steps").lines(lines)).items():
        used += [point.line for point in every]
        rows += [
            [
                SHARED[model],
                str(point.ranks),
                point.way,
                f"{point.line['step_ms']:.1f} ms",
                f"{point.tokens_per_second:,.0f}",
                "-" if point.efficiency is None else f"{point.efficiency:.2f}",
            ]
            for point in every
        ]
    header = "model | GPUs | whole steps | a step | tokens/s of a GPU | efficiency"
    note = (
        "Efficiency: one GPU's time of a step by that of several, with as many tokens a GPU and "
        "the same optimizer; -: not run on one GPU. Of every row the newest line."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used)}"
