"""The command ``moe-graphs profile``: one training step, run in several ways, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console

from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.engine.whole_step.full_iteration import FullIterationReport
from moe_graphs.errors import GraphError
from moe_graphs.lm import run as training_run
from moe_graphs.lm.chosen_kernels import with_kernels
from moe_graphs.lm.data import Text, corpus_at, standard_library
from moe_graphs.lm.fastest_way import default_scopes
from moe_graphs.lm.option_values import device_of, memory_errors, preset_of, with_settings
from moe_graphs.lm.options import ProfileOptions, TrainOptions
from moe_graphs.lm.step_floors import step_floors
from moe_graphs.lm.trainer import Trainer, autocast_of
from moe_graphs.profiling.floors import Floor, Rates, measure_rates
from moe_graphs.profiling.profile_picture import draw_profiles
from moe_graphs.profiling.profile_table import profile_table
from moe_graphs.profiling.profiler import keep_profiler_ready, profile_step
from moe_graphs.profiling.step_profile import StepProfile
from moe_graphs.report_tables import format_reasons
from moe_graphs.terminal import errors_in_a_line, make_console, print_json

_STEPS = 1000  # of the trainer's schedule: more than are profiled
# On the CPU, recordings split the work of other groups among elementwise, copies and indexing.
_WHOLE_IN_RECORDINGS = ("dense GEMM", "grouped GEMM", "attention", "cross entropy")
_PICTURES = (".png", ".svg", ".pdf", ".jpg")
Config = GraphConfig | FullIterationConfig | None


def profile(asked: ProfileOptions) -> None:
    """Runs the command."""
    console = make_console(stderr=asked.output.json)
    dispatcher = asked.graphs.dispatcher or training_run.RunOptions.dispatcher
    impl, optimizer_in_graph = asked.model.impl, asked.model.optimizer_in_graph
    data, trace, out = asked.text.data, asked.output.trace, asked.output.out
    with errors_in_a_line(ImportError), memory_errors():
        where = device_of(asked.numerics.device)
        name, chosen = preset_of(asked.model.preset, where)
        chosen = with_kernels(chosen, asked.model, where)
        options = training_run.RunOptions(
            preset=with_settings(chosen, {**asked.training, "steps": _STEPS})[0],
            device=where,
            graph_config=None,
            dispatcher=dispatcher,
            asked=TrainOptions(model=asked.model, numerics=asked.numerics, text=asked.text),
        )
        scopes = default_scopes(chosen.model, dispatcher)
        ways = parse_ways(impl, optimizer_in_graph, scopes)
        _check_files(trace, out)
        machine = torch.cuda.get_device_name(where) if where.type == "cuda" else "the CPU"
        title = f"preset {name} on {machine}, torch {torch.__version__}: {_sizes(options)}"
        if asked.text.attention_within_documents:
            title += ", attention within documents"
        console.print(f"step of {title}", markup=False)
        text = corpus_at(data) if data else standard_library()
        keep_profiler_ready()
        with training_run.deterministic(asked.numerics.deterministic and where.type == "cuda"):
            rates = measure_rates(where)
            console.print(rates.describe(), markup=False)
            profiles = [
                _one_way(options, text, way, config, rates, _trace_file(trace, way, ways), console)
                for way, config in ways.items()
            ]
        console.print(profile_table(profiles))
        if where.type == "cpu" and any(ways.values()):
            console.print(
                "graphs on the CPU run ATen's operators without the names around them: norms, "
                "swiglu, rotary and permute are among elementwise, copies and indexing there"
            )
        if out is not None:
            missing = draw_profiles(out, profiles, title=title)
            console.print(missing or f"picture: {out}", markup=False)
        if asked.output.json:
            print_json({"setting": title, "profiles": [each.to_dict() for each in profiles]})


def parse_ways(impl: str, optimizer_in_graph: bool, local: str) -> dict[str, Config]:
    """Configs by the names in a text such as ``none,attn+moe,full_iteration``, in its order.

    Raises:
        ValueError: if a name is no way to run a step, or if one is listed twice.
    """
    ways: dict[str, Config] = {}
    names = [name.strip() for name in impl.split(",") if name.strip()]
    if not names:
        raise ValueError("impl: name at least one of none, full_iteration, and scopes (attn+moe)")
    for name in names:
        if name in ways:
            raise ValueError(f"impl: {name!r} is listed twice: list it once")
        if name == "none":
            ways[name] = None
        elif name == "full_iteration":
            ways[name] = FullIterationConfig(optimizer_in_graph, audit_every=None)
        else:
            scopes = local if name == "local" else name.replace("+", ",")
            try:
                ways[name] = GraphConfig(scopes, audit_every=None)
            except ValueError as error:
                known = "none, local, full_iteration, or scopes joined by +"
                raise ValueError(f"impl: {name!r} is not one of {known}: {error}") from error
    if optimizer_in_graph and "full_iteration" not in ways:
        raise ValueError("optimizer_in_graph: no full_iteration in impl: add it, or drop the flag")
    return ways


def _one_way(
    options: training_run.RunOptions,
    text: Text,
    name: str,
    config: Config,
    rates: Rates,
    trace: Path | None,
    console: Console,
) -> StepProfile:
    training_run.free_memory(options.device)
    trainer = training_run.build_trainer(options, training_run.build_batches(options, text))
    with training_run.with_graphs(trainer, config):
        for _ in range(3 if config is None else config.warmup_steps + 2):
            trainer.train_step()
        _check_captured(trainer, name)
        found = profile_step(
            trainer.train_step,
            name=name,
            device=options.device,
            rates=rates,
            floors=_floors(options, trainer, replayed=config is not None),
            trace=trace,
        )
        report = trainer.report()
    if trace is not None:
        console.print(f"trace of {name}: {trace}", markup=False)
    if report is not None:
        console.print(
            f"{name}: replayed {report.replayed:,}, eager calls: "
            f"{format_reasons(report.eager_calls)}",
            markup=False,
        )
    return found


def _floors(
    options: training_run.RunOptions, trainer: Trainer, *, replayed: bool
) -> Mapping[str, Floor]:
    kind = options.device.type
    with autocast_of(options.device):
        mixed = torch.is_autocast_enabled(kind)
        computed = torch.get_autocast_dtype(kind) if mixed else options.dtype
    floors = step_floors(
        trainer.model,
        trainer.settings,
        compute_dtype=computed,
        local=options.dispatcher == "local",
    )
    if kind == "cpu" and replayed:
        return {name: floors[name] for name in _WHOLE_IN_RECORDINGS if name in floors}
    return floors


def _check_captured(trainer: Trainer, name: str) -> None:
    report = trainer.report()
    if report is None:
        return
    captured = report.captures if isinstance(report, FullIterationReport) else report.captured
    if not captured or not report.replayed:
        reasons = format_reasons(report.eager_calls)
        raise GraphError(f"{name}: nothing is replayed after the warm-up: eager calls: {reasons}")


def _trace_file(trace: Path | None, way: str, ways: Mapping[str, Config]) -> Path | None:
    """The file of one way's trace: with several ways, its name stands before the ending."""
    if trace is None or len(ways) == 1:
        return trace
    stem, dot, ending = trace.name.partition(".")
    return trace.with_name(f"{stem}_{way}{dot}{ending}")


def _check_files(trace: Path | None, picture: Path | None) -> None:
    for file in (trace, picture):
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"{file}: there is no directory {file.parent}: make it first")
    if picture is not None and picture.suffix not in _PICTURES:
        raise ValueError(f"out: {picture} is no picture: end its name in {', '.join(_PICTURES)}")
    if trace is not None and not trace.name.endswith((".json", ".json.gz")):
        raise ValueError(f"trace: {trace}: end its name in .json or .json.gz")


def _sizes(options: training_run.RunOptions) -> str:
    settings = dataclasses.asdict(options.preset.training)
    return (
        f"{settings['batch_size']} sequences of {settings['sequence_length']} tokens in "
        f"{settings['microbatches']} microbatch(es), parameters in {options.dtype}, dispatcher "
        f"{options.dispatcher}, optimizer {settings['optimizer']}"
    )
