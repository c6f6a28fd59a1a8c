"""Replays a recording as a node of the caller's autograd graph, and hands its gradients out."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_graphs.engine import fp8
from moe_graphs.engine.autograd import accumulates, has_hooks, is_wanted
from moe_graphs.engine.buffer_lease import BufferLease
from moe_graphs.engine.partial.capture import Recorder
from moe_graphs.engine.partial.recording import (
    CallSite,
    PendingBackward,
    RecordedBackward,
    layouts_of,
    versions_of,
)
from moe_graphs.engine.partial.slots import Slot
from moe_graphs.engine.partial.verify import recompute
from moe_graphs.engine.tensors import copy_to, leaves_of_outputs, unwrap
from moe_graphs.errors import GraphError
from moe_graphs.staged import open_blocks, recomputed_within

# ---- delayed weight gradients: backwards whose first part, for the inputs, has run


@dataclass(frozen=True)
class WeightsPart:
    """The weights' part of one backward of a scope.

    ``compute`` gives a gradient (or None) for each of ``parameters``, good until the next replay.
    """

    parameters: list[Tensor]
    compute: Callable[[], list[Tensor | None]]


class DelayedWeights:
    """A queue of backwards, oldest first.

    Attributes:
        is_collecting: whether a backward that runs now leaves its weights' part to the queue.
        each_by_itself: whether every backward of a scope is an entry of the queue by itself, and is
            always collected.
    """

    def __init__(self, each_by_itself: bool = False) -> None:
        self._waiting: deque[list[WeightsPart]] = deque()
        self._each_by_itself = each_by_itself
        self.is_collecting = each_by_itself

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Forgets the backwards of a step that has ended."""
        self._waiting.clear()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Context in which the backwards of all scopes belong to one entry of the queue."""
        self._waiting.append([])
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False

    def collect(self, pending: PendingBackward, part: WeightsPart) -> None:
        hooked = next(filter(has_hooks, pending.site.forward.parameters), None)
        if hooked is not None:
            raise GraphError(
                f"scope {pending.site.name!r}: a parameter {tuple(hooked.shape)} has gradient "
                f"hooks, which a delayed weight gradient does not run: remove them, or do not "
                f"delay this backward"
            )
        if self._each_by_itself:
            self._waiting.append([])
        self._waiting[-1].append(part)

    def replay_oldest(self) -> None:
        """Adds the weight gradients of the oldest backward to ``.grad``.

        If a parameter is used several times, its gradients are added up first, as autograd does.

        Raises:
            GraphError: if no backward waits.
        """
        if not self._waiting:
            raise GraphError(
                "backward_weight() without a backward that waits for it: call it once for every "
                "backward whose weights were delayed"
            )
        parts = self._waiting.popleft()
        uses = Counter(id(parameter) for part in parts for parameter in part.parameters)
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        for part in parts:
            alone = []
            for parameter, gradient in zip(part.parameters, part.compute(), strict=True):
                if gradient is None:
                    continue
                if uses[id(parameter)] == 1:
                    alone.append((parameter, gradient))
                else:
                    known = sums.get(id(parameter))
                    total = gradient.clone() if known is None else known[1] + gradient
                    sums[id(parameter)] = (parameter, total)
            _add_to_grad(alone)
        _add_to_grad(list(sums.values()))


@torch.no_grad()
def _add_to_grad(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    totals, addends = [], []
    for parameter, gradient in pairs:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        else:
            totals.append(parameter.grad)
            addends.append(gradient)
    if totals:
        torch._foreach_add_(totals, addends)


# ---- how gradients leave the static memory of a graph


def outgoing(
    slot: Slot,
    site: CallSite,
    recorded: RecordedBackward,
    nodes: Callable[[], Sequence[Node | None]],
) -> dict[int, Tensor | None]:
    """The gradients by use, as tensors that autograd may take.

    If a parameter has no ``.grad`` and nothing else ever writes to the static memory of its
    gradient, autograd gets that memory itself and makes it ``.grad``. If the parameter has a
    ``.grad`` already (in a later microbatch), autograd adds to it from the static memory, which is
    leased until the next replay in the slot. In every other case (hooks, ``autograd.grad``, inputs)
    the gradient is a copy. The copy is laid out like the parameter, so it can become ``.grad``
    without another copy.

    Args:
        nodes: per use, the node of autograd that gets its gradient.
    """
    results: dict[int, Tensor | None] = {}
    launches = recorded.launches
    if recorded.has_some_in_place or any(map(_has_grad, recorded.parameters)):
        results |= leased(slot, site, recorded, nodes)
        launches = recorded.launches_without(tuple(results))
    for launch in launches:
        copies = list(map(torch.empty_like, launch.likes))
        targets = list(map(unwrap, copies))
        if len(copies) == 1:
            targets[0].copy_(launch.gradients[0])
        elif copies:
            torch._foreach_copy_(targets, launch.gradients)
        results.update(zip(launch.uses, copies, strict=True))
    return results


def leased(
    slot: Slot,
    site: CallSite,
    recorded: RecordedBackward,
    nodes: Callable[[], Sequence[Node | None]],
    *,
    in_place_only: bool = False,
) -> dict[int, Tensor]:
    """The gradients among those of ``outgoing`` that are leased static memory."""
    found: dict[int, Tensor] = {}
    added: list[BufferLease] = []
    in_place: list[BufferLease] = []
    for use, parameter, lease in recorded.of_parameters:
        there = parameter.grad
        if there is None:
            leases = in_place if lease.in_place else None
        else:
            can_be_added = lease.can_be_added and there.layout is torch.strided
            leases = added if can_be_added and not in_place_only else None
        if leases is None:
            continue
        if not parameter._backward_hooks and accumulates(nodes()[use]):
            found[use] = lease.hand_out()
            leases.append(lease)
        elif there is None:
            lease.copied["hooks" if parameter._backward_hooks else "asked_for"] += 1
    slot.grant(site, added=added, in_place=in_place)
    return found


def _has_grad(parameter: Tensor) -> bool:
    return parameter.grad is not None


# ---- the node


class Replay(torch.autograd.Function):
    """The node of autograd that replays a scope: inputs and parameters in, outputs out.

    It lists an input or parameter once per use, and gradients leave it as tensors of their own. The
    backward replays a graph if one was captured for it. Otherwise it runs eagerly: on the autograd
    graph of the capture as long as that exists, else by computing the forward anew.
    """

    @staticmethod
    def forward(
        ctx: Any,
        slot: Slot,
        pending: PendingBackward,
        recorder: Recorder,
        delayed: DelayedWeights,
        leaves: Sequence[Any],
        *listed: Tensor,
    ) -> tuple[Tensor, ...]:
        site, forward = pending.site, pending.site.forward
        site.load(leaves)
        forward.graph.replay()
        site.replayed += 1
        # A replay changes these tensors unseen by autograd: an older autograd graph must notice.
        if forward.written:
            torch.autograd.graph.increment_version(forward.written)
        pending.versions = list(map(versions_of, forward.saved))
        if forward.scales is not None:
            pending.is_first_in_fp8 = fp8.claim_first()
        outputs = site.hand_out()
        if forward.constant_outputs:
            ctx.mark_non_differentiable(*map(outputs.__getitem__, forward.constant_outputs))
        ctx.set_materialize_grads(False)
        ctx.parts = slot, pending, recorder, delayed
        ctx.blocks = open_blocks.get()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        # A backward that no graph serves runs the forward anew, within the blocks of the forward.
        run = recomputed_within(_backward, ctx.blocks) if ctx.blocks else _backward
        return run(ctx, *gradients)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    slot, pending, recorder, delayed = ctx.parts
    slot.check_alive(pending)
    forward = pending.site.forward
    refuse_transforms(pending.site, gradients)
    nodes = _Nodes(ctx)
    results: dict[int, Tensor | None] = {}
    # Zero-bubble schedules run this node twice: for the inputs, and later for the weights.
    is_second_part = pending.is_done and forward.is_split
    if pending.is_over and slot.retains():
        return _another(slot, pending, recorder, gradients)
    if not is_second_part or _wants(nodes(), forward.listed, int):
        slot.check(pending)
        pending.note_gradients(gradients)
        pairs = zip(gradients, forward.differentiable, strict=True)
        incoming = [gradient for gradient, needed in pairs if needed]
        results |= _first_part(slot, pending, recorder, incoming, nodes)
        if pending.is_first_in_fp8:
            fp8.update_scales_of_backwards()
    pending.check_gradients(gradients)
    if forward.is_split and _wants(nodes(), forward.listed, Tensor):
        if delayed.is_collecting:
            delayed.collect(pending, _part(slot, pending, recorder))
        else:
            results |= _weights_part(slot, pending, recorder, nodes)
    return (None, None, None, None, None, *map(results.get, range(len(forward.listed))))


def _another(
    slot: Slot, pending: PendingBackward, recorder: Recorder, gradients: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """One more backward of a forward whose graph was retained; no recording serves it."""
    slot.check(pending)
    pairs = zip(gradients, pending.site.forward.differentiable, strict=True)
    incoming = [gradient for gradient, needed in pairs if needed]
    pending.site.planned.ran_backward_eagerly("second_backward")
    return (None, None, None, None, None, *recompute(recorder.backend, pending, incoming))


class _Nodes:
    """The node that gets the gradient, per use. Autograd is asked only when it is needed."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._found: list[Node | None] | None = None

    def __call__(self) -> Sequence[Node | None]:
        if self._found is None:
            self._found = [node for node, _ in self._ctx.next_functions]
        return self._found


