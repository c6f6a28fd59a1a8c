"""A whole run: build, resume, train, evaluate, save, sum up."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from moe_graphs.engine.report import Report
from moe_graphs.engine.whole_step.full_iteration import FullIterationReport
from moe_graphs.lm.building import RunOptions, build_batches, build_trainer, with_graphs
from moe_graphs.lm.checkpoint import checkpoints_of, load_checkpoint, model_of
from moe_graphs.lm.continued import save_for_others
from moe_graphs.lm.data import HeldOut, Text
from moe_graphs.lm.kept_settings import CONFIG, write_config
from moe_graphs.lm.metrics import compressed_bits_per_byte
from moe_graphs.lm.optimizers import states_of_8_bits
from moe_graphs.lm.picture import draw_losses
from moe_graphs.lm.restarts import mark_launch
from moe_graphs.lm.run_directory import (
    find_checkpoint,
    open_log,
    prepare_run_directory,
    settings_of,
)
from moe_graphs.lm.sample import Sample, sample_text
from moe_graphs.lm.termination import Terminated, termination
from moe_graphs.lm.trainer import LogLine, Trainer, TrainingDiverged
from moe_graphs.lm.workers import Workers, agent, check_equal, is_first, on_first
from moe_graphs.parallel.context_parallel import whole_sequences
from moe_graphs.profiling.communication_share import traced_communication
from moe_graphs.profiling.profiler import keep_profiler_ready

__all__ = [
    "Progress",
    "RunOptions",
    "Summary",
    "build_batches",
    "build_trainer",
    "deterministic",
    "free_memory",
    "run",
    "with_graphs",
]
_TRACED_AFTER = 10  # steps: graphs are captured, and no kernel is compiled any more


@dataclass(frozen=True)
class Summary:
    """Results of a run. ``report`` is the engine's, None for an eager run.

    Attributes:
        resumed_from: the checkpoint, None for a run from the start.
        differences: settings that differ from that checkpoint's, a line each.
        train_loss: mean of the last 20 steps, in nats per token.
        held_out_weights: "trained" or "averaged": the weights that were evaluated and wrote the
            samples.
        held_out_before: the loss of ``init`` in nats per token, None without one.
        tokens_per_second: by the median step; None if a resumed run had no steps left to do.
        seconds: time of training and saving, without the last evaluation.
    """

    steps: int
    train_loss: float
    held_out_bits_per_byte: float
    held_out_nats_per_token: float
    held_out_weights: str
    held_out_before: float | None
    compressors: dict[str, float]
    tokens_per_second: float | None
    seconds: float
    parameters: int
    dropped: int | None
    report: Report | FullIterationReport | None
    out: Path
    resumed_from: str | None
    differences: tuple[str, ...]
    samples: tuple[Sample, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out)}


@dataclass(frozen=True)
class Progress:
    """Functions that a run calls to tell its progress."""

    line: Callable[[LogLine], None]
    note: Callable[[str], None]


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Context in which torch chooses deterministic CUDA kernels, and raises if there is none.

    Flash attention's backward is the kernel that matters: it adds with atomics otherwise, and also
    under ``warn_only``. torch's flags are put back at the end.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    try:
        if enabled:
            # cuBLAS reads this variable when it starts; torch refuses to go on without it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # This setting would add a kernel to every torch.empty.
            settings.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


def run(options: RunOptions, text: Text, progress: Progress) -> Summary:
    """Trains to the last step, and leaves log, checkpoints, picture and summary in ``out``.

    If the model comes from ``init``, ``out/model`` is written as well, for transformers.

    Raises:
        ValueError: if ``out`` cannot be used, for instance because it holds another run.
        TrainingDiverged: if the loss is not finite any more, in training or on held-out text.
        Terminated: if SIGTERM came before the last step; the checkpoint of its step is written.
    """
    trainer = build_trainer(options, build_batches(options, text))
    if said := states_of_8_bits(trainer.model, trainer.settings):
        progress.note(said)
    if options.workers is not None:
        _agree(options.workers, trainer)
        keep_profiler_ready()
    held_out = _held_out(options, text)
    before = _loss_before(options, trainer, held_out, progress)
    differences = [] if options.resume is None else load_checkpoint(options.resume, trainer)
    on_first(options.workers, lambda: _prepare(options))
    for difference in differences:
        progress.note(f"resumed with another setting: {difference}")
    curve = [] if before is None else [(0, held_out.bits_per_byte(before))]
    began = time.perf_counter()
    with with_graphs(trainer, options.graph_config):
        curve += _train(options, trainer, held_out, differences, progress)
        report = trainer.report()
    seconds = time.perf_counter() - began
    weights = _weights(options)
    progress.note(f"evaluating {weights} weights on all held-out {text.held_out_documents.unit}")
    bits = trainer.bits_per_byte(held_out)
    if not math.isfinite(bits):
        raise TrainingDiverged(
            f"training diverged: {bits} bits per byte of held-out text after step {trainer.step}: "
            f"lower the learning rate"
        )
    compressors = compressed_bits_per_byte(text.held_out_content)
    if is_first(options.workers):
        _draw(options, text, trainer, [*curve, (trainer.step, bits)], compressors, progress)
    length = options.preset.model.max_sequence_length
    summary = Summary(
        held_out_weights=weights,
        held_out_bits_per_byte=bits,
        held_out_nats_per_token=held_out.nats_per_token(bits),
        held_out_before=before,
        compressors=compressors,
        seconds=seconds,
        report=report,
        out=options.out,
        resumed_from=str(options.resume) if options.resume else None,
        differences=tuple(differences),
        samples=_samples(trainer, text, length, progress),
        **_what_it_came_to(trainer),
    )
    on_first(options.workers, lambda: _leave(options, trainer, summary, progress))
    return summary


def _weights(options: RunOptions) -> str:
    return "trained" if options.preset.training.ema_decay is None else "averaged"


def _prepare(options: RunOptions) -> None:
    prepare_run_directory(options.out, options.resume)
    if options.recorded:
        write_config(options.recorded, options.out / CONFIG)
    mark_launch(options.out, [agent()] if options.workers is None else options.workers.agents)


def _agree(workers: Workers, trainer: Trainer) -> None:
    """Checks that all ranks have the same settings and the same text; they share the run's name."""
    trainer.run_id = workers.gather(trainer.run_id)[0]
    check_equal(settings_of(trainer), "give all ranks the same text and the same torch")


