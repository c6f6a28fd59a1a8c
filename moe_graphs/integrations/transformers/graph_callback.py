"""Graphs under transformers' ``Trainer``."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback

from moe_graphs.engine.report import Report
from moe_graphs.errors import GraphError
from moe_graphs.integrations.transformers.accelerated import Accelerated, accelerate_model
from moe_graphs.routing import Watch, watch


class GraphCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Graphs in ``Trainer(callbacks=[GraphCallback()])``, and in TRL's trainers.

    It calls ``accelerate_model`` when training begins, and makes one step of graphs per update,
    with all of its microbatches.

    Evaluation runs eagerly, checkpoints are Trainer's own, and with the same arguments but
    ``graphs=False`` training is the same bit for bit (``lengths=True`` given in both). Batches of
    changing length are padded to a few lengths, which have graphs (``lengths``). Those of another
    number of rows have graphs of their own if they come often: ``dataloader_drop_last=True``
    spares them. Under gradient checkpointing the graphs of layers keep their inputs only and
    recompute the rest.

    To resume, make the model by ``from_pretrained(checkpoint)``: of transformers 5.23's own,
    ``train(resume_from_checkpoint=checkpoint)`` does not load experts that are stored one by one
    (Mixtral, Qwen, DeepSeek, ...) and goes on with those that the model has.

    Args:
        accelerated: what ``accelerate_model`` has returned for the model, if it was called before.
            The callback marks its steps then, and leaves the model as it is in the end.
        watch_experts: whether lines of the training's log get the load of experts since the line
            before (``LoadReport.scalars``). Trainer's own reporters run before this callback and
            do not see them: for TensorBoard give
            ``callbacks=[GraphCallback(watch_experts=True), TensorBoardCallback()]`` and
            ``report_to="none"``.
        options: of ``accelerate_model`` otherwise.

    Attributes:
        accelerated: what was changed, and how batches are padded (``accelerated.lengths``).
        report: of the graphs, after the training.
        watch: the counters of experts, None without ``watch_experts``.
    """

    def __init__(
        self,
        accelerated: Accelerated | None = None,
        *,
        watch_experts: bool = False,
        **options: Any,
    ) -> None:
        if accelerated is not None and options:
            raise ValueError(
                f"GraphCallback got what accelerate_model has returned and {', '.join(options)}: "
                f"give options to accelerate_model"
            )
        self.options = options
        self.accelerated, self._is_given = accelerated, accelerated is not None
        self.report: Report | None = None
        self.watch_experts = watch_experts
        self.watch: Watch | None = None
        self._step = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self._undo()  # of a training that has failed
        if getattr(args, "torch_compile", False):
            raise GraphError("torch_compile=True and GraphCallback: choose one of the two")
        if args.n_gpu > 1:
            raise GraphError(
                f"Trainer spreads each batch over {args.n_gpu} GPUs by DataParallel, which copies "
                f"the model in every step: start it with torchrun, or show it one GPU"
            )
        if not self._is_given:
            self.accelerated = _accelerate(model, self.options)
        if state.is_world_process_zero:
            print(self.accelerated)
        if self.watch_experts:
            self.watch = watch(model)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        assert self.accelerated is not None
        self._step.enter_context(self.accelerated.step())

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._step.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.watch is not None and logs is not None and "loss" in logs:
            found = self.watch.report().scalars()
            self.watch.reset()
            logs.update(found)
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.accelerated is not None
        self.report = self.accelerated.graphs.report()
        if state.is_world_process_zero:
            print(*self.accelerated.lengths.lines(), self.report, sep="\n")
        self._undo()

    def _undo(self) -> None:
        self._step.close()
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if self.accelerated is not None and not self._is_given:
            self.accelerated.undo()


def _accelerate(model: Any, options: dict[str, Any]) -> Accelerated:
    try:
        return accelerate_model(model, **options)
    except ValueError as error:
        if "has graphs already" not in str(error):
            raise
        raise ValueError(
            f"{error}, or pass what accelerate_model has returned: GraphCallback(accelerated)"
        ) from error
