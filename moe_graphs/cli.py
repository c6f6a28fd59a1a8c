"""The command line. ``main`` is the entry point ``moe-graphs``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moe_graphs.bench.command import bench_app
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.engine.report import Report
from moe_graphs.engine.whole_step.full_iteration import FullIterationReport
from moe_graphs.errors import GraphError
from moe_graphs.lm import run as training_run
from moe_graphs.lm.checkpoint import find_checkpoint
from moe_graphs.lm.compare import compare
from moe_graphs.lm.data import Corpus, corpus_at, standard_library
from moe_graphs.lm.run_presets import Preset, presets
from moe_graphs.lm.trainer import LogLine, TrainingDiverged
from moe_graphs.tables import capture_table, comparison_table, full_iteration_table

DEFAULT_SCOPES = "attn,moe_router,moe_preprocess"


def build_app() -> typer.Typer:
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback()
    def moe_graphs() -> None:
        """MoE training on PyTorch with partial CUDA graphs."""

    app.command()(train)
    app.add_typer(bench_app(), name="bench")
    return app


def main() -> None:
    build_app()()


def train(
    preset: Annotated[
        str | None, typer.Option(help="tiny (CPU) or small (one GPU); by default, by the device.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Directory of text files, or one; by default Python's own library."),
    ] = None,
    impl: Annotated[
        str,
        typer.Option(
            help="local captures scopes, full_iteration whole steps, none trains eagerly."
        ),
    ] = "local",
    scopes: Annotated[
        str | None, typer.Option(help=f"What to capture.  [default: {DEFAULT_SCOPES}]")
    ] = None,
    optimizer_in_graph: Annotated[
        bool,
        typer.Option("--optimizer-in-graph", help="With full_iteration: clipping and update, too."),
    ] = False,
    dispatcher: Annotated[str, typer.Option(help="local, padded or all_to_all.")] = "local",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per optimizer step.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Parts of a step's batch.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, dropout and the order of the text.")] = 0,
    device: Annotated[str | None, typer.Option(help="By default cuda if there is one.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="A run's directory, or one of its checkpoints.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="By default a new directory in runs/.")] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0 for one at the end.")
    ] = 0,
    save: Annotated[bool, typer.Option(help="Whether to write checkpoints.")] = True,
    deterministic: Annotated[bool, typer.Option(help="Deterministic kernels on the GPU.")] = True,
    compare_: Annotated[
        bool, typer.Option("--compare", help="Run eager and graphed, and compare.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")
    ] = False,
) -> None:
    """Trains a byte-level MoE language model on text found on this machine."""
    console = _console(stderr=json_)
    changes = {
        "steps": steps,
        "batch_size": batch_size,
        "microbatches": microbatches,
        "learning_rate": learning_rate,
        "seed": seed,
    }
    with _errors_in_a_line():
        where = _device(device)
        name, chosen = _preset(preset, where)
        options = training_run.RunOptions(
            preset=_with_settings(chosen, changes),
            device=where,
            graph_config=_graph_config(impl, scopes, optimizer_in_graph),
            dispatcher=dispatcher,
            out=out or _free_directory(Path("runs"), name),
            resume=find_checkpoint(resume) if resume else None,
            checkpoint_every=checkpoint_every,
            save=save,
        )
        corpus = corpus_at(data) if data else standard_library()
        _describe(console, options, corpus, name)
        with training_run.deterministic(deterministic and where.type == "cuda"):
            document = (_compare if compare_ else _run)(options, corpus, console)
    if json_:
        typer.echo(json.dumps(document, allow_nan=False))


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file has no width: wide enough that no table cell is folded
    return console


@contextlib.contextmanager
def _errors_in_a_line() -> Iterator[None]:
    """What the user can do something about ends the command without a traceback."""
    try:
        yield
    except (ValueError, GraphError, TrainingDiverged) as error:
        console = _console(stderr=True)
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from error


def _run(options: training_run.RunOptions, corpus: Corpus, console: Console) -> dict[str, Any]:
    total = options.preset.training.steps
    with _progress(console, total) as progress:
        summary = training_run.run(options, corpus, progress)
    if summary.report is not None:
        console.print(_report_table(summary.report))
    baselines = ", ".join(f"{name} {bits:.4f}" for name, bits in summary.compressors.items())
    console.print(
        f"held out: {summary.held_out_bits_per_byte:.4f} bits per byte after {summary.steps} "
        f"steps, {summary.seconds:.0f} s ({baselines})"
    )
    console.print(f"run: {summary.out}")
    return summary.to_dict()


def _compare(options: training_run.RunOptions, corpus: Corpus, console: Console) -> dict[str, Any]:
    with _progress(console, 2 * options.preset.training.steps) as progress:
        comparison = compare(options, corpus, progress)
    console.print(_report_table(comparison.report))
    console.print(comparison_table(comparison))
    return comparison.to_dict()


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[training_run.Progress]:
    """Log lines above a progress bar; only the lines where nobody watches."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("training", total=total)
        base = last = 0

        def line(log_line: LogLine) -> None:
            nonlocal base, last
            if log_line.step < last:  # the second run of a comparison
                base += last
            last = log_line.step
            console.print(str(log_line), markup=False)
            bar.update(task, completed=base + last)

        def note(text: str) -> None:
            console.print(text, markup=False)

        yield training_run.Progress(line, note)


