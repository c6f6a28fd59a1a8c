"""Random pipeline schedules for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from moe_graphs.engine.callables.order import Action
from moe_graphs.pipelines.schedule import Schedule


@st.composite
def schedules(draw) -> Schedule:
    """Chunks anywhere, microbatches in any order, some backwards split.

    Of all that can run next one runs next, so they are valid by construction.
    """
    pp = draw(st.integers(1, 3))
    more = draw(st.lists(st.integers(0, pp - 1), max_size=3))
    places = draw(st.permutations([*range(pp), *more]))
    microbatches = draw(st.integers(1, 4))
    passes = [(c, m) for c in range(len(places)) for m in range(microbatches)]
    split = {one for one in passes if draw(st.booleans())}
    waiting = [Action(kind, *one) for one in passes for kind in "FB"]
    waiting += [Action("W", *one) for one in sorted(split)]
    done: list[Action] = []
    while waiting:
        ready = [a for a in waiting if not _needed(a, len(places)) - set(done)]
        action = draw(st.sampled_from(ready))
        waiting.remove(action)
        done.append(action)
    return Schedule(tuple(tuple(a for a in done if places[a.chunk] == r) for r in range(pp)))


def _needed(action: Action, num_chunks: int) -> set[Action]:
    kind, chunk, m = action.kind, action.chunk, action.microbatch
    found = set()
    if kind == "F" and chunk > 0:
        found.add(Action("F", chunk - 1, m))
    if kind == "B":
        found.add(Action("F", chunk, m))
        if chunk + 1 < num_chunks:
            found.add(Action("B", chunk + 1, m))
    if kind == "W":
        found.add(Action("B", chunk, m))
    return found
