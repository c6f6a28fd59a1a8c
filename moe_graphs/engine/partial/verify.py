"""Compares the first replay of each recording with eager, and computes some backwards anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe_graphs.engine import fp8
from moe_graphs.engine.autograd import LeafUses
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.partial.recording import (
    CallSite,
    PendingBackward,
    RecordedBackward,
    run_anew,
)
from moe_graphs.engine.partial.trials import ScopeCall, Trials, TriedForward
from moe_graphs.engine.snapshot import ParameterAliases, Snapshot
from moe_graphs.engine.tensors import as_leaf, static_copy, tensor_leaves
from moe_graphs.engine.tracing import Trace
from moe_graphs.engine.verify import ByValue, Difference, Left, difference, first_difference
from moe_graphs.errors import GraphError

# ---- a backward that no graph was captured for: its forward is computed anew, eagerly
# Reasons are a loss that uses other outputs than it used to, a backward out of order, or a number
# that has changed. The forward's static inputs and the position of the random number generators are
# still there. The outputs of the new forward must be the very same.


def recompute(
    backend: Backend, pending: PendingBackward, incoming: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients per use of the replayed forward. Waits for the device.

    Raises:
        GraphError: if the forward does not compute what it did.
    """
    difference, gradients = compute_anew(backend, pending, incoming)
    if difference is not None:
        raise GraphError(
            f"scope {pending.site.name!r}: its backward was not captured for this loss, and its "
            f"forward, computed anew, differs: {difference}; run such forwards within "
            f"graphs.paused()"
        )
    return gradients


def compute_anew(
    backend: Backend, pending: PendingBackward, incoming: Sequence[Tensor | None]
) -> tuple[Difference | None, list[Tensor | None]]:
    """The first difference of the outputs from those of the replay, and the gradients per use.

    Waits for the device.
    """
    site, forward = pending.site, pending.site.forward
    is_cached = forward.conditions.context.has_autocast_cache

    def leaf(number: int, static: Tensor) -> Tensor:
        # A linked one is copied, because garbage of the run would hold it as a caller does.
        own = static_copy(static) if number in forward.linked else static.detach()
        return as_leaf(own, static.requires_grad, is_cached)

    inputs = forward.signature.anew(forward.inputs, leaf)
    module = site.planned.scope.module
    aliases = ParameterAliases([module])
    # A scope that keeps its inputs only writes twice, as under torch's checkpoint.
    written = Snapshot(values=() if site.planned.recomputes else forward.written)
    try:
        with backend.drawing_from(pending.random):
            outputs = run_anew(site.planned.scope, forward, inputs, aliases)
        live, found = _outputs(site, outputs)
        names = [f"output {number}" for number in range(len(found))]
        difference = first_difference(names, forward.outputs, found)
        return difference, _gradients(site, aliases, inputs, live, incoming)
    finally:
        written.put_back()  # after the backward, which may read what its forward has written


