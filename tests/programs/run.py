"""Random programs, eager against graphed.

    python tests/programs/run.py --seeds 0:2000           # a table of outcomes, and what fails
    python tests/programs/run.py --seeds 17 --verbose     # one program, its trace of differences
    python tests/programs/run.py --seeds 0:2000 --json    # the same as JSON, one line per failure

A failing program is run again, made smaller, and grouped with programs that have the same smallest
program. A process runs a hundred seeds, so that a crash costs only the rest of its hundred.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from programs.generator import generate
from programs.minimise import minimised
from programs.running import CRASH, Verdict, confirmed, judge

CHUNK = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:200", help="first:end, or seeds with commas")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="every program, not only failures")
    parser.add_argument("--budget", type=int, default=60, help="runs to make a failure smaller")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    started, verdicts, smallest = time.time(), [], {}
    for verdict, smaller in _all(_seeds(options.seeds), options):
        verdicts.append(verdict)
        if not verdict.is_allowed:
            smallest[verdict.program.seed] = smaller
        if options.verbose:
            _print_one(verdict)
    _report(verdicts, smallest, options.json)
    print(f"{len(verdicts)} programs, {time.time() - started:.0f} s", file=sys.stderr)
    return int(bool(smallest))


def _seeds(text: str) -> list[int]:
    if ":" in text:
        first, end = text.split(":")
        return list(range(int(first or 0), int(end)))
    return [int(each) for each in text.split(",")]


def _all(seeds: list[int], options: argparse.Namespace) -> Iterator[tuple[Verdict, Verdict]]:
    if len(seeds) <= CHUNK:
        yield from _chunk(seeds, options.budget)
        return
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(_chunk, chunk, options.budget) for chunk in chunks]
        for chunk, future in zip(chunks, futures, strict=True):
            print(f"seeds {chunk[0]} to {chunk[-1]}", file=sys.stderr, flush=True)
            try:
                yield from future.result()
            except BrokenProcessPool:
                for seed in chunk:
                    dead = Verdict(generate(seed), CRASH, "the process of its hundred seeds died")
                    yield dead, dead


def _chunk(seeds: list[int], budget: int) -> list[tuple[Verdict, Verdict]]:
    torch.set_num_threads(1)
    return [_one(seed, budget) for seed in seeds]


def _one(seed: int, budget: int) -> tuple[Verdict, Verdict]:
    verdict = judge(generate(seed))
    if verdict.is_allowed:
        return verdict, verdict
    verdict = confirmed(verdict)
    return verdict, minimised(verdict, budget)


def _print_one(verdict: Verdict) -> None:
    program = verdict.program
    print(f"{program.seed} {program.engine}: {verdict.outcome}; replayed {verdict.replayed}, eager "
          f"{dict(verdict.eager_calls)}; {' '.join(program.features())}")  # fmt: skip
    for line in (verdict.detail, *verdict.named_errors):
        if line:
            print(f"    {line}")


def _report(verdicts: list[Verdict], smallest: dict[int, Verdict], as_json: bool) -> None:
    failures = [v for v in verdicts if not v.is_allowed]
    if as_json:
        for verdict in failures:
            print(json.dumps(_as_values(verdict, smallest[verdict.program.seed])))
        print(json.dumps({"outcomes": _table(verdicts)}))
        return
    for engine, counts in _table(verdicts).items():
        print(f"{engine:10}", ", ".join(f"{name}: {count}" for name, count in counts.items()))
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in failures:
        small = smallest[verdict.program.seed]
        key = (verdict.outcome, small.program.engine, " ".join(small.program.features()))
        groups.setdefault(key, []).append(small)
    for (outcome, engine, features), group in sorted(groups.items(), key=lambda g: -len(g[1])):
        seeds = ",".join(str(v.program.seed) for v in group[:5])
        print(f"\n{len(group)} x {outcome}, {engine}: {features or 'nothing special'} ({seeds})")
        print(f"    {group[0].detail}")


def _table(verdicts: list[Verdict]) -> dict[str, dict[str, int]]:
    table: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        for row in (verdict.program.engine, "all"):
            counts = table.setdefault(row, Counter())
            counts[verdict.outcome] += 1
            counts["with replays"] += verdict.replayed > 0
    return {row: dict(counts.most_common()) for row, counts in sorted(table.items())}


def _as_values(verdict: Verdict, smaller: Verdict) -> dict[str, Any]:
    return {
        "seed": verdict.program.seed,
        "engine": verdict.program.engine,
        "outcome": verdict.outcome,
        "detail": verdict.detail,
        "named_errors": verdict.named_errors,
        "smallest": dataclasses.asdict(smaller.program),
        "smallest_features": smaller.program.features(),
        "smallest_detail": smaller.detail,
    }


if __name__ == "__main__":
    sys.exit(main())
