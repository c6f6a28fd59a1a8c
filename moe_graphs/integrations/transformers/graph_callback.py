"""Graphs under transformers' ``Trainer``."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback

from moe_graphs.engine.report import Report
from moe_graphs.errors import GraphError
from moe_graphs.integrations.transformers.accelerated import Accelerated, accelerate_model


class GraphCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """``Trainer(callbacks=[GraphCallback()])``: ``accelerate_model`` when training begins, one step
    of graphs per update, with all of its microbatches.

    Evaluation runs eagerly, checkpoints are Trainer's own, and with the same arguments but
    ``graphs=False`` training is the same bit for bit. Batches of another shape than the first ones
    run eagerly and are counted: pad to one length (``static_batch`` in the collator keeps masks
    from coming and going) and set ``dataloader_drop_last=True``. Layers with gradient checkpointing
    run eagerly, counted as ``gradient_checkpointing``.

    To resume, make the model by ``from_pretrained(checkpoint)``: of transformers 5.23's own,
    ``train(resume_from_checkpoint=checkpoint)`` does not load experts that are stored one by one
    (Mixtral, Qwen, DeepSeek, ...) and goes on with those that the model has.

    Args:
        options: of ``accelerate_model``.

    Attributes:
        accelerated: what was changed; ``report`` is there after the training.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.accelerated: Accelerated | None = None
        self.report: Report | None = None
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
        self.accelerated = accelerate_model(model, **self.options)
        if state.is_world_process_zero:
            print(self.accelerated)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        assert self.accelerated is not None
        self._step.enter_context(self.accelerated.step())

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._step.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.accelerated is not None
        self.report = self.accelerated.graphs.report()
        if state.is_world_process_zero:
            print(self.report)
        self._undo()

    def _undo(self) -> None:
        self._step.close()
        if self.accelerated is not None:
            self.accelerated.undo()