def _leave(options: RunOptions, trainer: Trainer, summary: Summary, progress: Progress) -> None:
    """Writes the files that are in the run's directory at its end."""
    if options.asked.output.save and options.init is not None:
        model = trainer.model
        if options.workers is not None:
            model = model_of(find_checkpoint(options.out), model.config, model.hf_values)
        path = save_for_others(model, options.tokenizer or options.init, options.out)
        progress.note(f"model: {path}{'' if _weights(options) == 'trained' else ', not averaged'}")
    content = json.dumps(summary.to_dict(), indent=1, allow_nan=False)
    (options.out / "summary.json").write_text(content + "\n")


def _held_out(options: RunOptions, text: Text) -> HeldOut:
    length = options.preset.training.sequence_length
    return HeldOut.of(text.held_out_documents, sequence_length=length, context=length // 2)


def _loss_before(
    options: RunOptions, trainer: Trainer, held_out: HeldOut, progress: Progress
) -> float | None:
    """Held-out loss of the weights of ``init``, also if a checkpoint is going to replace them."""
    if options.init is None:
        return None
    progress.note(f"evaluating {options.init} on all held-out tokens")
    loss = trainer.nats_per_token(held_out)
    if not math.isfinite(loss):
        raise ValueError(f"init: the held-out loss of {options.init} is {loss} before any step")
    bits = held_out.bits_per_byte(loss)
    progress.note(f"held out, before: {loss:.4f} nats per token, {bits:.4f} bits per byte")
    return loss


def _train(
    options: RunOptions,
    trainer: Trainer,
    held_out: HeldOut,
    differences: Sequence[str],
    progress: Progress,
) -> list[tuple[int, float]]:
    """Runs the loop around the steps; returns the held-out curve of the sample."""
    preset, steps = options.preset, options.preset.training.steps
    sample = held_out.sample(options.sample_tokens // preset.training.sequence_length)
    curve: list[tuple[int, float]] = []
    with (
        _log(options) as log,
        checkpoints_of(options.out, trainer) as save,
        termination(options.workers) as terminated,
    ):
        if options.resume:
            resumed = {"resumed_from": str(options.resume), "differences": differences}
            log.write(json.dumps({"step": trainer.step, **resumed}) + "\n")
        traced = trainer.step + _TRACED_AFTER
        every = options.asked.output.checkpoint_every
        evaluated = options.asked.output.evaluate_every or preset.evaluate_every
        while trainer.step < steps:
            if trainer.step + 1 == steps or (every and (trainer.step + 1) % every == 0):
                trainer.audit_soon()  # before a checkpoint, and at the end
            if options.workers is not None and trainer.step == traced:
                _trace_communication(trainer, log, progress)
            else:
                trainer.train_step()
            last = trainer.step == steps
            if terminated.is_due() and not last:
                break
            if last or trainer.step % preset.log_every == 0:
                line = trainer.log_line()
                log.write(json.dumps(asdict(line), allow_nan=False) + "\n")
                log.flush()
                progress.line(line)
            if not last and trainer.step % evaluated == 0:
                curve.append((trainer.step, trainer.bits_per_byte(sample)))
                found = f"{curve[-1][1]:.4f} bits per byte"
                progress.note(f"held out: {found} (sample, {_weights(options)} weights)")
            if options.asked.output.save and (last or (every and trainer.step % every == 0)):
                progress.note(f"checkpoint: {save()}")
        if trainer.step < steps and options.asked.output.save:
            save()
    if trainer.step < steps:
        raise Terminated(trainer.step, options.out, saved=options.asked.output.save)
    return curve


def _trace_communication(trainer: Trainer, log: TextIO, progress: Progress) -> None:
    """Makes a step and notes its communication, by the kernels on rank 0.

    This cannot see gloo's transfers.
    """
    if trainer.device.type != "cuda" or not is_first(trainer.workers):
        trainer.train_step()
        return
    found = traced_communication(trainer.train_step, trainer.device)
    log.write(json.dumps({"step": trainer.step, "communication": asdict(found)}) + "\n")
    progress.note(f"communication: {found} (step {trainer.step}, rank 0)")


def _samples(trainer: Trainer, text: Text, length: int, progress: Progress) -> tuple[Sample, ...]:
    if trainer.pipeline is None:
        by: dict[str, Any] = {"seed": trainer.settings.seed, "autocast": trainer.autocast}
        with whole_sequences(trainer.model), trainer.averaged():
            return sample_text(trainer.model, text, length=length, **by)
    progress.note("samples: none, a pipeline writes no text: resume the checkpoint without --pp")
    return ()


def _log(options: RunOptions) -> contextlib.AbstractContextManager[TextIO]:
    return open_log(options.out) if is_first(options.workers) else open(os.devnull, "w")


def _draw(
    options: RunOptions,
    text: Text,
    trainer: Trainer,
    curve: Sequence[tuple[int, float]],
    compressors: dict[str, float],
    progress: Progress,
) -> None:
    path, bytes_per_token = options.out / "train.png", text.train_documents.bytes_per_token
    missing = draw_losses(
        path,
        title=f"{trainer.whole.num_parameters() / 1e6:.1f}M parameters on {text.source}",
        train_nats=[nats / bytes_per_token for nats in trainer.history.loss.tolist()],
        held_out_bits=curve,
        compressors=compressors,
    )
    progress.note(missing or f"picture: {path}")


def _what_it_came_to(trainer: Trainer) -> dict[str, Any]:
    times = trainer.clock.milliseconds
    rate = 1e3 * trainer.settings.tokens_per_step / statistics.median(times) if times else None
    return {
        "steps": trainer.step,
        "train_loss": trainer.history.loss[-20:].mean().item(),
        "tokens_per_second": rate,
        "parameters": trainer.whole.num_parameters(),
        "dropped": trainer.total_dropped(),
    }


def free_memory(device: torch.device) -> None:
    """Frees everything that nobody refers to, and starts the peak statistics anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
