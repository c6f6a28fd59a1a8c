"""Another run of a step in which a rank's experts had no room for the rows routed to them.

    dispatcher = make_dispatcher("symmetric", rows_factor=1.25)
    step = DeviceStep(optimizer, process_group=dist.group.WORLD)

    def train(batch):                      # eager, or FullIteration(train, ...)
        output = model(batch)
        loss_of(output).backward()
        result = step(overflow=output.dropped_tokens)
        model.update_expert_bias(dist.group.WORLD, skipped=result.overflowed)
        return result

    result = train(batch)
    if result.overflowed:                  # on all ranks, or on none; waits for the device
        with other_rows_factor(model, None):
            result = train(batch)

A step that overflowed has changed nothing but the random state and the routers' counters. The
second run draws new random numbers, unless the random state is put back before it. Graphs were
captured with another dispatcher, so calls within the block run eagerly and are counted
(``attribute``; with ``on_mismatch="error"`` they raise). After the block, calls are replayed again.
If the step after the warm-up overflows, its second run is captured with the other factor; a larger
``warmup_steps`` makes that unlikely. ``MoELayer.row_statistics`` says how many rows were needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from moe_graphs.layers.moe import MoEStages
from moe_graphs.registry import DISPATCHERS


@contextlib.contextmanager
def other_rows_factor(model: nn.Module, rows_factor: float | None) -> Iterator[None]:
    """Context in which the dispatchers of the model's MoE layers have another ``rows_factor``.

    All ranks enter the context together.

    Args:
        rows_factor: the other factor; None makes room for the worst routing.

    Raises:
        ValueError: the model has no dispatcher with a ``rows_factor``.
    """
    layers = [
        (module, module.dispatcher)
        for module in model.modules()
        if isinstance(module, MoEStages) and hasattr(module.dispatcher, "rows_factor")
    ]
    if not layers:
        others = DISPATCHERS.words(lambda each: "rows_factor" in each.options())
        raise ValueError(
            f"model: none of its layers has a dispatcher with a rows_factor: take {others}"
        )
    try:
        for layer, dispatcher in layers:
            given: Any = dispatcher
            layer.dispatcher = dataclasses.replace(given, rows_factor=rows_factor)
        yield
    finally:
        for layer, dispatcher in layers:
            layer.dispatcher = dispatcher
