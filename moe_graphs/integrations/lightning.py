"""Graphs in Lightning 2.6 and later: two callbacks for ``Trainer(callbacks=[...])``.

``GraphScopes`` graphs parts of the model, ``GraphWholeSteps`` forward, backward and update of a
batch as one graph. Neither changes what a checkpoint holds, and what cannot be captured runs
eagerly, with a warning that says why. Works with ``lightning`` and with ``pytorch_lightning``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_graphs.config import GraphConfig
from moe_graphs.engine.report import Report
from moe_graphs.engine.scopes.graphs import Graphs, graph
from moe_graphs.engine.whole_step.full_iteration import FullIteration, FullIterationReport
from moe_graphs.errors import CaptureError, GraphError
from moe_graphs.training.capturable import (
    check_capturable_optimizer,
    check_capturable_scheduler,
    tensor_hyperparameters,
)
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler

try:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
except ImportError:  # the same under its older name
    import pytorch_lightning as pl
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn


class GraphScopes(pl.Callback):
    """``moe_graphs.graph`` on the module, and ``graphs.step()`` around what an update is made of.

    All batches that gradients are accumulated over are one step. Every strategy that keeps
    parameters in place will do (one device, DDP). ``report`` is there after the training.
    """

    def __init__(self, config: GraphConfig) -> None:
        self.config = config
        self.graphs: Graphs | None = None
        self.report: Report | None = None
        self._open = contextlib.ExitStack()
        self._updates_at_opening: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.graphs = graph(pl_module, self.config)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._updates_at_opening is None:
            self._open.enter_context(self.graphs.step())
            self._updates_at_opening = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self._updates_at_opening:
            self._close()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._close()

    def on_train_end(self, *_: Any) -> None:
        self.report = self.graphs.report()
        rank_zero_info(f"GraphScopes: {self.report}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._updates_at_opening = None
        self._open.__exit__(type(exception), exception, exception.__traceback__)
        self.teardown()  # which Lightning does not call then

    def teardown(self, *_: Any, **__: Any) -> None:
        if self.graphs is not None:
            self.graphs.release()

    def _close(self) -> None:
        self._updates_at_opening = None
        try:
            self._open.close()
        except CaptureError as error:
            rank_zero_warn(f"GraphScopes: {error}")


class GraphWholeSteps(pl.Callback):
    """``training_step``, backward and the optimizer's update as one graph, replayed per batch.

    With ``accumulate_grad_batches`` there are two graphs, with and without the update. While
    training, these public methods of the module are replaced on the instance, and given back at
    the end: ``training_step``, ``backward``, ``optimizer_zero_grad``, ``optimizer_step``, ``log``.

    What is other than without it:

    - ``batch_idx`` is a tensor, so that a graph does not freeze it.
    - ``self.log`` in ``training_step`` takes tensors; a number would be frozen.
    - Loss scaling (16-mixed), clipping by norm and learning rates are on the device
      (``DeviceStep``); ``on_before_optimizer_step`` is not called.
    - Values that are logged or returned are without autograd history.

    What does not fit (another optimizer, overridden hooks, several devices) is named in a warning,
    and Lightning trains as usual. Checkpoints fit either way. ``reports`` is there after the
    training, empty if it was Lightning's.

    Args:
        on_mismatch: what to do with a batch of another shape, as in ``FullIteration``.
    """

    def __init__(self, *, warmup_steps: int = 3, on_mismatch: str = "eager") -> None:
        self.warmup_steps, self.on_mismatch = warmup_steps, on_mismatch
        self.reports: list[FullIterationReport] = []
        self.steps: _WholeSteps | None = None
        self._warned = False
        self._undo = contextlib.ExitStack()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps, self.reports, self._warned = None, [], False
        reason = _obstacle(trainer, pl_module)
        if reason is not None:
            rank_zero_warn(f"GraphWholeSteps: training is eager: {reason}")
            return
        scaler = self._device_scaler(trainer, pl_module.device)
        tensor_hyperparameters(trainer.optimizers[0])
        self.steps = _WholeSteps(trainer, pl_module, scaler, self.warmup_steps, self.on_mismatch)
        for name in ("training_step", "backward", "optimizer_step", "optimizer_zero_grad", "log"):
            replacement = _as(getattr(pl_module, name), getattr(self.steps, name))
            setattr(pl_module, name, replacement)
            self._undo.callback(delattr, pl_module, name)

    def on_train_epoch_end(self, *_: Any) -> None:
        """Says, once, if training has fallen back to eager without anything having failed."""
        for iteration in self.steps.iterations() if self.steps is not None else ():
            report = iteration.report()
            reasons = {name: n for name, n in report.eager_calls.items() if name != "warmup"}
            most = report.state == "captured" and sum(reasons.values()) > report.replayed
            if most and not self._warned:
                rank_zero_warn(f"GraphWholeSteps: most batches run eagerly: {reasons}")
                self._warned = True

    def on_train_end(self, *_: Any) -> None:
        if self.steps is not None:
            self.reports = [each.report() for each in self.steps.iterations()]
            rank_zero_info("\n".join(f"GraphWholeSteps: {report}" for report in self.reports))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Learning rates are saved as numbers, as without graphs."""
        for state in checkpoint.get("optimizer_states", ()):
            for group in state["param_groups"]:
                group["lr"] = float(group["lr"])
        states = checkpoint.get("lr_schedulers", ())
        checkpoint["lr_schedulers"] = [_with_numbers(state) for state in states]

    def on_exception(self, *_: Any) -> None:
        self.teardown()  # which Lightning does not call then

    def teardown(self, *_: Any, **__: Any) -> None:
        self._undo.close()
        if self.steps is not None:
            self.steps.release()

    def _device_scaler(self, trainer: pl.Trainer, device: torch.device) -> GradScaler | None:
        """Takes the place of the precision plugin's, which saves and loads it, until the end.

        For hysteresis pass ``plugins=[MixedPrecision("16-mixed", "cuda", scaler=GradScaler(...))]``
        with a scaler of ours.
        """
        plugin = trainer.precision_plugin
        theirs = getattr(plugin, "scaler", None)
        if theirs is None or isinstance(theirs, GradScaler):
            return theirs
        state = theirs.state_dict()
        constants = ("growth_factor", "backoff_factor", "growth_interval")
        scaler = GradScaler(device, **{name: state[name] for name in constants})
        scaler.load_state_dict(state)
        plugin.scaler = scaler
        self._undo.callback(setattr, plugin, "scaler", theirs)
        self._undo.callback(lambda: theirs.load_state_dict(scaler.state_dict()))
        return scaler


