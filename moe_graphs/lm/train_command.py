"""The command ``moe-graphs train``: its run, and the lines that it prints."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moe_graphs.engine.report import Report
from moe_graphs.engine.whole_step.full_iteration import FullIterationReport
from moe_graphs.errors import GraphError
from moe_graphs.layers.model_config import TransformerConfig
from moe_graphs.lm import run as training_run
from moe_graphs.lm.chosen_kernels import with_kernels
from moe_graphs.lm.compare import compare, comparison_table
from moe_graphs.lm.continued import continued_preset
from moe_graphs.lm.data import Documents, Text, corpus_at, standard_library
from moe_graphs.lm.fastest_way import Situation, Way, choose, no_peers
from moe_graphs.lm.kept_settings import Kept, check_text, recorded
from moe_graphs.lm.legal_layouts import check_options
from moe_graphs.lm.option_values import (
    device_of,
    dtype_of,
    memory_errors,
    preset_of,
    with_settings,
)
from moe_graphs.lm.options import GraphOptions, TrainOptions, TrainSettings
from moe_graphs.lm.restarts import directories
from moe_graphs.lm.run_directory import prepare_run_directory
from moe_graphs.lm.run_presets import Preset
from moe_graphs.lm.tokenized import load_tokenizer, tokenize
from moe_graphs.lm.trainer import LogLine, TrainingDiverged
from moe_graphs.lm.workers import Workers, agent, is_first, on_first
from moe_graphs.report_tables import capture_table, full_iteration_table
from moe_graphs.terminal import make_console, print_json

EXPECTED = (ValueError, OSError, MemoryError, GraphError, TrainingDiverged, ImportError)
"""Errors that end a run with a line that says what to do, instead of a traceback."""


def train(workers: Workers | None, options: TrainOptions, kept: Kept | None) -> None:
    """Runs the command.

    Args:
        workers: the ranks that this process is one of, each called with these options.
        kept: what ``--resume`` has kept of its run, if there is one.
    """
    quiet = Console(quiet=True)
    console = make_console(stderr=options.output.json) if is_first(workers) else quiet
    with memory_errors():
        where = device_of(options.numerics.device) if workers is None else workers.device
        name, chosen = _chosen(options, where)
        chosen = with_kernels(chosen, options.model, where)
        chosen, said = with_settings(chosen, options.training)
        if kept is not None:
            console.print(kept.said, markup=False)
        way = _way(workers, chosen, dtype_of(options.numerics.dtype), options.graphs)
        agents = [agent()] if workers is None else workers.agents
        asked = options.output.out, options.output.resume
        out, resume = on_first(workers, lambda: directories(*asked, name, agents))
        run = training_run.RunOptions(
            preset=chosen,
            device=where,
            graph_config=way.graph_config,
            dispatcher=way.dispatcher,
            out=out,
            resume=resume,
            asked=options,
            workers=workers,
            recorded=_recorded(options, workers, name, chosen.training),
        )
        check_options(run, way.problems)
        text = _text(run, console, keep=not options.output.compare)
        check_text(kept, text.train_documents.identity["text"], text.source)
        _describe(console, run, text, name, way, said)
        with training_run.deterministic(options.numerics.deterministic and where.type == "cuda"):
            document = (_compare if options.output.compare else _run)(run, text, console)
        if options.output.json and is_first(workers):
            print_json(document)


def _run(options: training_run.RunOptions, text: Text, console: Console) -> dict[str, Any]:
    total = options.preset.training.steps
    with _progress(console, total) as progress:
        summary = training_run.run(options, text, progress)
    if summary.report is not None:
        console.print(_report_table(summary.report))
    baselines = ", ".join(f"{name} {bits:.4f}" for name, bits in summary.compressors.items())
    for sample in summary.samples:
        line = f"sample at {sample.temperature:g}: {sample.prompt!r} -> {sample.continuation!r}"
        console.print(line, markup=False)
    if summary.held_out_before is not None:
        before, after = summary.held_out_before, summary.held_out_nats_per_token
        console.print(f"held out: {before:.4f} nats per token before, {after:.4f} after")
    console.print(
        f"held out: {summary.held_out_bits_per_byte:.4f} bits per byte after {summary.steps} "
        f"steps, {summary.seconds:.0f} s, of {summary.held_out_weights} weights ({baselines})"
    )
    console.print(f"run: {summary.out}")
    return summary.to_dict()


def _compare(options: training_run.RunOptions, text: Text, console: Console) -> dict[str, Any]:
    with _progress(console, 2 * options.preset.training.steps) as progress:
        comparison = compare(options, text, progress)
    console.print(_report_table(comparison.report))
    console.print(comparison_table(comparison))
    return comparison.to_dict()


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[training_run.Progress]:
    """Context with log lines above a progress bar; without a terminal only the lines."""
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


def _text(options: training_run.RunOptions, console: Console, *, keep: bool) -> Text:
    """The text as the model sees it: bytes, or with ``init`` the tokens of its tokenizer.

    Tokens are kept in a file beside the run.
    """
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    data = options.asked.text.data
    corpus = corpus_at(data) if data else standard_library()
    if tokenizer is None:
        return corpus
    if keep:
        on_first(options.workers, lambda: prepare_run_directory(options.out, options.resume))
    began = time.perf_counter()

    def tokenized() -> tuple[Text, Path | None]:
        return tokenize(
            corpus,
            tokenizer,
            vocab_size=options.preset.model.vocab_size,
            sequence_length=options.preset.training.sequence_length,
            write=options.out if keep else None,
            read=[options.out, *([options.resume.resolve().parents[1]] if options.resume else [])],
        )

    with console.status("tokenising"):
        if keep and options.workers is not None:
            on_first(options.workers, lambda: tokenized() and None)
        text, path = tokenized()
    console.print(
        f"tokens: {path or f'made in {time.perf_counter() - began:.1f} s'}, of the tokenizer at "
        f"{options.tokenizer}; {tokenizer.separator_token!r} between documents",
        markup=False,
    )
    return text


def _describe(
    console: Console,
    options: training_run.RunOptions,
    text: Text,
    name: str,
    way: Way,
    adapted: Sequence[str],
) -> None:
    skipped = ", ".join(f"{count} {reason}" for reason, count in text.skipped.items()) or "none"
    settings, unit = options.preset.training, text.train_documents.unit
    model, within = options.preset.model, options.asked.text.attention_within_documents
    batches = training_run.build_batches(options, text)
    source = "checkpoint" if options.init else "preset"
    dense = map(model.precision_of, range(model.num_layers))
    ranks = [] if options.workers is None else [f"layout: {options.workers.described()}"]
    lines = (
        *ranks,
        f"text: {text.source}: {_amount(text.train_documents)} to train on; "
        f"{_amount(text.held_out_documents)} held out; left out: {skipped}",
        f"{source} {name} on {options.device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} CPU threads: {settings.steps} steps of {settings.batch_size} "
        f"sequences of {settings.sequence_length} {unit} in {settings.microbatches} microbatch(es)",
        f"attention: within {'documents' if within else 'sequences, across documents'}",
        f"epochs: {batches.batches_per_epoch} steps each; the last {batches.left_over} {unit} of "
        f"an epoch fill no batch, and the next epoch has others there",
        *adapted,
        f"learning rate: {settings.learning_rate:g} after {settings.warmup_steps} steps, then down "
        f"to {settings.final_fraction:g} of it",
        f"loss: {_loss(settings)}",
        f"precision: {options.precision}",
        str(way),
        f"kernels: experts {_experts(model)}, linear {model.linear}{_in_fp8(*dense)}, "
        f"fp8 {options.asked.model.fp8}; optimizer {settings.optimizer}"
        f"{_update(settings)}",
    )
    for line in lines:
        console.print(line, markup=False)


def _loss(settings: TrainSettings) -> str:
    """The training loss in words; held-out text is measured without the additions."""
    added = {"label smoothing": settings.label_smoothing, "z-loss": settings.z_loss}
    said = [f"{name} {value:g}" for name, value in added.items() if value]
    return f"cross entropy by chunks of logits, {', '.join(said) or 'nothing'} added"


def _experts(model: TransformerConfig) -> str:
    if model.moe is None:
        return "none"
    return f"{model.moe.experts}{_in_fp8(model.moe.precision)}"


def _in_fp8(*precisions: str) -> str:
    return " in FP8" * (set(precisions) != {"weights"})


def _update(settings: TrainSettings) -> str:
    """Options in which the optimizer differs from torch's, in words."""
    rounding = "rounded stochastically" if settings.stochastic_rounding else ""
    decay = settings.ema_decay
    averages = "" if decay is None else f"weights averaged with a decay of {decay:g}"
    states = settings.optimizer_state
    dtypes = "" if states == "parameter" else f"states in {states}"
    when = "updates within the backward" if settings.update_in_backward else ""
    return "".join(f", {said}" for said in (dtypes, rounding, averages, when) if said)


