"""Parts of the model as graphs, under Lightning's trainer."""

from __future__ import annotations

import contextlib
from typing import Any

from moe_graphs.config import GraphConfig
from moe_graphs.engine.partial.graphs import Graphs, graph
from moe_graphs.engine.report import Report
from moe_graphs.integrations.lightning.names import pl, rank_zero_info


class GraphScopes(pl.Callback):
    """``moe_graphs.graph`` on the module, and ``graphs.step()`` around what an update is made of.

    All batches that gradients are accumulated over are one step. Every strategy that keeps
    parameters in place will do (one device, DDP). ``report`` is there after the training. A capture
    that fails is a warning, and training goes on eagerly, unless the configuration says
    ``on_capture_error="error"``.
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
            assert self.graphs is not None
            self._open.enter_context(self.graphs.step())
            self._updates_at_opening = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self._updates_at_opening:
            self._close()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._close()

    def on_train_end(self, *_: Any) -> None:
        assert self.graphs is not None
        self.report = self.graphs.report()
        rank_zero_info(f"GraphScopes:\n{self.report}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._updates_at_opening = None
        self._open.__exit__(type(exception), exception, exception.__traceback__)
        self.teardown()  # which Lightning does not call then

    def teardown(self, *_: Any, **__: Any) -> None:
        if self.graphs is not None:
            self.graphs.release()

    def _close(self) -> None:
        self._updates_at_opening = None
        self._open.close()
