"""The command of a benchmark that measures case by case: a line for each, printed and appended."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from moe_graphs.bench import environment


def measure_cases(
    benchmark: str,
    description: str | None,
    rounds: int,
    records: Callable[[argparse.Namespace], Iterable[Mapping[str, Any]]],
    arguments: list[str] | None,
) -> None:
    """``records`` measures with the options ``tiny``, ``op`` and ``rounds`` (default: given)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, as a test")
    parser.add_argument("--op", help="only the cases of this one, where cases have ops")
    parser.add_argument("--commit", help="where there is no .git to ask")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    constant = {"benchmark": benchmark, "environment": environment.stamp(args.commit)}
    for record in records(args):
        print(json.dumps(record), flush=True)
        if args.out:
            with args.out.open("a") as lines:
                lines.write(json.dumps({**record, **constant}) + "\n")
