"""``moe-graphs bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

GEMM_LINES = Path("grouped_gemm.jsonl")


def bench_app() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Measures parts of the package on this machine.")

    @app.callback()
    def bench() -> None:
        """Measures parts of the package on this machine."""

    app.command()(gemm)
    return app


def gemm(
    out: Annotated[Path, typer.Option(help="JSON lines are appended here.")] = GEMM_LINES,
    quick: Annotated[bool, typer.Option(help="Four models at 8,192 tokens: a minute.")] = False,
    budget: Annotated[float, typer.Option(help="Seconds; the rest is left out.")] = 440.0,
    plot: Annotated[
        Path | None, typer.Option(help="Only draw the picture from --out into this file.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Where there is no .git to ask.")] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")
    ] = False,
) -> None:
    """Times grouped GEMMs against dense cuBLAS, per-expert launches and torch._grouped_mm."""
    console = Console(stderr=json_, highlight=False, width=160)
    if plot is None and not torch.cuda.is_available():
        Console(stderr=True).print("error: bench gemm measures a CUDA GPU, and there is none here")
        raise typer.Exit(1)
    if plot is not None and not out.exists():
        Console(stderr=True).print(f"error: --plot: there are no results in {out}: measure first")
        raise typer.Exit(1)
    from moe_graphs.bench import gemm as benchmark

    if plot is not None:
        benchmark.plot(out, plot)
        console.print(f"picture: {plot}")
        return
    records = list(benchmark.run(out, console, quick=quick, budget=budget, commit=commit))
    if json_:
        typer.echo(json.dumps({"rows": records}))
