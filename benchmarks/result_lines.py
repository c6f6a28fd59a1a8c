"""The lines under ``results/``, and which of them a table takes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
# Commands that make lines, where that is not the file of the benchmark's name without options.
TWO_RANKS = "torchrun --nproc-per-node 2"
COMMANDS: Mapping[str, str] = {
    "accumulated": "python benchmarks/partial_graphs.py --microbatches 4",
    "accumulated_steps": "python benchmarks/full_iteration.py --microbatches 4",
    "dispatch": f"{TWO_RANKS} benchmarks/dispatch.py",
    "expert_rows": f"{TWO_RANKS} benchmarks/expert_rows.py",
    "full_iteration": "python benchmarks/full_iteration.py --compile",
    "grouped_gemm": "moe-graphs bench gemm",
    "lora": "python benchmarks/fine_tuning.py",
    "moe_layer_fp8": "python benchmarks/moe_layer.py --fp8",
    "moe_layer_zipf": "python benchmarks/moe_layer.py --routing even,zipf",
    "parallel_steps": f"{TWO_RANKS} benchmarks/parallel_steps.py",
    "parallel_steps_traced": f"{TWO_RANKS} benchmarks/parallel_steps.py --trace",
    "training": "moe-graphs train",
}


@dataclass(frozen=True)
class Line:
    """A measurement, and the file it is from (below ``results``)."""

    values: Mapping[str, Any]
    file: str

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def get(self, key: str) -> Any:
        return self.values.get(key)

    @property
    def run(self) -> tuple[str, str, str]:
        """Date, commit and file: the same for what one process has measured."""
        return self["environment"]["date"], self["environment"]["commit"], self.file

    @property
    def commit(self) -> str:
        commit, *changes = self["environment"]["commit"].partition("+")
        return commit[:7] + "".join(changes)

    @property
    def failed(self) -> bool:
        """Whether the line has an error message; in lines of kernels ``error`` is a number."""
        return isinstance(self.get("error"), str)

    @property
    def accumulates(self) -> bool:
        """Whether a step has several microbatches."""
        return "microbatches" in (self.get("setting") or "")


Run = dict[str, Line]  # by contender


def load(folder: Path = RESULTS) -> list[Line]:
    """All lines; one without the name of its benchmark has it from its file's name.

    A training run is a folder ``train_<preset>_...`` with its summary, and is one line.
    """
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        named = {"benchmark": path.stem.removesuffix("_h200")}
        texts = path.read_text().splitlines()
        lines += [Line(named | json.loads(text), path.name) for text in texts]
    for path in sorted(folder.glob("train_*/summary.json")):
        values = {
            "benchmark": "training",
            "model": path.parent.name.split("_")[1],
            "contender": "training",
            "environment": json.loads((path.parent / "environment.json").read_text()),
        }
        file = str(path.relative_to(folder))
        lines.append(Line(values | json.loads(path.read_text()), file))
    return lines


@dataclass(frozen=True)
class Select:
    """Lines of one benchmark on one kind of hardware that hold all of ``where``.

    contenders: all of them have to be there, of one run and without an error. Of the runs for
        which that holds, those of the newest commit are taken, and of them the one whose eager was
        fastest: ratios on a slow host flatter graphs.
    """

    benchmark: str
    where: Mapping[str, Any] = field(default_factory=dict)
    contenders: tuple[str, ...] = ()
    gpu: str = H200

    def lines(self, lines: Iterable[Line]) -> list[Line]:
        return [
            line
            for line in lines
            if line["benchmark"] == self.benchmark
            and line["environment"]["gpu"] == self.gpu
            and all(line.get(key) == value for key, value in self.where.items())
        ]

    def run(self, lines: Iterable[Line]) -> Run:
        """Raises ``LookupError`` if no run has all contenders."""
        runs: dict[tuple[str, str, str], Run] = defaultdict(dict)
        for line in self.lines(lines):
            if not line.failed:
                runs[line.run][line.get("contender")] = line
        complete = {key: run for key, run in runs.items() if set(self.contenders) <= set(run)}
        if not complete:
            raise LookupError(f"no run has all of {self}")
        newest = max(complete)[1]
        return min(
            (run for (_, commit, _), run in sorted(complete.items()) if commit == newest),
            key=_eager_ms,
        )


def _eager_ms(run: Run) -> float:
    eager = run.get("eager")
    return eager["step_ms"]["median"] if eager is not None else 0.0


def fastest_eager(lines: Iterable[Line], like: Line) -> Line:
    """Fastest eager line of the same model and hardware, of any benchmark and commit."""
    gpu = like["environment"]["gpu"]
    found = [
        line
        for line in lines
        if line.get("contender") == "eager"
        and line.get("setting") == like["setting"]
        and line["environment"]["gpu"] == gpu
        and not line.failed
    ]
    return min(found, key=lambda line: line["step_ms"]["median"])


def link(file: str) -> str:
    return f"[{file}](benchmarks/results/{file})"


def command_of(line: Line) -> str:
    """The command that makes such lines, without ``--out`` and what it runs on."""
    name = line["benchmark"]
    if line.accumulates:
        name = {"partial_graphs": "accumulated", "full_iteration": "accumulated_steps"}[name]
    return COMMANDS.get(name, f"python benchmarks/{name}.py")


def sources(used: Iterable[Line], *, commands: bool = True) -> str:
    """Hardware, versions, commits, files and commands of what a table shows, in markdown."""
    used = list(used)
    hardware = {line["environment"]["gpu"] for line in used} - {"none"}
    torches = sorted({line["environment"]["torch"] for line in used})
    commits = list(dict.fromkeys(line.commit for line in used))
    parts = [*sorted(hardware), f"torch {', '.join(torches)}"]
    parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}")
    links = []
    for file in dict.fromkeys(line.file for line in used):
        origins = {line.get("transcribed_from") for line in used if line.file == file} - {None}
        copied = f" (copied from {', '.join(sorted(origins))})" if origins else ""
        links.append(link(file) + copied)
    found = f"{', '.join(parts)}: {', '.join(links)}."
    made_by = dict.fromkeys(f"`{command_of(line)}`" for line in used)
    return f"{found} Made by {', '.join(made_by)}." if commands else found
