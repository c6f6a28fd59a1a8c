"""Megatron's ``forward_backward_func`` as one graph.

    schedule = GraphedForwardBackward(get_forward_backward_func())
    losses = schedule(
        forward_step_func=forward_step, data_iterator=iterator, model=model,
        num_microbatches=4, seq_length=4096, forward_only=False, ...
    )

Nothing of Megatron is imported. This module relies on one thing: the function takes keyword
arguments, among them one or several iterators with the batches of a step. ``forward_only=True`` has
a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from moe_graphs.engine.whole_step.full_iteration import FullIteration, FullIterationReport
from moe_graphs.training.static_loader import StaticBatches


class GraphedForwardBackward:
    """Replacement for ``forward_backward_func`` that takes the same keyword arguments.

    The batches of a step are taken from the iterator before the step runs. All other arguments are
    constants of the graph, also ``num_microbatches`` and the functions. A call returns copies of
    what the function returned.

    Args:
        options: options of ``FullIteration`` for both graphs (``state``, ``warmup_steps``, ...).
    """

    def __init__(self, forward_backward_func: Callable[..., Any], **options: Any) -> None:
        self._function, self._options = forward_backward_func, options
        self._iterations: dict[bool, FullIteration[Any, Any]] = {}

    def __call__(
        self,
        *,
        data_iterator: Iterator[Any] | list[Iterator[Any] | None] | None,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        forward_only: bool = False,
        **arguments: Any,
    ) -> Any:
        arguments |= {"model": model, "forward_only": forward_only}
        several = isinstance(data_iterator, (list, tuple))
        iterators = data_iterator if isinstance(data_iterator, (list, tuple)) else [data_iterator]
        batch = {
            "arguments": {**arguments, "num_microbatches": num_microbatches},
            "several": several,
            "batches": [_take(iterator, num_microbatches) for iterator in iterators],
        }
        if forward_only not in self._iterations:
            self._iterations[forward_only] = FullIteration(self._step, model=model, **self._options)
        return self._iterations[forward_only](batch)

    def reports(self) -> dict[str, FullIterationReport]:
        names = {False: "training", True: "validation"}
        return {names[key]: iteration.report() for key, iteration in self._iterations.items()}

    def release(self) -> None:
        """Release both graphs; call it before ``destroy_process_group()``. Idempotent."""
        for iteration in self._iterations.values():
            iteration.release()

    def _step(self, batch: dict[str, Any]) -> Any:
        iterators = [None if taken is None else iter(taken) for taken in batch["batches"]]
        data_iterator = iterators if batch["several"] else iterators[0]
        return self._function(data_iterator=data_iterator, **batch["arguments"])


def _take(iterator: Iterator[Any] | None, count: int) -> list[Any] | None:
    if iterator is None:  # a pipeline stage that reads no data
        return None
    if isinstance(iterator, StaticBatches) and iterator.held < count:
        raise ValueError(
            f"data_iterator: its StaticLoader keeps {iterator.held} batches and a step takes "
            f"{count} at once: StaticLoader(..., held={count})"
        )
    return [next(iterator) for _ in range(count)]