def _wants(nodes: Sequence[Node | None], listed: Sequence[int | Tensor], kind: type) -> bool:
    """Whether the running backward needs a gradient of an input (``int``) or parameter."""
    return any(is_wanted(n) for n, each in zip(nodes, listed, strict=True)
               if isinstance(each, kind))  # fmt: skip


# This skips the checks of ``Function.apply`` in Python: there is no transform here, and no wrapper.
_apply = super(torch.autograd.Function, Replay).apply


def replay(
    slot: Slot,
    pending: PendingBackward,
    recorder: Recorder,
    delayed: DelayedWeights,
    leaves: Sequence[Any],
) -> list[Any]:
    """Replays the forward on the leaves of a call; returns the leaves of the outputs."""
    site, forward = pending.site, pending.site.forward
    listed = []
    for each in forward.listed:
        listed.append(leaves[each] if isinstance(each, int) else each)
    produced = _apply(slot, pending, recorder, delayed, leaves, *listed)
    site.note_handed(produced)
    return leaves_of_outputs(forward.output_leaves, produced, leaves)


def _part(slot: Slot, pending: PendingBackward, recorder: Recorder) -> WeightsPart:
    listed = enumerate(pending.site.forward.listed)
    parameters = {use: each for use, each in listed if isinstance(each, Tensor)}

    def compute() -> list[Tensor | None]:
        gradients = _weights_part(slot, pending, recorder, None)
        return [gradients.get(use) for use in parameters]

    return WeightsPart(list(parameters.values()), compute)


