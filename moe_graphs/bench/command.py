"""The command ``moe-graphs bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moe_graphs.terminal import errors_in_a_line, make_console, print_json

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
    commit: Annotated[str | None, typer.Option(help="Commit, if there is no .git.")] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")
    ] = False,
) -> None:
    """Times grouped GEMMs against dense cuBLAS, per-expert launches and torch._grouped_mm."""
    console = make_console(stderr=json_)
    with errors_in_a_line(ImportError):  # matplotlib, which the picture needs
        document = (
            _draw(out, plot, console) if plot else _measure(out, console, quick, budget, commit)
        )
        if json_:
            print_json(document)


def _draw(out: Path, plot: Path, console: Console) -> dict[str, Any]:
    from moe_graphs.bench import gemm as benchmark

    if not out.exists():
        raise ValueError(f"--plot: there are no results in {out}: measure first")
    try:
        benchmark.plot(out, plot)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--plot: {out} has lines of something else ({error!r})") from error
    console.print(f"picture: {plot}")
    return {"picture": str(plot)}


def _measure(
    out: Path, console: Console, quick: bool, budget: float, commit: str | None
) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench gemm measures a CUDA GPU, and there is none here")
    from moe_graphs.bench import gemm as benchmark

    return {"rows": list(benchmark.run(out, console, quick=quick, budget=budget, commit=commit))}