def _describe(
    console: Console, options: training_run.RunOptions, corpus: Corpus, name: str
) -> None:
    skipped = ", ".join(f"{count} {reason}" for reason, count in corpus.skipped.items()) or "none"
    settings = options.preset.training
    lines = (
        f"text: {corpus.source}: {len(corpus.train)} documents, {corpus.train_bytes / 1e6:.2f} MB "
        f"to train on; {len(corpus.held_out)} documents, {corpus.held_out_bytes / 1e6:.2f} MB held "
        f"out; left out: {skipped}",
        f"preset {name} on {options.device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} CPU threads: {settings.steps} steps of {settings.batch_size} "
        f"sequences of {settings.sequence_length} bytes in {settings.microbatches} microbatch(es)",
        f"graphs: {options.graph_config or 'none, eager'}; dispatcher {options.dispatcher}",
    )
    for line in lines:
        console.print(line, markup=False)


def _report_table(report: Report | FullIterationReport) -> Table:
    whole = isinstance(report, FullIterationReport)
    return full_iteration_table(report) if whole else capture_table(report)


def _device(name: str | None) -> torch.device:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("moe-graphs train runs on one process: start it without torchrun")
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: no CUDA device is available here: use --device cpu")
    return device


def _preset(name: str | None, device: torch.device) -> tuple[str, Preset]:
    known = presets()
    name = name or ("small" if device.type == "cuda" else "tiny")
    if name not in known:
        raise ValueError(f"preset: {name!r} is not one of {', '.join(known)}")
    return name, known[name]()


def _with_settings(preset: Preset, changes: dict[str, Any]) -> Preset:
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(preset, training=dataclasses.replace(preset.training, **given))


def _graph_config(
    impl: str, scopes: str | None, optimizer_in_graph: bool
) -> GraphConfig | FullIterationConfig | None:
    if impl == "full_iteration":
        if scopes is not None:
            raise ValueError(
                f"scopes: {scopes!r} with impl='full_iteration', which captures the whole step: "
                f"drop --scopes, or use --impl local"
            )
        return FullIterationConfig(optimizer_in_graph)
    if optimizer_in_graph:
        raise ValueError(
            f"optimizer_in_graph: impl={impl!r} has no graph of a step to put it in: use --impl "
            f"full_iteration"
        )
    config = GraphConfig(scopes or (DEFAULT_SCOPES if impl == "local" else None), impl)
    return None if config.impl == "none" else config


def _free_directory(parent: Path, name: str) -> Path:
    """``parent/name``, or ``name-2`` and so on: a run never writes over another."""
    candidates = (name if n == 1 else f"{name}-{n}" for n in range(1, 10_000))
    return next(parent / c for c in candidates if not (parent / c).exists())
