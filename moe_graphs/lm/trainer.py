"""The training loop: one optimizer step after the other, without waiting for the device.

B sequences in a microbatch, S sequence length, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moe_graphs import routing
from moe_graphs.config import FullIterationConfig
from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.nonfinite import find_nonfinite
from moe_graphs.engine.partial.graphs import Graphs
from moe_graphs.engine.report import Report
from moe_graphs.engine.whole_step.full_iteration import FullIteration, FullIterationReport
from moe_graphs.integrations.transformer_engine import back_to_fp8
from moe_graphs.layers import LanguageModel, ModelLoss
from moe_graphs.layers.documents import documents_between
from moe_graphs.layers.moe import moe_layers
from moe_graphs.lm.data import HeldOut, TrainingBatches
from moe_graphs.lm.metrics import Memory, StepClock, memory_in_use, peak_flops
from moe_graphs.lm.optimizers import build_optimizer
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.workers import Workers
from moe_graphs.optim import AdamW
from moe_graphs.parallel import Pipeline
from moe_graphs.parallel.parallelize import free_gathered
from moe_graphs.parallel.replicated import sum_gradients
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.update_in_backward import UpdateInBackward
from moe_graphs.weight_codes import unchanged_weights

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class LogLine:
    """Numbers of the log after step ``step``; speeds are means since the line before.

    Attributes:
        mfu: share of the device's peak, None if the peak is not known.
        dropped: routed rows dropped since the line before, None if the dispatcher never drops.
        max_over_mean: the largest load of an expert over the mean, in the worst layer, since the
            line before; None if the model has no experts.
        unused_experts: experts that no token has chosen since the line before, over all layers.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    memory: Memory
    tokens_per_second: float
    tflops: float
    mfu: float | None
    dropped: int | None
    max_over_mean: float | None
    unused_experts: int | None

    def __str__(self) -> str:
        mfu = "-" if self.mfu is None else f"{100 * self.mfu:.1f}%"
        dropped = "" if self.dropped is None else f"  dropped: {self.dropped:,}"
        return (
            f"step: {self.step:5d}  loss: {self.loss:.4f}  grad_norm: {self.grad_norm:.3f}  "
            f"memory: {self.memory}  tps: {self.tokens_per_second:,.0f}  "
            f"tflops: {self.tflops:,.3g}  mfu: {mfu}{dropped}{self._load()}"
        )

    def _load(self) -> str:
        if self.max_over_mean is None:
            return ""
        return f"  max/mean load: {self.max_over_mean:.2f}  unused experts: {self.unused_experts}"


@dataclass(frozen=True)
class History:
    """Results of every step, on the model's device: ``[steps]`` each, NaN before its step.

    A step writes its entries without a host sync; reading them is the only wait of the loop.
    """

    loss: Tensor
    grad_norm: Tensor
    dropped: Tensor

    @classmethod
    def empty(cls, steps: int, device: torch.device) -> History:
        unknown = torch.full((steps,), float("nan"), device=device)
        return cls(unknown, unknown.clone(), torch.zeros(steps, dtype=torch.int64, device=device))


@dataclass(frozen=True)
class RanksLine(LogLine):
    """Line of the log about several ranks together.

    Memory is that of the rank with most, times are of rank 0.
    """

    ranks: int
    tokens_per_second_per_rank: float

    def __str__(self) -> str:
        return f"{super().__str__()}  tps_per_rank: {self.tokens_per_second_per_rank:,.0f}"


class TrainingDiverged(RuntimeError):
    """The loss or the gradient norm is not finite any more."""


