"""Updates beside the backward: a layer's parameters move while the layer before it computes.

    updates = UpdateInBackward(model, optimizer, max_programs=48)
    for batch in batches:
        for part in microbatches[:-1]:
            model(part).loss.backward()          # accumulates, as ever
        updates.backward(model(last).loss)       # no optimizer.step(), no zero_grad()

An update is limited by memory, a backward's GEMMs are by arithmetic: on a stream of its own, with
few programs, a part of it may be hidden. And gradients are given back while the backward runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.optim.adamw import AdamW

_AHEAD = 2  # groups whose gradients are kept while their updates run
# Between accumulation and the values to update by, these still average over ranks.
_REDUCERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


class UpdateInBackward:
    """The updates of ``optimizer``, each group's as soon as its last gradient is accumulated.

    Bit by bit what ``backward()``, ``optimizer.step()`` and ``zero_grad()`` do; eagerly, and in a
    ``FullIteration`` with ``optimizer=``. A group of which some parameter gets no gradient is
    updated behind the backward. Hooks of ``optimizer.step`` run once for each group.

    A parameter's gradient is final when every operation that it was given to has had its backward:
    tied weights and weights that are used twice are right, and so are non-reentrant checkpoints.
    Whatever else autograd has saved of a parameter (of ``weight.detach()``, say) makes it raise
    "modified by an inplace operation" when it comes to use it. It cannot see what a checkpoint
    or a function of yours reads in its backward without autograd: that finds the new values.
    An error in the backward leaves groups that are updated and groups that are not.

    Args:
        model: the module that the parameters belong to, on one device.
        optimizer: from now on its ``step()`` raises: clipping by a global norm, loss scaling and
            skipped steps (``DeviceStep``, ``GradScaler``) need all gradients before any update.
        groups: of parameters; by default those of every layer (numbered module) and of every
            module that is in none.
        max_programs: of the update's kernel at a time, about one for each SM that it is to have;
            None for as many as there is work for. On CUDA; for parameters that our kernel serves.

    Raises:
        ValueError: parameters in several groups, in none, of another model, on several devices,
            sharded (FSDP2), or of a model whose wrapper sums gradients over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW,
        *,
        groups: Sequence[Iterable[nn.Parameter]] | None = None,
        max_programs: int | None = 48,
    ) -> None:
        if not isinstance(optimizer, AdamW):
            raise ValueError(f"optimizer: a {type(optimizer).__name__}: use moe_graphs.optim.AdamW")
        if max_programs is not None and max_programs < 1:
            raise ValueError(f"max_programs: {max_programs} must be at least 1, or None")
        updated = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        _check_model(model, updated)
        chosen = _by_layer(model) if groups is None else [list(group) for group in groups]
        own = set(updated)
        self.groups = [[p for p in group if p in own] for group in chosen]
        _check_groups(self.groups, own)
        self.optimizer, self.max_programs = optimizer, max_programs
        device = updated[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        optimizer.register_step_pre_hook(_refuse_whole_step)

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()`` with the updates; afterwards every ``.grad`` of them is None.

        Raises:
            RuntimeError: a parameter gets gradients in a backward within this one (reentrant
                checkpoints), where nobody knows which is its last.
        """
        run = _Run(self.optimizer, self.groups, self.max_programs, self._stream)
        handles = [
            parameter.register_post_accumulate_grad_hook(run.arrived)
            for group in self.groups
            for parameter in group
        ]
        start = loss.register_hook(run.began)
        try:
            loss.backward()
            run.update_the_rest()
        finally:
            for handle in (start, *handles):
                handle.remove()
            run.join()


class _Run:
    """One backward. Hooks come on autograd's threads, one after the other."""

    def __init__(
        self,
        optimizer: AdamW,
        groups: Sequence[Sequence[Tensor]],
        max_programs: int | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._optimizer, self._groups, self._max_programs = optimizer, groups, max_programs
        self._stream, self._task = stream, -1
        self._group_of = {p: number for number, group in enumerate(groups) for p in group}
        self._missing = [set(group) for group in groups]
        self._streams: list[list[Any]] = [[] for _ in groups]
        # What updates still read, and who has to wait before its memory is given to another.
        self._running: deque[tuple[Any, list[Any], list[Tensor | None]]] = deque()

    def began(self, _: Tensor) -> None:
        self._task = torch._C._current_graph_task_id()

    def arrived(self, parameter: Tensor) -> None:
        number = self._group_of[parameter]
        missing = self._missing[number]
        if torch._C._current_graph_task_id() != self._task or parameter not in missing:
            raise RuntimeError(
                "UpdateInBackward: a parameter gets its gradient in a backward within the backward "
                "(a reentrant checkpoint), and may get more: pass use_reentrant=False"
            )
        missing.remove(parameter)
        if self._stream is not None:
            here = torch.cuda.current_stream(parameter.device)
            if here not in self._streams[number]:
                self._streams[number].append(here)
        if not missing:
            self._update(number, self._max_programs)

    def update_the_rest(self) -> None:
        """Nothing runs beside it."""
        for number, missing in enumerate(self._missing):
            if missing:
                if self._stream is not None:
                    self._streams[number] = [torch.cuda.current_stream(self._stream.device)]
                self._update(number, None)

    def join(self) -> None:
        if self._running and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._running.clear()

    def _update(self, number: int, max_programs: int | None) -> None:
        group, streams = self._groups[number], self._streams[number]
        update = partial(self._optimizer.step, parameters=group, max_programs=max_programs)
        if self._stream is None:
            update()
        else:
            for stream in streams:
                self._stream.wait_stream(stream)
            with torch.cuda.stream(self._stream):
                update()
            self._running.append(
                (self._stream.record_event(), streams, [parameter.grad for parameter in group])
            )
        for parameter in group:
            parameter.grad = None
        if len(self._running) > _AHEAD:
            # Not `record_stream`: what a capture records there it frees at its end, not before.
            done, streams, _ = self._running.popleft()
            for stream in streams:
                stream.wait_event(done)


def _refuse_whole_step(optimizer: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("parameters") is None:
        raise RuntimeError(
            "optimizer.step(): UpdateInBackward makes the updates of this optimizer within the "
            "backward: clipping by a global norm, loss scaling and skipped steps need all "
            "gradients before that: leave UpdateInBackward out, or the call of step()"
        )


def _by_layer(model: nn.Module) -> list[list[nn.Parameter]]:
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
        layer = parts[: numbers[0] + 1] if numbers else parts[:-1]
        groups.setdefault(".".join(layer), []).append(parameter)
    return list(groups.values())


def _check_model(model: nn.Module, updated: Sequence[Tensor]) -> None:
    held = set(model.parameters())
    if not updated or not held.issuperset(updated):
        raise ValueError("optimizer: it has no parameters that are trained, or some of no module")
    if len({parameter.device for parameter in updated}) > 1:
        raise ValueError("model: its parameters are on several devices: make one object for each")
    if any(hasattr(parameter, "to_local") for parameter in updated):
        raise ValueError(
            "model: parameters are sharded (DTensor), and FSDP2 reduces their gradients on streams "
            "of its own: call optimizer.step() behind the backward"
        )
    kinds = {type(module).__name__ for module in model.modules()}
    if found := kinds.intersection(_REDUCERS):
        raise ValueError(
            f"model: {min(found)} averages gradients over ranks after they are accumulated: call "
            f"optimizer.step() behind the backward"
        )


def _check_groups(groups: Sequence[Sequence[Tensor]], own: set[Tensor]) -> None:
    listed = [parameter for group in groups for parameter in group]
    if len(set(listed)) < len(listed):
        raise ValueError("groups: a parameter is in several: its update has one place")
    if len(listed) < len(own):
        raise ValueError(
            f"groups: {len(own) - len(listed)} parameters of the optimizer are in none"
        )