def _as(original: Callable, replacement: Callable) -> Callable:
    """A function with the signature of ``original``, which Lightning looks at."""

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return replaced


class _WholeSteps:
    """What the module's methods are while training runs in whole steps."""

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        scaler: GradScaler | None,
        warmup_steps: int,
        on_mismatch: str,
    ) -> None:
        self._module = module
        self._training_step, self._log = module.training_step, module.log
        self._accumulated = trainer.accumulate_grad_batches
        self._update = DeviceStep(
            trainer.optimizers[0],
            scaler=scaler,
            clip_norm=trainer.gradient_clip_val or None,
            # Between the batches of one update gradients have to stay where they are.
            set_to_none=self._accumulated == 1,
        )
        self._logged: dict[str, Tensor] = {}
        self._log_options: dict[str, tuple[tuple, dict]] = {}
        self._refusal: str | None = None
        self._updates = self._in_step = False
        make = functools.partial(
            FullIteration, model=module, warmup_steps=warmup_steps, on_mismatch=on_mismatch
        )
        self._last = make(self._last_batch, optimizer=trainer.optimizers[0], state=[self._update])
        self._earlier = make(self._forward_backward, state=[scaler] if scaler else [])

    def iterations(self) -> list[FullIteration]:
        return [self._last] if self._accumulated == 1 else [self._earlier, self._last]

    def release(self) -> None:
        for iteration in self.iterations():
            iteration.release()

    # ---- in the place of the module's methods

    def training_step(self, *arguments: Any) -> Any:
        """Called with a batch and, if the module's takes it, the batch's index."""
        if len(arguments) > 1:
            index = torch.full((), arguments[1], device=self._module.device)
            arguments = (arguments[0], index, *arguments[2:])
        iteration = self._last if self._updates else self._earlier
        try:
            output, logged = iteration(arguments)
        except CaptureError as error:
            rank_zero_warn(f"GraphWholeSteps: {error}")
            output, logged = iteration(arguments)
        for name, value in logged.items():
            args, options = self._log_options[name]
            self._log(name, value, *args, **options)
        self._heed_refusal()
        return output

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        """Lightning's closure runs ``training_step``, which does what the optimizer would."""
        self._updates = True
        try:
            closure()
        finally:
            self._updates = False

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Was done in the step."""

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Was done in the step."""

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Within the step, tensors become its outputs, which are logged after it."""
        if not self._in_step:
            self._log(name, value, *args, **options)
        elif isinstance(value, Tensor) and value.device == self._module.device:
            self._logged[name] = value
            self._log_options[name] = (args, options)
        else:
            self._refusal = (
                f"self.log({name!r}) was given a {type(value).__name__}, which a graph would not "
                f"renew: log a tensor on {self._module.device}, or log in on_train_batch_end"
            )
            self._log(name, value, *args, **options)

    # ---- what is captured

    def _forward_backward(self, arguments: tuple) -> tuple[Any, dict[str, Tensor]]:
        self._logged = logged = {}
        self._in_step = True
        try:
            output = self._training_step(*arguments)
        finally:
            self._in_step = False
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            raise GraphError("training_step returned None: return a loss, or train without graphs")
        # Lightning's backward is outside of autocast.
        with torch.autocast(self._module.device.type, enabled=False):
            self._update.scale(loss / self._accumulated).backward()
        return output, logged

    def _last_batch(self, arguments: tuple) -> tuple[Any, dict[str, Tensor]]:
        results = self._forward_backward(arguments)
        self._update()
        return results

    def _heed_refusal(self) -> None:
        if self._refusal is not None and self._last.state != "released":
            rank_zero_warn(f"GraphWholeSteps: training is eager: {self._refusal}")
            self.release()


def _obstacle(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Why this training cannot run in whole steps."""
    if trainer.world_size > 1:
        return f"{trainer.world_size} devices: GraphScopes supports several, this one does not"
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        return "manual optimization or several optimizers: call FullIteration in training_step"
    if trainer.gradient_clip_algorithm == "value":
        return "gradient_clip_algorithm='value': clip by norm, which needs no host sync"
    hooks = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
    for name in (*hooks, "on_before_optimizer_step"):
        if _is_overridden(module, name):
            return f"{type(module).__name__}.{name} is overridden and would not be called"
    checks: list[Callable[[], None]] = [
        functools.partial(check_capturable_optimizer, trainer.optimizers[0]),
        *(
            functools.partial(check_capturable_scheduler, c.scheduler)
            for c in trainer.lr_scheduler_configs
        ),
    ]
    for check in checks:
        try:
            check()
        except ValueError as error:
            return str(error)
    return None


def _is_overridden(module: pl.LightningModule, name: str) -> bool:
    owner = next(kind for kind in type(module).__mro__ if name in vars(kind))
    return not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def _with_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state with numbers for learning rates, also those within its schedulers."""
    numbers = dict(state)
    for name, value in state.items():
        if name in ("_last_lr", "base_lrs"):
            numbers[name] = [float(rate) for rate in value]
        elif name == "_schedulers":
            numbers[name] = [_with_numbers(each) for each in value]
    return numbers
