"""A whole batch as one graph, under Lightning's trainer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_graphs.config import ON_CAPTURE_ERROR, check_audits, check_option
from moe_graphs.engine.ranks import FAILED_ELSEWHERE, Ranks
from moe_graphs.engine.whole_step.full_iteration import FullIteration, FullIterationReport
from moe_graphs.errors import CaptureError, GraphWarning
from moe_graphs.integrations.lightning.device_update import DeviceUpdate
from moe_graphs.integrations.lightning.names import pl, rank_zero_info, rank_zero_warn
from moe_graphs.integrations.lightning.obstacles import is_lightnings_own, obstacle
from moe_graphs.integrations.lightning.step import BatchStep, Call, unwatched_logs
from moe_graphs.integrations.lightning.strategies import (
    Forward,
    built_on,
    obstacle_of_strategy,
    put_back,
    unknown,
)
from moe_graphs.integrations.lightning.update import Update, has_hooks, why_outside


class GraphWholeSteps(pl.Callback):
    """``training_step``, backward and, where it can be, the update: one graph, replayed per batch.

    Promised: parameters, logged values, random numbers and checkpoints are, bit for bit, those of
    the same training without this callback. A batch that differs from what was captured (shapes,
    numbers that ``training_step`` reads, such as ``current_epoch`` or ``global_step``, attributes
    that have changed) runs as Lightning runs it, and is counted in ``reports``. The third one of a
    reason is a warning, as is a capture that fails.

    ``accumulate_grad_batches`` may change: every kind of batch that it makes gets a graph of its
    own. The optimizer is never touched. Its step is in the graph if it is one of torch's that can
    be, nobody overrides a hook between backward and update, there is no scaler, and its learning
    rate is either a tensor or not scheduled. Else Lightning does all that follows the backward, on
    gradients that the graph has left, and a line at the start says why: hooks, clipping, scaler,
    any optimizer and schedule do what they do without graphs.

    Named in a warning, and trained without graphs:

    - what is overridden in the midst of the graph, by the module or by a callback:
      ``on_before_zero_grad``, ``on_before_backward``, ``optimizer_zero_grad``;
    - a ``training_step`` that takes ``dataloader_iter``, returns None, looks at ``batch_idx``,
      changes what Python keeps, or logs or returns numbers (log tensors, or log in
      ``on_train_batch_end``);
    - other strategies than one device's, ``DDPStrategy`` and ``ModelParallelStrategy`` (FSDP2), and
      settings of these that docs/how_to/lightning.md lists; other precision plugins than
      Lightning's for fp32, fp64, fp16 and bf16, manual optimization, ``StochasticWeightAveraging``.

    On several ranks all replay a batch or none does, whatever differs on one of them.

    Not promised: what ``training_step`` does besides computing (printing, a clock, a logger that is
    called past ``self.log``) happens in captures and not in replays, as far as the engine does not
    see it and refuse. Values that are logged or returned are without autograd history.

    While training, methods of the strategy (``training_step``, ``backward``, ``optimizer_step``,
    on GPUs DDP's ``_setup_model``) and ``optimizer_zero_grad`` of the module are replaced on the
    instances, and given back at the end. ``reports`` is there after the training, one for each
    graph; empty if it was Lightning's.

    With a ``moe_graphs`` ``GradScaler`` (``plugins=[MixedPrecision("16-mixed", "cuda", scaler=
    GradScaler("cuda", hysteresis=2))]``) the update is a ``DeviceStep``, see ``DeviceUpdate``.

    Args:
        on_mismatch: what to do with a batch that differs, as in ``FullIteration``.
        on_capture_error: "eager" warns of a capture that fails, and Lightning trains on; "error"
            raises ``CaptureError``.
        audit_every, on_audit: as in ``FullIteration``.
    """

    def __init__(
        self,
        *,
        warmup_steps: int = 3,
        on_mismatch: str = "eager",
        on_capture_error: str = "eager",
        audit_every: int | str | None = "auto",
        on_audit: str = "eager",
    ) -> None:
        check_option("on_capture_error", on_capture_error, ON_CAPTURE_ERROR)
        check_audits(audit_every, on_audit)
        self.audit_every, self.on_audit = audit_every, on_audit
        self.warmup_steps, self.on_mismatch = warmup_steps, on_mismatch
        self.on_capture_error = on_capture_error
        self.reports: list[FullIterationReport] = []
        self._steps: _WholeSteps | None = None
        self._stream: torch.cuda.Stream | None = None
        self._undo = contextlib.ExitStack()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Runs before the strategy wraps the module: DDP is built on the stream of the captures."""
        strategy: Any = trainer.strategy
        self._stream = None
        is_ddp = stage == "fit" and is_lightnings_own(strategy, "DDPStrategy")
        if is_ddp and strategy.root_device.type == "cuda":
            self._stream = torch.cuda.Stream(strategy.root_device)
            self._replace(strategy, "_setup_model", built_on(self._stream, strategy))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps, self.reports = None, []
        device_update = DeviceUpdate.of(trainer, pl_module)
        if device_update is not None:
            self._replace(trainer.strategy, "optimizer_step", device_update)
        reason, ranks = unknown(trainer), Ranks()
        if reason is None:
            ranks = Ranks(trainer.strategy.model)
            found = obstacle_of_strategy(trainer, pl_module) or obstacle(trainer, pl_module)
            reason = ranks.first_of(found)  # all do alike
        if reason is not None:
            _warn(f"training is eager: {reason}")
            return
        outside = ranks.first_of(why_outside(trainer, pl_module))
        if outside is not None:
            rank_zero_info(f"GraphWholeSteps: the update runs behind the graph: {outside}")
        options: dict[str, Any] = {
            "warmup_steps": self.warmup_steps,
            "on_mismatch": self.on_mismatch,
            "audit_every": self.audit_every,
            "on_audit": self.on_audit,
        }
        options |= {"agree": True, "stream": self._stream}
        self._steps = steps = _WholeSteps(trainer, pl_module, ranks, options, self.on_capture_error)
        self._replace(trainer.strategy, "training_step", steps.training_step)
        self._replace(trainer.strategy, "backward", steps.backward)
        if outside is None:
            self._replace(trainer.strategy, "optimizer_step", steps.optimizer_step)
        self._replace(pl_module, "optimizer_zero_grad", steps.optimizer_zero_grad)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps is not None:
            self._steps.batch_idx = batch_idx

    def on_train_end(self, *_: Any) -> None:
        if self._steps is not None:
            self.reports = self._steps.reports()
            rank_zero_info("\n".join(f"GraphWholeSteps:\n{report}" for report in self.reports))

    def on_exception(self, *_: Any) -> None:
        self.teardown()  # which Lightning does not call then

    def teardown(self, *_: Any, **__: Any) -> None:
        self._undo.close()
        if self._steps is not None:
            self._steps.release()

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Sets it on the instance, with the original's signature, which Lightning looks at."""

        @functools.wraps(getattr(owner, name))
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        self._undo.callback(put_back, owner, name, vars(owner).get(name))
        vars(owner)[name] = replaced


class _WholeSteps:
    """The methods of the strategy and of the module while training runs in whole steps.

    Attributes:
        batch_idx: of the batch that is coming.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        ranks: Ranks,
        options: dict[str, Any],
        on_capture_error: str,
    ) -> None:
        self.batch_idx = 0
        self._ranks, self._forward = ranks, Forward(trainer.strategy, module)
        self._trainer, self._module, self._plugin = trainer, module, trainer.precision_plugin
        self._lightnings_step = trainer.strategy.training_step
        self._lightnings_update = trainer.strategy.optimizer_step
        self._lightnings_zero_grad = module.optimizer_zero_grad
        # What fails to be captured is told once of all graphs and ranks, here.
        self._options = options | {"on_capture_error": "error"}
        self._on_capture_error = on_capture_error
        self._iterations: dict[tuple[Any, ...], FullIteration[Any, Any]] = {}
        self._current: FullIteration[Any, Any]  # of the batch under way
        # A replay has done what Lightning is about to do: gradients are dropped, backward is done.
        self._is_ahead = False
        # What the graph of the coming batch has to end with. A replay takes it away.
        self._update: Update | None = None
        self._said: set[str] = set()

    def reports(self) -> list[FullIterationReport]:
        return [iteration.report() for iteration in self._iterations.values()]

    def release(self) -> None:
        for iteration in self._iterations.values():
            iteration.release()

    # ---- in the place of Lightning's methods

    def training_step(self, batch: Any, *index: int) -> Any:
        """The strategy's step: replays forward and backward, or is Lightning's."""
        self._current = iteration = self._iteration(takes_index=bool(index))
        call = Call(batch, self._scale(), lambda: self._eagerly(batch, *index))
        try:
            results = iteration(call)
        except CaptureError as error:
            if self._on_capture_error == "error":
                raise
            own = None if FAILED_ELSEWHERE in str(error) else str(error)
            self._say(self._ranks.first_of(own) or str(error))  # it is raised on all
            results = iteration(call)
        if call.from_lightning:
            return call.from_lightning.pop()
        self._is_ahead, self._update = True, None
        self._forward.went()
        output, logged = results
        for each, value in logged:
            self._module.log(each.name, value, *each.args, **each.options)
        return output

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The strategy's backward: one that was not in the graph, and what follows it."""
        if not self._is_ahead:
            loss = self._plugin.pre_backward(loss, self._module)
            with self._current.watching():  # hooks of tensors are Python, too
                self._plugin.backward(loss, self._module, *args, **kwargs)
        self._is_ahead = False
        return self._plugin.post_backward(loss, self._module)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The strategy's update: the closure replays the update, too, or it is Lightning's."""
        if self._ranks.any(has_hooks(optimizer)):
            return self._lightnings_update(optimizer, closure, *args, **kwargs)
        self._update = Update.of(self._trainer)
        try:
            loss = closure()
            is_done = self._update is None
        finally:
            self._update = None
        if is_done:
            return loss
        return self._lightnings_update(optimizer, lambda: loss, *args, **kwargs)

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_ahead:
            self._lightnings_zero_grad(*args, **kwargs)

    # ---- pieces

    def _eagerly(self, *arguments: Any) -> Any:
        with unwatched_logs(self._module):
            return self._lightnings_step(*arguments)

    def _scale(self) -> Tensor | None:
        scaler = getattr(self._plugin, "scaler", None)
        return None if scaler is None else scaler.scale(torch.ones((), device=self._module.device))

    def _iteration(self, takes_index: bool) -> FullIteration[Any, Any]:
        """The graph for batches of this kind: the first ones of an update drop gradients."""
        divisor, update = self._trainer.accumulate_grad_batches, self._update
        groups = [group["params"] for group in self._trainer.optimizers[0].param_groups]
        if self.batch_idx % divisor:
            groups = []
        key = divisor, update, self._forward.kind(), *map(len, groups)  # groups may grow
        if key not in self._iterations:
            dropped = tuple(parameter for group in groups for parameter in group)
            pieces = self._module, self._plugin, self._forward
            step = BatchStep(*pieces, takes_index, dropped, divisor, update)
            optimizer = None if update is None else update.optimizer
            model: Any = self._trainer.strategy.model  # DDP's wrapper, or the module
            self._iterations[key] = FullIteration(
                step, model=model, optimizer=optimizer, **self._options
            )
        return self._iterations[key]

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _warn(message)


def _warn(message: str) -> None:
    rank_zero_warn(f"GraphWholeSteps: {message}", category=GraphWarning)
