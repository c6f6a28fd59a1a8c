"""A real run in FP8 by Transformer Engine against bf16: is it equal, how good, how fast?

    python benchmarks/fp8_training.py --out benchmarks/results/fp8_training_h200.jsonl

Each row is two processes of `moe-graphs train`: `--compare` for the first steps, eager and graphed
bit for bit, then a run with its held-out loss at the end. A row that fails leaves a line with its
error. Needs Transformer Engine (`../shared/peers`), but for the rows of `ours`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

import environment
from timed_replays import check_replayed

TE = "transformer_engine"
OF_THEIRS = ["--linear", TE, "--experts", TE]
SCOPES = ["--scopes", "attn,mlp,moe_router,moe_preprocess"]  # their experts need the host
ROWS: dict[str, list[str]] = {
    "ours, bf16": [*SCOPES],
    "TE, bf16": [*SCOPES, *OF_THEIRS],
    "TE, FP8 block": [*SCOPES, *OF_THEIRS, "--fp8", "block"],
    "TE, FP8 delayed": [*SCOPES, *OF_THEIRS, "--fp8", "delayed"],
    "TE, FP8 current": [*SCOPES, *OF_THEIRS, "--fp8", "current"],
    "TE linears in FP8 block, our experts": [
        "--scopes", "attn,mlp,moe", "--linear", TE, "--fp8", "block",
    ],
}  # fmt: skip
FROM_COMPARE = ("losses_bitwise_equal", "grad_norms_bitwise_equal", "parameters_bitwise_equal")
FROM_RUN = ("held_out_bits_per_byte", "tokens_per_second", "seconds", "parameters")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--preset", default="small")
    made.add_argument("--steps", type=int, default=300)
    made.add_argument("--compared-steps", type=int, default=12)
    made.add_argument("--rows", default="", help=f"some of: {'; '.join(ROWS)}")
    made.add_argument("--train", default="", help="more options of moe-graphs train, in quotes")
    made.add_argument("--time-limit", type=float, default=200, help="seconds of a process")
    made.add_argument("--out", type=Path)
    made.add_argument("--json", action="store_true")
    made.add_argument("--commit", help="for the stamp, where there is no .git")
    options = made.parse_args(arguments)
    options.names = [row.strip() for row in options.rows.split(";") if row.strip()] or list(ROWS)
    unknown = sorted(set(options.names) - set(ROWS))
    if unknown:
        made.error(f"--rows: {unknown} are none of {list(ROWS)}")
    return options


def train(options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The document that ``moe-graphs train --json`` prints.

    Raises:
        RuntimeError: it failed or took too long; with its last lines.
    """
    command = [sys.executable, "-m", "moe_graphs.cli", "train", "--preset", options.preset]
    command += ["--no-save", "--json", *more, *shlex.split(options.train)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*command, "--out", str(Path(folder) / "run")],
                capture_output=True,
                text=True,
                timeout=options.time_limit,
                env=os.environ | {"NVTE_TORCH_COMPILE": "0"},
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"took more than {options.time_limit:g} s") from error
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-12:]))
    return json.loads(done.stdout)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A line, as far as it came."""
    found: dict[str, Any] = {"steps": options.steps, "compared_steps": options.compared_steps}
    try:
        both = train(options, *ROWS[name], "--compare", "--steps", str(options.compared_steps))
        found |= {key: both[key] for key in FROM_COMPARE}
        found |= {f"{side}_step_ms": both[side]["step_ms"] for side in ("eager", "graphed")}
        found |= {key: both[key] for key in ("captured", "replayed", "eager_calls")}
        check_replayed(SimpleNamespace(**found))
        run = train(options, *ROWS[name], "--steps", str(options.steps))
        found |= {key: run[key] for key in FROM_RUN}
    except RuntimeError as error:
        return found | {"error": str(error)}
    return found | {"error": None}


def table(lines: Sequence[dict[str, Any]]) -> Table:
    made = Table("", "bitwise eager", "held out, bits per byte", "tokens/s", "eager, graphed ms")
    for line in lines:
        if line["error"]:
            made.add_row(line["contender"], line["error"].splitlines()[-1][:120])
            continue
        equal = all(line[key] for key in FROM_COMPARE)
        speed = f"{line['eager_step_ms']:.1f}, {line['graphed_step_ms']:.1f}"
        quality = f"{line['held_out_bits_per_byte']:.4f}"
        fast = f"{line['tokens_per_second']:,.0f}"
        made.add_row(line["contender"], "yes" if equal else "NO", quality, fast, speed)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    console = Console(stderr=options.json, highlight=False)
    stamp, lines = environment.stamp(options.commit), []
    for name in options.names:
        started = time.perf_counter()
        line = {"benchmark": "fp8_training", "model": options.preset, "contender": name}
        line |= measure(name, options) | {"environment": stamp}
        lines.append(line)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        said = "ok" if line["error"] is None else line["error"].splitlines()[-1]
        console.print(f"[dim]{time.perf_counter() - started:6.1f} s[/]  {name}: {said}")
    console.print(table(lines))
    console.print(environment.describe(stamp))
    if options.json:
        print(json.dumps({"benchmark": "fp8_training", "lines": lines}))


if __name__ == "__main__":
    main()