def _weights_part(
    slot: Slot, pending: PendingBackward, recorder: Recorder, nodes: _Nodes | None
) -> dict[int, Tensor | None]:
    """Gradients of the parameters by use, if they are computed apart.

    Without ``nodes`` they are static memory, good until the next replay in the slot.
    """
    site = pending.site
    slot.weights_done(pending)
    if pending.weight_gradients is not None:
        return pending.weight_gradients
    if site.weights is None:
        assert site.run is not None
        second_uses = site.run.second_uses  # a failed capture drops the run
        gradients = recorder.backward_of_weights(slot, pending)
        return dict(zip(second_uses, gradients, strict=True))
    slot.backward_pool.added.reclaim()
    if site.weights.graph is not None:
        site.weights.graph.replay()
    if nodes is None:
        return dict(zip(site.weights.uses, site.weights.gradients, strict=True))
    return outgoing(slot, site, site.weights, nodes)


def _first_part(
    slot: Slot,
    pending: PendingBackward,
    recorder: Recorder,
    incoming: Sequence[Tensor | None],
    nodes: _Nodes,
) -> dict[int, Tensor | None]:
    """The gradients by use: all of them or, if the backward is split, those of the inputs."""
    site = pending.site
    reason = slot.unreplayable(pending, layouts_of(incoming))
    if reason is None:
        slot.backward_done(pending, replayed=True)
        return _replayed(slot, pending, recorder, incoming, nodes)
    if site.open is not None:
        results = recorder.backward(slot, pending, incoming)
        slot.backward_done(pending, replayed=site.backward is not None)
        failed = site.planned.refused or recorder.failure
        # The replay has left the same gradients in place.
        if site.backward is not None and not failed:
            results |= leased(slot, site, site.first or site.backward, nodes, in_place_only=True)
        return results
    site.planned.ran_backward_eagerly(reason)
    gradients = dict(enumerate(recompute(recorder.backend, pending, incoming)))
    backward, forward = site.backward, site.forward
    has_other_layout = reason == "other_layout" and not forward.is_split
    if (
        has_other_layout
        and backward is not None
        and _fits(backward, incoming)
        and slot.backward_pool.added.reclaim()
    ):
        slot.backward_done(pending, replayed=True)
        _copy_in(backward, incoming)
        if recorder.verification.agrees(pending, backward, gradients):
            site.verified_layouts.add(layouts_of(incoming))
        return gradients
    slot.backward_done(pending, replayed=False)
    if forward.is_split:
        is_parameter = {n: isinstance(each, Tensor) for n, each in enumerate(forward.listed)}
        pending.weight_gradients = {n: g for n, g in gradients.items() if is_parameter[n]}
        return {n: g for n, g in gradients.items() if not is_parameter[n]}
    return gradients


