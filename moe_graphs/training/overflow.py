"""What to do when a rank's experts had no room for the rows that were routed to them.

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

In the step that overflowed nothing has moved but random numbers and the counters of routers. Run
again, it draws new random numbers, unless their state is put back. Graphs were captured with
another dispatcher: within the block calls run eagerly and are counted (``attribute``; not with
``on_mismatch="error"``), behind it they replay again. What is captured is the call that comes after
the warm-up, whatever its factor: leave ``warmup_steps`` to spare. ``MoELayer.most_rows`` says which
factor would have been enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from moe_graphs.layers.moe import MoEStages


@contextlib.contextmanager
def other_rows_factor(model: nn.Module, rows_factor: float | None) -> Iterator[None]:
    """Within this context the dispatchers of the model's MoE layers have another ``rows_factor``,
    None for the worst routing. All ranks have to enter it together.

    Raises:
        ValueError: the model has no dispatcher with a ``rows_factor``.
    """
    layers = [
        (module, module.dispatcher)
        for module in model.modules()
        if isinstance(module, MoEStages) and hasattr(module.dispatcher, "rows_factor")
    ]
    if not layers:
        raise ValueError(
            "model: none of its layers has a dispatcher with a rows_factor: those are 'all_gather' "
            "and 'symmetric'"
        )
    try:
        for layer, dispatcher in layers:
            given: Any = dispatcher
            layer.dispatcher = dataclasses.replace(given, rows_factor=rows_factor)
        yield
    finally:
        for layer, dispatcher in layers:
            layer.dispatcher = dispatcher