def _amount(documents: Documents) -> str:
    megabytes = (documents.content_bytes - len(documents)) / 1e6
    tokens = "" if documents.unit == "bytes" else f", {len(documents.ids_T):,} {documents.unit}"
    return f"{len(documents)} documents, {megabytes:.2f} MB{tokens}"


def _report_table(report: Report | FullIterationReport) -> Table:
    whole = isinstance(report, FullIterationReport)
    return full_iteration_table(report) if whole else capture_table(report)


def _chosen(options: TrainOptions, device: torch.device) -> tuple[str, Preset]:
    """The model and how to train it, with a name for the run."""
    preset, init, tokenizer = options.model.preset, options.model.init, options.text.tokenizer
    if init is None:
        if tokenizer is not None:
            raise ValueError(
                f"tokenizer: {tokenizer} without --init: models from the seed are trained on "
                f"bytes: drop it, or name a checkpoint"
            )
        return preset_of(preset, device)
    if preset is not None:
        raise ValueError(f"preset: {preset!r} with --init, which has sizes of its own: drop one")
    steps = options.training.get("steps")
    return init.resolve().name, continued_preset(
        init, **({} if steps is None else {"steps": steps})
    )


def _recorded(
    options: TrainOptions, workers: Workers | None, preset: str, training: TrainSettings
) -> dict[str, Any]:
    """The options, with the numbers that the preset has chosen."""
    trained = dataclasses.asdict(training)
    record = recorded(options, 1 if workers is None else workers.count)
    named = None if options.model.init else options.model.preset or preset
    return {name: trained.get(name, value) for name, value in record.items()} | {"preset": named}


def _way(workers: Workers | None, chosen: Preset, dtype: torch.dtype, asked: GraphOptions) -> Way:
    situation = Situation(model=chosen.model)
    if workers is not None:
        layout, fsdp = workers.layout, workers.fsdp
        situation = Situation(model=chosen.model, layout=layout, fsdp=fsdp)
        if asked.dispatcher is None:
            reason = no_peers(workers, chosen.model, dtype)
            situation = dataclasses.replace(situation, no_peers=reason)
    return choose(asked, situation)