def _replayed(
    slot: Slot,
    pending: PendingBackward,
    recorder: Recorder,
    incoming: Sequence[Tensor | None],
    nodes: _Nodes,
) -> dict[int, Tensor | None]:
    site = pending.site
    recorded = slot.backward_to_replay(site)
    _copy_in(recorded, incoming)
    if recorded.anew is not None:
        recorded.replay(recorder.backend, pending.random)
    elif recorded.graph is not None:
        recorded.graph.replay()
    return outgoing(slot, site, recorded, nodes)


def _fits(recorded: RecordedBackward, incoming: Sequence[Tensor | None]) -> bool:
    """Whether static memory can hold the gradients; static memory of expanded ones is smaller."""
    given = [gradient for gradient in incoming if gradient is not None]
    return all(t.shape == g.shape for t, g in zip(recorded.targets, given, strict=True))


def _copy_in(recorded: RecordedBackward, incoming: Sequence[Tensor | None]) -> None:
    given = [gradient for gradient in incoming if gradient is not None]
    for target, gradient in zip(recorded.targets, given, strict=True):
        copy_to(target, gradient)


def refuse_transforms(site: CallSite, gradients: Sequence[Tensor | None]) -> None:
    """Checks that a backward is a plain one.

    Raises:
        GraphError: if it is to be differentiated again, transformed or batched.
    """
    if torch.is_grad_enabled():
        raise GraphError(
            f"scope {site.name!r}: a backward with create_graph=True: a graph has no derivative "
            f"of its backward: run forwards whose gradients are differentiated (a gradient "
            f"penalty) within graphs.paused(), or in the warm-up steps as well"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None or any(map(_is_batched, gradients)):
        raise GraphError(
            f"scope {site.name!r}: a backward under torch.func or with is_grads_batched=True, "
            f"which a graph was not captured for: run its forward within graphs.paused()"
        )


def _is_batched(gradient: Tensor | None) -> bool:
    functorch = torch._C._functorch
    return gradient is not None and (
        functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient)
    )
