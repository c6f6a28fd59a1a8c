"""Compares the first replay of each recording with what eager computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from moe_graphs.engine.proof import ELSEWHERE, Difference, first_difference, is_noise, varies
from moe_graphs.engine.scopes.effects import Effects
from moe_graphs.engine.scopes.expected import Expected
from moe_graphs.engine.scopes.place import PendingBackward, Place
from moe_graphs.engine.scopes.recompute import compute_anew
from moe_graphs.engine.scopes.recording import RecordedBackward
from moe_graphs.engine.scopes.trials import ScopeCall, Trials
from moe_graphs.engine.snapshot import Snapshot


class Proofs:
    """Of the recordings of one model. ``verify``: whether forwards are compared at all; of
    backwards, those with a second eager run are."""

    def __init__(self, model: nn.Module, trials: Trials, *, verify: bool) -> None:
        self._model, self._trials, self._backend = model, trials, trials.backend
        self._verify = verify

    def difference_of_forward(
        self, place: Place, call: ScopeCall, expected: Expected, outputs: Sequence[Any]
    ) -> Difference | None:
        """How the first replay differs from eager, after which everything is as before the call;
        None if it does not, or if eager itself differs from one run to the next."""
        anywhere = place.planned.ranks.any
        found = expected.difference(outputs) if self._verify else None
        if not anywhere(found is not None):
            return None
        expected.before.put_back()
        again = self._trials.forward(call)
        eager_varies = expected.difference(again.outputs, again.written, again.scales) is not None
        may_vary = found is not None and found.only_order_of_sums and not eager_varies
        wrong = None
        if anywhere(may_vary):
            eager_varies |= _replays_vary(place, expected, anywhere)
        elif eager_varies:
            wrong = expected.unexplained(again.outputs, outputs)
        if found is not None and not eager_varies:
            wrong = found
        if anywhere(wrong is not None):
            return wrong or ELSEWHERE
        place.planned.not_reproducible = True
        expected.before.put_back()
        place.forward.graph.replay()
        return None

    def backward(
        self,
        pending: PendingBackward,
        incoming: Sequence[Tensor | None],
        recorded: RecordedBackward,
        eager: Sequence[Tensor | None],
        again: Sequence[Tensor | None] | None,
        effects: Effects,
    ) -> None:
        """Replays what has just been recorded and compares it with ``eager``, unless there is no
        second eager run ``again``. A difference makes the scope eager.

        It is replayed once: a backward works in the memory of what its forward has left for it.
        """
        effects.again()
        if recorded.graph is not None:
            recorded.graph.replay()
        if again is None or recorded.graph is None:
            return
        names = self._names_of(pending.place, recorded.uses)
        eager_varies = first_difference(names, eager, again) is not None
        rows = zip(names, eager, again, recorded.gradients, strict=True)
        compared = [(name, a, c) for name, a, b, c in rows if not is_noise(a, b, c)]
        found = first_difference(*zip(*compared, strict=True)) if compared else None
        if found is None and not eager_varies:
            found = effects.difference()
        anywhere = pending.place.planned.ranks.any
        may_vary = found is not None and found.only_order_of_sums and not eager_varies
        if anywhere(may_vary):

            def another() -> Difference | None:
                effects.again()
                with self._backend.on_stream():
                    difference, gradients = compute_anew(self._backend, pending, incoming)
                anew = [gradients[use] for use in recorded.uses]
                return difference or first_difference(names, eager, anew)

            eager_varies |= varies(another, anywhere)
        planned = pending.place.planned
        planned.not_reproducible |= eager_varies
        if anywhere(found is not None and not (eager_varies and found.only_order_of_sums)):
            planned.differs(found or ELSEWHERE)

    def agrees(self, place: Place, eager: Mapping[int, Tensor | None]) -> bool:
        """Replays the backward, and compares it with an eager one on the same gradients."""
        before = Snapshot(self._backend)
        place.backward.graph.replay()
        if before.has_drawn():
            before.put_back()
            return False
        names = self._names_of(place, place.backward.uses)
        expected = [eager[use] for use in place.backward.uses]
        difference = first_difference(names, expected, place.backward.gradients)
        return not place.planned.ranks.any(difference is not None)

    def _names_of(self, place: Place, uses: Sequence[int]) -> list[str]:
        of_parameters = {id(p): name for name, p in self._model.named_parameters()}
        leaves = place.forward.signature.leaves
        listed = [place.forward.listed[use] for use in uses]
        return [
            f"the gradient of input {leaves[each].name!r}"
            if isinstance(each, int)
            else f"the gradient of {of_parameters.get(id(each), 'a parameter')}"
            for each in listed
        ]


def _replays_vary(place: Place, expected: Expected, anywhere: Callable[[bool], bool]) -> bool:
    outputs = place.forward.outputs
    names = [f"output {number}" for number in range(len(outputs))]
    before = [output.clone() for output in outputs]

    def another() -> Difference | None:
        expected.before.put_back()
        place.forward.graph.replay()
        return first_difference(names, before, outputs)

    return varies(another, anywhere)
