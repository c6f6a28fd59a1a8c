"""Eager against graphed: the same steps from the same seed, one run after the other."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.engine.report import Report
from moe_graphs.engine.whole_step.full_iteration import FullIterationReport
from moe_graphs.kernels.local_part import local_part
from moe_graphs.lm.data import Text
from moe_graphs.lm.run import (
    Progress,
    RunOptions,
    build_batches,
    build_trainer,
    free_memory,
    with_graphs,
)
from moe_graphs.report_tables import format_bytes


@dataclass(frozen=True)
class Side:
    """Results of one of the two runs.

    Attributes:
        step_ms, p10_ms, p90_ms: median and spread over the timed steps, which are those after
            warm-up and capture.
        reserved_bytes: memory; ``memory_kind`` says of which kind.
        losses: losses of every step, fp32 values.
    """

    step_ms: float
    p10_ms: float
    p90_ms: float
    timed_steps: int
    reserved_bytes: int
    memory_kind: str
    dropped: int | None
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Results of both runs, and the report of the second one's graphs."""

    eager: Side
    graphed: Side
    losses_bitwise_equal: bool
    grad_norms_bitwise_equal: bool
    first_difference: int | None
    parameters_bitwise_equal: bool
    report: Report | FullIterationReport

    def to_dict(self) -> dict[str, Any]:
        report = self.report
        captured = report.captures if isinstance(report, FullIterationReport) else report.captured
        return {
            **dataclasses.asdict(self),
            "captured": captured,
            "replayed": report.replayed,
            "audited": report.audited,
            "eager_calls": dict(report.eager_calls),
        }


def compare(options: RunOptions, text: Text, progress: Progress) -> Comparison:
    """Runs both from the seed, each on a model of its own. Nothing is saved.

    Raises:
        ValueError: if no step is left to be timed, or a run is to be resumed.
        TrainingDiverged: if a loss is not finite, because nothing would be left to compare.
    """
    if options.resume is not None:
        raise ValueError("resume: a comparison trains both from the seed: drop one of the two")
    config = options.graph_config
    if config is None or (isinstance(config, GraphConfig) and config.impl == "none"):
        raise ValueError(
            "impl: 'none' leaves nothing to compare with: choose 'local' or 'full_iteration'"
        )
    skipped = config.warmup_steps + 2
    if options.preset.training.steps <= skipped:
        raise ValueError(
            f"steps: {options.preset.training.steps} leaves none to time after {skipped} of "
            f"warm-up and capture: use at least {skipped + 10}"
        )
    eager, eager_weights, _ = _one_side(options, text, None, skipped, progress)
    graphed, graphed_weights, report = _one_side(options, text, config, skipped, progress)
    assert report is not None
    pairs = zip(eager.losses, graphed.losses, strict=True)
    differing = [step for step, (left, right) in enumerate(pairs, 1) if left != right]
    same, workers = all(map(torch.equal, eager_weights, graphed_weights)), options.workers
    return Comparison(
        eager=eager,
        graphed=graphed,
        losses_bitwise_equal=not differing,
        grad_norms_bitwise_equal=eager.grad_norms == graphed.grad_norms,
        first_difference=differing[0] if differing else None,
        parameters_bitwise_equal=same if workers is None else all(workers.gather(same)),
        report=report,
    )


def _one_side(
    options: RunOptions,
    text: Text,
    config: GraphConfig | FullIterationConfig | None,
    skipped: int,
    progress: Progress,
) -> tuple[Side, list[torch.Tensor], Report | FullIterationReport | None]:
    progress.note("eager" if config is None else f"graphed: {config}")
    free_memory(options.device)
    trainer = build_trainer(options, build_batches(options, text))
    with with_graphs(trainer, config):
        steps = trainer.settings.steps
        while trainer.step < steps:
            trainer.train_step()
            if trainer.step % options.preset.log_every == 0 or trainer.step == steps:
                progress.line(trainer.log_line())
        memory = trainer.memory()
        report = trainer.report()
    times = sorted(trainer.clock.milliseconds[skipped:])
    side = Side(
        step_ms=statistics.median(times),
        p10_ms=times[len(times) // 10],
        p90_ms=times[(9 * len(times)) // 10],
        timed_steps=len(times),
        reserved_bytes=memory.bytes,
        memory_kind=memory.kind,
        dropped=trainer.total_dropped(),
        losses=tuple(trainer.history.loss.tolist()),
        grad_norms=tuple(trainer.history.grad_norm.tolist()),
    )
    return side, [local_part(p.detach()).cpu() for p in trainer.model.parameters()], report


# ---- what the command prints


def comparison_table(comparison: Comparison) -> Table:
    """Table of eager and graphed, side by side."""
    table = Table(title="eager and graphed, same seed", title_justify="left")
    for heading in ("", "eager", "graphed", "graphed / eager"):
        table.add_column(heading, justify="right" if heading else "left")
    eager, graphed = comparison.eager, comparison.graphed
    ratio = f"{graphed.step_ms / eager.step_ms:.3f}"
    table.add_row("time per step, median", _ms(eager), _ms(graphed), ratio)
    table.add_row("p10 to p90", _spread(eager), _spread(graphed), "")
    table.add_row(
        f"memory ({eager.memory_kind})",
        format_bytes(eager.reserved_bytes),
        format_bytes(graphed.reserved_bytes),
        f"{graphed.reserved_bytes / eager.reserved_bytes:.3f}",
    )
    if eager.dropped is not None:
        table.add_row("dropped", f"{eager.dropped:,}", f"{graphed.dropped:,}", "")
    table.caption = verdict(comparison)
    table.caption_justify = "left"
    return table


def verdict(comparison: Comparison) -> str:
    """Sentence that says whether the two runs agree bit for bit."""
    steps = len(comparison.eager.losses)
    first = comparison.first_difference
    if first is not None:
        pair = [side.losses[first - 1] for side in (comparison.eager, comparison.graphed)]
        return f"losses DIFFER, first at step {first} of {steps}: {pair[0]!r} and {pair[1]!r}"
    others = {
        "gradient norms": comparison.grad_norms_bitwise_equal,
        "final parameters": comparison.parameters_bitwise_equal,
    }
    equal = ["losses", *(name for name, same in others.items() if same)]
    unequal = [name for name, same in others.items() if not same]
    text = f"{', '.join(equal)} bitwise equal over {steps} steps"
    return f"{text}; {', '.join(unequal)} DIFFER" if unequal else text


def _ms(side: Side) -> str:
    return f"{side.step_ms:,.2f} ms"


def _spread(side: Side) -> str:
    return f"{side.p10_ms:,.2f} to {side.p90_ms:,.2f} ms"
