"""Programs that are mutated under graphs, beside an eager twin.

    python tests/programs/run_mutations.py --count 2000           # random programs: a table
    python tests/programs/run_mutations.py --seed 17 --verbose    # one program, all its mutations
    python tests/programs/run_mutations.py --table                # each kind once, in all engines
    python tests/programs/run_mutations.py --count 2000 --json    # one line per silent mutation

A silent mutation is printed with seed, path and source. ``--table --known`` writes the lines of
``known_silent.py``. A process runs fifty programs, since a mutation may kill it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from programs import mutating
from programs.mutable_programs import LETTERS, generate, is_known, table
from programs.mutating import CRASH, MutableProgram, Outcome, drawn, each_kind, judge
from programs.specification import ENGINES

CHUNK = 50


@dataclass(frozen=True)
class Row:
    """One outcome as plain values, which go from process to process."""

    seed: int
    engine: str
    outcome: str
    name: str
    kind: str
    mutation: str
    detail: str
    source: str
    is_allowed: bool
    is_known: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--engine", choices=ENGINES, help="one engine, for all programs")
    parser.add_argument("--mutations", type=int, default=8, help="mutations of a random program")
    parser.add_argument("--table", action="store_true", help="the table, not random programs")
    parser.add_argument("--known", action="store_true", help="print lines of known_silent.py")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="every mutation")
    parser.add_argument("--audit-every", type=int, help="audits, too; steps run until one is due")
    parser.add_argument("--no-guards", action="store_true", help="what audits find alone")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    rows = list(_all(options))
    silent = [row for row in rows if not row.is_allowed]
    if options.known:
        _print_known(silent)
    elif options.json:
        for row in silent:
            print(json.dumps(vars(row)))
        print(json.dumps({"outcomes": _counts(rows), "kinds": _kinds(rows)}))
    else:
        _print(rows, silent, options.verbose)
    return int(any(not row.is_known for row in silent))


def _programs(options: argparse.Namespace) -> list[tuple[int, MutableProgram]]:
    if options.table:
        engines = [options.engine] if options.engine else ENGINES
        found = [replace(program, engine=e) for program in table() for e in engines]
    else:
        found = [generate(seed) for seed in range(options.seed, options.seed + options.count)]
        if options.engine:
            found = [replace(program, engine=options.engine) for program in found]
    return [(options.seed + number, program) for number, program in enumerate(found)]


def _all(options: argparse.Namespace) -> Iterator[Row]:
    programs = _programs(options)
    chunks = [programs[at : at + CHUNK] for at in range(0, len(programs), CHUNK)]
    mutations = 0 if options.table else options.mutations
    work = partial(
        _chunk,
        mutations=mutations,
        audit_every=options.audit_every,
        no_guards=options.no_guards,
    )
    if len(programs) == 1:
        yield from work(programs)
        return
    context = multiprocessing.get_context("spawn")
    console = Console(stderr=True)
    with (
        Progress(console=console) as progress,
        ProcessPoolExecutor(options.processes, context, max_tasks_per_child=1) as pool,
    ):
        task = progress.add_task("programs", total=len(programs))
        for chunk, future in [(chunk, pool.submit(work, chunk)) for chunk in chunks]:
            try:
                yield from future.result()
            except BrokenProcessPool:
                dead = Outcome(chunk[0][1], None, CRASH, "the process of these programs died")
                yield _row(chunk[0][0], dead)
            progress.advance(task, len(chunk))


def _chunk(
    programs: list[tuple[int, MutableProgram]],
    mutations: int,
    audit_every: int | None,
    no_guards: bool,
) -> list[Row]:
    torch.set_num_threads(1)
    mutating.AUDIT_EVERY = audit_every
    if no_guards:
        mutating.without_guards()
    found = []
    for seed, program in programs:
        draw = random.Random(seed)
        choose = partial(drawn, draw=draw, count=mutations) if mutations else each_kind
        found += [_row(seed, each) for each in judge(program, choose, thorough=mutations > 0)]
    return found


def _row(seed: int, outcome: Outcome) -> Row:
    mutation = outcome.mutation
    return Row(
        seed,
        outcome.program.engine,
        outcome.outcome,
        outcome.name,
        "no mutation" if mutation is None else mutation.kind,
        str(mutation),
        outcome.detail,
        "" if outcome.is_allowed else outcome.program.text(),
        outcome.is_allowed,
        is_known(outcome),
    )


def _print_known(silent: list[Row]) -> None:
    engines = defaultdict(set)
    for row in silent:
        engines[row.name].add(LETTERS[row.engine])
    for name, letters in engines.items():
        print(f'    "{name}": "{"".join(each for each in "scf" if each in letters)}",')


def _counts(rows: list[Row]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row.engine][row.outcome] += 1
        counts["all"][row.outcome] += 1
    return {engine: dict(found.most_common()) for engine, found in counts.items()}


def _kinds(rows: list[Row]) -> dict[str, dict[str, dict[str, int]]]:
    """Outcomes by kind of mutation and by engine."""
    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for row in rows:
        counts[row.kind][row.engine][row.outcome] += 1
    return {kind: {e: dict(c) for e, c in found.items()} for kind, found in counts.items()}


def _print(rows: list[Row], silent: list[Row], verbose: bool) -> None:
    console = Console()
    for row in rows if verbose else ():
        console.print(
            f"{row.seed} {row.engine}: {row.outcome}: {row.mutation} {row.detail}", markup=False
        )
    counts = _counts(rows)
    shown = Table("engine", *counts["all"], title=f"{len(rows)} mutations")
    for engine, found in counts.items():
        shown.add_row(engine, *(str(found.get(each, 0)) for each in counts["all"]))
    console.print(shown)
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in silent:
        groups[f"{'known' if row.is_known else 'NEW'}: {row.outcome}: {row.name}"].append(row)
    for name, group in sorted(groups.items(), key=lambda each: -len(each[1])):
        row = group[0]
        engines = dict(Counter(each.engine for each in group))
        console.print(f"{len(group)} x {name} {engines}", markup=False)
        if not row.is_known or verbose:
            console.print(f"  seed {row.seed}, {row.mutation}: {row.detail}", markup=False)
            console.print(row.source, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