class Trainer:
    """Trains ``model`` (anything with ``LanguageModel``'s outputs) on ``batches``.

    Args:
        graphs: the handle that ``moe_graphs.graph(model, ...)`` returned, or None for eager
            training.
        drops_tokens: whether the model's dispatcher may drop rows, which the log line then says.
        surroundings: other facts that the numbers depend on, as JSON values by name. A checkpoint
            holds them, and a resumed run says which of them differ.
        options: options of the command, as JSON values by name. A checkpoint holds them, and the
            command keeps them when it resumes.
        fp8_autocast: makes Transformer Engine's context around the whole step; by default none.
            Evaluation is outside of it, in bf16, so evaluation leaves the scales of FP8 as they are
            and takes sequences of any length.
        autocast: makes the context of every forward (default: ``autocast_of`` the device).
        workers: the ranks that train together. ``parallelize`` has sharded the model for them, or
            ``replicate`` has shared its experts.
        pipeline: runs the stages of this rank, if the ranks are a pipeline. ``model`` is then what
            ``pipeline_stages`` has left.
        find_nan: whether each step looks for the first operation with a value that is not finite.
        separator: the token that begins each document, if tokens see their own document only.

    Attributes:
        watch: counters of the load of experts, None if the model has none.
        whole: the model, for its names and sizes; in a pipeline on the meta device.
        run_id: identity of the run that its checkpoints belong to; a resumed trainer takes it over.
        full_iteration: set by ``capture_full_iteration``, and to None to train eagerly again.
        first_graphed_step: the number of steps before the graphs were made.
    """

    def __init__(
        self,
        model: LanguageModel,
        batches: TrainingBatches,
        settings: TrainSettings,
        *,
        graphs: Graphs | None = None,
        drops_tokens: bool = False,
        surroundings: Mapping[str, Any] = MappingProxyType({}),
        options: Mapping[str, Any] = MappingProxyType({}),
        fp8_autocast: Autocast = contextlib.nullcontext,
        autocast: Autocast | None = None,
        workers: Workers | None = None,
        pipeline: Pipeline | None = None,
        find_nan: bool = False,
        separator: int | None = None,
    ) -> None:
        self.model, self.batches, self.settings, self.graphs = model, batches, settings, graphs
        self.drops_tokens, self.surroundings = drops_tokens, surroundings
        self.options = options
        self.fp8_autocast, self.workers, self.pipeline = fp8_autocast, workers, pipeline
        self.run_id, self.first_graphed_step = uuid.uuid4().hex, 0
        some = next(model.parameters())
        self.device = some.device
        self.autocast = autocast or functools.partial(autocast_of, self.device)
        self.whole = model
        if pipeline is not None:
            self.whole = LanguageModel(model.config, device="meta", dtype=some.dtype)
        self.optimizer = build_optimizer(model, settings)
        self.device_step = DeviceStep(
            self.optimizer,
            clip_norm=settings.clip_norm,
            stage_group=None if workers is None or pipeline is None else workers.stage_group,
            set_to_none=True,
        )
        self.updates: UpdateInBackward | None = None
        if settings.update_in_backward:
            self.updates = UpdateInBackward(self.optimizer, settings.clip_norm)
        self.full_iteration: FullIteration[Any, Any] | None = None
        self.optimizer_in_graph, self.find_nan, self.separator = False, find_nan, separator
        self.history = History.empty(settings.steps, self.device)
        self.watch = routing.watch(model) if moe_layers(model) else None
        self.clock = StepClock(self.device)
        self.step = 0
        self.first_unlogged_step = 0
        self.settled_step = 0

    def train_step(self) -> None:
        """Runs one optimizer step. It enqueues work and returns; nothing is read back."""
        index, settings = self.step, self.settings
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"].fill_(settings.learning_rate_at(index))
        self.clock.start()
        windows = self.batches.batch(index)
        if self.workers is not None:
            windows = self.workers.part_of(windows, settings.microbatches)
        tokens = self._to_device(windows)
        with self.fp8_autocast():
            run = self._find_nonfinite if self.find_nan else self._graphed
            loss, dropped, norm = run(tokens)
        self.history.loss[index] = loss
        self.history.grad_norm[index] = norm
        self.history.dropped[index] = dropped
        self.clock.stop()
        self.step = index + 1

    def _graphed(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        results = (self.full_iteration or self.forward_backward)(tokens)
        return results if self.optimizer_in_graph else (*results, self.update())

    def _find_nonfinite(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the step; a NaN ends training with the first operation that has one."""
        paused = self.graphs.paused() if self.graphs is not None else contextlib.nullcontext()

        def eagerly() -> tuple[Tensor, Tensor, Tensor]:
            with paused:
                return self.forward_backward_update(tokens)

        def anywhere(here: bool) -> bool:
            return any(self.workers.gather(here)) if self.workers is not None else here

        return find_nonfinite(
            functools.partial(self._graphed, tokens),
            eagerly,
            model=self.model,
            backend=backend_for(self.model.parameters()),
            optimizers=[self.optimizer],
            state=self._state_of_updates(),
            anywhere=anywhere,
        )

    def _state_of_updates(self) -> list[Any]:
        return [self.device_step] if self.updates is None else [self.updates]

    def capture_full_iteration(self, config: FullIterationConfig) -> FullIteration[Any, Any]:
        """Makes steps a graph from now on, captured after the warm-up. The caller releases it."""
        within = config.optimizer_in_graph
        self.full_iteration = FullIteration(
            self.forward_backward_update if within else self.forward_backward,
            model=self.model,
            optimizer=self.optimizer if within else None,
            state=[
                *(self._state_of_updates() if within else []),
                *([self.pipeline.memory] if self.pipeline is not None else []),
            ],
            warmup_steps=config.warmup_steps,
            audit_every=config.audit_every,
            on_audit=config.on_audit,
        )
        self.optimizer_in_graph, self.first_graphed_step = within, self.step
        return self.full_iteration

    def audit_soon(self) -> None:
        """Lets the graphs of the next step be audited."""
        engine = self.full_iteration or self.graphs
        if engine is not None:
            engine.audit_soon()

    def audits(self) -> dict[str, Any]:
        """Results of the audits since the graphs were made; empty when training eagerly.

        ``last_audited_step`` is a step of the run. Waits for the device.
        """
        report = self.report()
        if report is None:
            return {}
        last = report.last_audited_step
        return {
            "last_audited_step": None if last is None else self.first_graphed_step + last,
            "audited": report.audited,
            "passed": report.audits_passed,
            "skipped": report.audits_skipped,
            "seconds": round(report.audit_seconds, 3),
        }

    def report(self) -> Report | FullIterationReport | None:
        """Report of the graphs so far; None when training eagerly."""
        engine = self.full_iteration or self.graphs
        return engine.report() if engine is not None else None

    def log_line(self) -> LogLine:
        """Reads the results of the steps since the last line. Waits for the device.

        Raises:
            TrainingDiverged: if a loss or gradient norm since the last line is not finite.
        """
        with contextlib.nullcontext() if self.workers is None else self.workers.waiting():
            times = self.clock.read()
        self.settle()
        since = slice(self.first_unlogged_step, self.step)
        self.first_unlogged_step = self.step
        tokens = self.settings.tokens_per_step * len(times)
        rate = tokens / (sum(times) / 1e3)
        flops = rate * self.whole.flops_per_token(self.settings.sequence_length)
        peak = peak_flops(self.device)
        self._check_finite(since)
        line: type[LogLine] = LogLine
        of_ranks: dict[str, Any] = {}
        if self.workers is not None:
            ranks = self.workers.count
            peak = None if peak is None else peak * ranks
            line, of_ranks = RanksLine, {"ranks": ranks, "tokens_per_second_per_rank": rate / ranks}
        load = self._load()
        return line(
            step=self.step,
            loss=self.history.loss[self.step - 1].item(),
            grad_norm=self.history.grad_norm[self.step - 1].item(),
            learning_rate=self.settings.learning_rate_at(self.step - 1),
            memory=self.memory(),
            tokens_per_second=rate,
            tflops=flops / 1e12,
            mfu=None if peak is None else flops / peak,
            dropped=int(self.history.dropped[since].sum()) if self.drops_tokens else None,
            max_over_mean=load.get("experts/max_over_mean"),
            unused_experts=int(load["experts/unused"]) if load else None,
            **of_ranks,
        )

    def _load(self) -> dict[str, float]:
        """The load of experts since the line before, of all ranks; waits for the device."""
        report = routing.LoadReport(())
        if self.watch is not None:
            report = self.watch.report()
            self.watch.reset()
        if self.workers is not None:
            report = routing.LoadReport.of_ranks(self.workers.gather(report))
        return report.scalars() if report.layers else {}

    def memory(self) -> Memory:
        """Memory in use; with several ranks, that of the rank with most."""
        here = memory_in_use(self.device)
        every = [here] if self.workers is None else self.workers.gather(here)
        return max(every, key=lambda memory: memory.bytes)

    def settle(self) -> None:
        """Combines the results of all ranks for the steps since the last time.

        Before that, the history has this rank's mean loss and dropped rows. All ranks call it.
        """
        since = slice(self.settled_step, self.step)
        self.settled_step = self.step
        if self.workers is not None:
            self.history.loss[since] = self.workers.mean(self.history.loss[since])
            self.history.dropped[since] = self.workers.sum(self.history.dropped[since])

    def total_dropped(self) -> int | None:
        """Routed rows dropped so far, None if the dispatcher never drops. Waits for the device."""
        return int(self.history.dropped.sum()) if self.drops_tokens else None

    def bits_per_byte(self, held_out: HeldOut) -> float:
        """Mean code length of the counted tokens in ``held_out``, per byte."""
        return held_out.bits_per_byte(self.nats_per_token(held_out))

    def nats_per_token(self, held_out: HeldOut) -> float:
        """Mean loss of the counted tokens in ``held_out``.

        The model runs eagerly, in eval mode and not in FP8, with its averaged parameters if it has
        any.
        """
        paused = self.graphs.paused() if self.graphs is not None else contextlib.nullcontext()
        was_training = self.model.training
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        rows = max(1, self.settings.batch_size // self.settings.microbatches)
        inputs_NS, targets_NS = held_out.inputs_NS, held_out.targets_NS
        if self.workers is not None:
            rows = max(1, rows // self.workers.data.size())
            if self.pipeline is not None:
                rows *= self.settings.microbatches
            inputs_NS, targets_NS = self.workers.held_out_part(inputs_NS, targets_NS, rows)
        with paused, self.averaged(), torch.no_grad():
            for start in range(0, len(inputs_NS), rows):
                inputs_BS = inputs_NS[start : start + rows].to(self.device)
                targets_BS = targets_NS[start : start + rows].to(self.device)
                if self.pipeline is not None:
                    total += self.pipeline.evaluate(inputs_BS, targets_BS)
                    continue
                with self.autocast():
                    total += self._loss(inputs_BS, targets_BS, reduction="sum").loss
        self.model.train(was_training)
        back_to_fp8(self.model, self.fp8_autocast)
        if self.workers is not None:
            total = self.workers.sum(total)
        return total.item() / int((held_out.targets_NS >= 0).sum())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model has its averaged parameters, if the settings want any.

        Only between steps.
        """
        if not isinstance(self.optimizer, AdamW) or self.settings.ema_decay is None:
            yield
            return
        free_gathered(self.model)
        with self.optimizer.averaged():
            try:
                yield
            finally:
                free_gathered(self.model)

    def forward_backward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Runs all microbatches of a step: the mean loss and the dropped rows, on the device.

        In a pipeline the loss is 0 on all ranks but the last one, until ``settle``.
        """
        count, addends = self.settings.microbatches, self.settings.microbatches
        if self.workers is not None and not self.workers.fsdp:  # which makes sums means
            addends *= self.workers.data.size()
        losses, dropped = [], []
        step = self.graphs.step() if self.graphs is not None else contextlib.nullcontext()
        with step, unchanged_weights() if count > 1 else contextlib.nullcontext():
            if self.pipeline is not None:
                return self.pipeline.forward_backward(tokens[:, :-1], tokens[:, 1:])
            for part in tokens.chunk(count):
                with self.autocast():
                    output = self._loss(part[:, :-1], part[:, 1:], rule=self.settings.loss_rule)
                ((output.loss + output.aux_loss) / addends).backward()
                losses.append(output.loss.detach())
                dropped.append(output.dropped_tokens)
        return torch.stack(losses).mean(), torch.stack(dropped).sum()

    def _loss(self, inputs_BS: Tensor, targets_BS: Tensor, **options: Any) -> ModelLoss:
        documents = None
        if self.separator is not None:
            documents = documents_between(inputs_BS, self.separator)
        return self.model(inputs_BS, targets_BS, document_ids_BS=documents, **options)

    def update(self) -> Tensor:
        """Clips, steps and drops the gradients. Returns their norm before clipping."""
        if self.workers is not None and not self.workers.fsdp:
            sum_gradients(self.model, self.workers.data)
        if self.updates is None:
            norm = self.device_step().grad_norm
        else:
            self.optimizer.step()  # the backward has updated the weights
            norm = self.updates.grad_norm.clone()
        assert norm is not None  # settings have a clip_norm
        # This does nothing unless the config asks for the aux-loss-free balancing of DeepSeek-V3.
        self.model.update_expert_bias(None if self.workers is None else self.workers.group)
        return norm

    def forward_backward_update(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs all of a step: returns the loss, the dropped rows and the gradient norm."""
        return *self.forward_backward(tokens), self.update()

    def _check_finite(self, since: slice) -> None:
        values = torch.stack((self.history.loss[since], self.history.grad_norm[since]))
        bad = (~values.isfinite().all(0)).nonzero()
        if len(bad):
            index = int(bad[0])
            raise TrainingDiverged(
                f"training diverged: loss {values[0, index]:.4g}, gradient norm "
                f"{values[1, index]:.4g} at step {since.start + index + 1}: lower the learning "
                f"rate, or resume from an earlier checkpoint; --find-nan names the operation"
            )

    def _to_device(self, windows: Tensor) -> Tensor:
        if self.device.type == "cuda":
            # Every batch has a pinned buffer of its own: torch's host allocator hands the buffer
            # out again only when the copy from it has run, so no later batch overwrites it unread.
            windows = windows.pin_memory().to(self.device, non_blocking=True)
        return windows.long()


def autocast_of(device: torch.device) -> torch.autocast:
    """Context in which forwards compute in bf16 on a GPU, and as they are elsewhere."""
    # The cache would hand a weight's cast copy, made in one graph's pool, to the next graph.
    return torch.autocast(
        device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
    )