def _outputs(site: CallSite, outputs: object) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs with a history, and all outputs of the graph.

    A tensor that is returned twice is listed once.

    Raises:
        GraphError: if the capture returned one tensor where this forward returns several.
    """
    found: dict[int, Tensor] = {}
    forward = site.forward
    for leaf, output in zip(forward.output_leaves, pytree.tree_leaves(outputs), strict=True):
        if leaf.source == "graph" and found.setdefault(leaf.value, output) is not output:
            raise GraphError(
                f"scope {site.name!r}: its forward, computed anew, does something else"
            )
    made = [found[number] for number in range(len(forward.outputs))]
    return list(compress(made, forward.differentiable)), made


def _gradients(
    site: CallSite,
    aliases: ParameterAliases,
    inputs: Sequence[Any],
    live: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
) -> list[Tensor | None]:
    leaves: dict[int, Tensor] = {}
    listed = site.forward.listed
    for each in listed:
        leaf = inputs[each] if isinstance(each, int) else aliases.alias_of(each)
        leaves[id(leaf)] = leaf
    count = len({each for each in listed if isinstance(each, int)})
    together = count if site.planned.use_reentrant else 0
    uses = LeafUses(live, list(leaves.values()), together)
    if len(uses.of) != len(listed):
        raise GraphError(f"scope {site.name!r}: its forward, computed anew, does something else")
    used = [(o, g) for o, g in zip(live, incoming, strict=True) if g is not None]
    if not used:
        return [None] * len(uses.of)
    outputs, gradients = zip(*used, strict=True)
    return uses.gradients(outputs, gradients)


@dataclass(frozen=True)
class Expected:
    """Results that the first replay of a forward has to leave, and the state before it."""

    tried: TriedForward
    before: Snapshot

    @property
    def left(self) -> Left:
        """Results of the trial run."""
        return _left_of(self.tried)

    def found(self, outputs: Sequence[Any]) -> Left:
        """Results that a replay has left just now."""
        written = [(tensor, tensor) for tensor, _ in self.tried.written]
        scales = fp8.named_tensors()
        return _left(outputs, written, {name: scales[name] for name in self.tried.scales})


def _left_of(tried: TriedForward) -> Left:
    return _left(tried.outputs, tried.written, tried.scales)


def _left(
    outputs: Sequence[Any],
    written: Sequence[tuple[Tensor, Tensor]],
    scales: Mapping[str, Tensor],
) -> Left:
    return [
        *((f"output {number}", leaf) for number, leaf in enumerate(tensor_leaves(outputs))),
        *((f"buffer {tuple(tensor.shape)}", value) for tensor, value in written),
        *scales.items(),
    ]


class SideEffects:
    """The effects of a backward besides its results.

    These are random numbers that it draws, tensors that it writes, and FP8 scales. A first run
    shows them. All other runs start from the state in which the first one started, and the effects
    happen only once.

    Attributes:
        read: addresses of the memory that the first run has read.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._before = backend, Snapshot(backend)
        self._after = Snapshot()
        self.read: set[int] = set()

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Context around the first run."""
        trace = Trace(self._backend.device, strict=False, refuse=False, before=self._before)
        with trace:
            yield
        self.read = trace.read
        self._after = Snapshot(self._backend, values=self._before.tensors)

    def again(self) -> None:
        """Puts everything back, for another run."""
        self._before.put_back()

    def has_drawn(self) -> bool:
        """Whether the first run has drawn random numbers."""
        return self._before.has_drawn()

    def once(self) -> Snapshot:
        """Context around all other runs."""
        return self._after

    def difference(self) -> Difference | None:
        """The first difference in the tensors that another run has written."""
        after, found = self._after, fp8.named_tensors()
        names = [f"the tensor {tuple(tensor.shape)} that it writes" for tensor in after.tensors]
        expected, scales = zip(names, after.values, strict=True), after.scales()
        written = zip(names, after.tensors, strict=True)
        return difference(
            [*expected, *scales.items()],
            [*written, *((name, found.get(name)) for name in scales)],
        )


class Verification:
    """Verifies the recordings of one model.

    ``verify`` says whether forwards are compared. Backwards are compared if there is a second eager
    run.
    """

    def __init__(self, model: nn.Module, trials: Trials, *, verify: bool) -> None:
        self._model, self._trials, self._backend = model, trials, trials.backend
        self._verify = verify

    def difference_of_forward(
        self, site: CallSite, call: ScopeCall, expected: Expected, outputs: Sequence[Any]
    ) -> Difference | None:
        """The first difference of the first replay from eager, or None.

        It is None also if eager differs from one run to the next. If there is a difference,
        everything is as before the call afterwards.
        """
        planned, graph, static = site.planned, site.forward.graph, site.forward.outputs

        def again() -> Left:
            expected.before.put_back()
            return _left_of(self._trials.forward(call))

        first: list[Tensor] = []

        def another_replay() -> Difference | None:
            if not first:
                first.extend(output.clone() for output in static)
            expected.before.put_back()
            graph.replay()
            return difference(_left(first, (), {}), _left(static, (), {}))

        eager, number = expected.left, len(tensor_leaves(expected.tried.outputs))
        replayed = expected.found(outputs) if self._verify else eager
        verdict = ByValue(planned.ranks.any).replayed(
            eager, replayed, again, another_replay, outputs=number
        )
        if verdict.not_reproducible:
            planned.not_reproducible = True
            expected.before.put_back()
            graph.replay()
        return verdict.difference

    def backward(
        self,
        pending: PendingBackward,
        incoming: Sequence[Tensor | None],
        recorded: RecordedBackward,
        eager: Sequence[Tensor | None],
        again: Sequence[Tensor | None] | None,
        effects: SideEffects,
    ) -> None:
        """Replays what has just been recorded and compares it with ``eager``.

        Without a second eager run ``again`` nothing is compared. A difference makes the scope
        eager. The backward is replayed only once, because it works in the memory of what its
        forward has saved.
        """
        effects.again()
        recorded.replay(self._backend, pending.random)
        if again is None or recorded.graph is None:
            return
        planned, names = pending.site.planned, self._names_of(pending.site, recorded.uses)

        def left(gradients: Sequence[Tensor | None]) -> Left:
            return list(zip(names, gradients, strict=True))

        def another_run() -> Left:
            effects.again()
            with self._backend.on_stream():
                _, gradients = compute_anew(self._backend, pending, incoming)
            return left([gradients[use] for use in recorded.uses])

        verdict = ByValue(planned.ranks.any).replayed_once(
            left(eager),
            left(again),
            left(recorded.gradients),
            effects.difference,
            another_run,
            any_order=planned.any_order,
        )
        planned.not_reproducible |= verdict.not_reproducible
        if verdict.difference is not None:
            planned.differs(verdict.difference)

    def agrees(
        self,
        pending: PendingBackward,
        recorded: RecordedBackward,
        eager: Mapping[int, Tensor | None],
    ) -> bool:
        """Replays the backward and compares it with an eager one on the same incoming gradients."""
        before, site = Snapshot(self._backend), pending.site
        recorded.replay(self._backend, pending.random)
        if before.has_drawn():
            before.put_back()
            return False
        names, uses = self._names_of(site, recorded.uses), recorded.uses
        found = difference(
            [(name, eager[use]) for name, use in zip(names, uses, strict=True)],
            list(zip(names, recorded.gradients, strict=True)),
        )
        return not site.planned.ranks.any(found is not None)

    def _names_of(self, site: CallSite, uses: Sequence[int]) -> list[str]:
        of_parameters = {id(p): name for name, p in self._model.named_parameters()}
        leaves = site.forward.signature.leaves
        listed = [site.forward.listed[use] for use in uses]
        return [
            f"the gradient of input {leaves[each].name!r}"
            if isinstance(each, int)
            else f"the gradient of {of_parameters.get(id(each), 'a parameter')}"
            for each in listed
        ]
