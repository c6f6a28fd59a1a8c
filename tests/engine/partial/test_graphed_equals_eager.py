"""Every legal scope list, dispatcher and kind of model: graphed training is eager training.

The comparison is bitwise: outputs, losses, aux losses, gradients, counters, parameters, random
numbers. Data and routing change, two microbatches are accumulated, dropout is on, and five steps
are replayed.
"""

from __future__ import annotations

import functools
import itertools

import pytest

import moe_graphs
from grids import covering, pairs
from moe_graphs import GraphConfig
from moe_graphs.config import SCOPE_STAGES
from moe_graphs.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    LocalDispatcher,
    PaddedDispatcher,
)
from training_runs import DEVICES, Trace, eager_trace, tiny_model, train

LONG = pytest.mark.long
DISPATCHERS = {
    "local": LocalDispatcher(),
    "padded": PaddedDispatcher(1.0),
    "all_to_all": AllToAllDispatcher(),
    "all_gather": AllGatherDispatcher(),  # over ranks: test_graphs_expert_parallel.py
}


def legal_scope_lists(layers: str, dispatcher: str) -> list[str]:
    """All legal scope lists, found by trying all lists, because the rules decide what is legal."""
    model = tiny_model("cpu", layers, True, DISPATCHERS[dispatcher])
    names = list(SCOPE_STAGES)
    lists = [c for n in range(1, len(names)) for c in itertools.combinations(names, n)]
    return [",".join(scopes) for scopes in lists if _is_legal(model, scopes)]


def _is_legal(model, scopes: tuple[str, ...]) -> bool:
    try:
        moe_graphs.graph(model, GraphConfig(scopes)).release()
    except ValueError:
        return False
    return True


CASES = [
    (layers, shared, dispatcher, scopes)
    for layers, dispatcher in [
        ("dense", "local"),
        *itertools.product(("moe", "mixed"), DISPATCHERS),
    ]
    for shared in ([False] if layers == "dense" else [False, True])
    for scopes in legal_scope_lists(layers, dispatcher)
]


@functools.cache
def reference(device: str, layers: str, shared: bool, dispatcher: str) -> Trace:
    return eager_trace(device, layers=layers, shared=shared, dispatcher=DISPATCHERS[dispatcher])


def test_the_list_of_cases_is_what_the_rules_allow():
    assert legal_scope_lists("dense", "local") == ["attn", "mlp", "full", "attn,mlp"]
    assert len(legal_scope_lists("moe", "local")) == 8
    assert len(legal_scope_lists("moe", "all_to_all")) == 5
    assert len(legal_scope_lists("mixed", "padded")) == 16
    assert legal_scope_lists("mixed", "all_gather") == legal_scope_lists("mixed", "local")
    assert "attn,mlp,moe_router,moe_preprocess" in legal_scope_lists("mixed", "all_to_all")


# Lists of scopes that have all pairs of what the parts of a layer may be.
PARTS = (("", "attn"), ("", "mlp"), ("", "moe", "moe_router", "moe_router,moe_preprocess"))
SHORT = {
    "full",
    *(",".join(filter(None, each)) for each in covering(list(itertools.product(*PARTS)))),
}


def few_short(places: list) -> list:
    """Each list of scopes in SHORT once, under all models and dispatchers; the rest is long."""
    places_of: dict[str, list] = {}
    for place in places:
        if not place.marks and place.values[3] in SHORT:
            places_of.setdefault(place.values[3], []).append(place)
    short, had = [], set()
    for those in places_of.values():
        short.append(max(those, key=lambda place: len(set(place.values) - had)))
        had.update(short[-1].values)
    is_short = lambda place: any(place is each for each in short)  # noqa: E731
    return [
        place if place.marks or is_short(place) else pytest.param(*place.values, marks=LONG)
        for place in places
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layers", "shared", "dispatcher", "scopes"), few_short(pairs(CASES)))
def test_graphed_training_is_bitwise_eager_training(device, layers, shared, dispatcher, scopes):
    model = tiny_model(device, layers, shared, DISPATCHERS[dispatcher])
    graphs = moe_graphs.graph(model, GraphConfig(scopes, warmup_steps=2, on_mismatch="error"))
    trace = train(model, graphs, device)
    trace.assert_equal(reference(device, layers, shared, dispatcher))
    report = graphs.report()
    assert report.captured == len(report.scopes)
    assert report.matched == 2 * 5 * report.captured
    assert report.eager_calls == {"warmup": 2 * 2 * report.captured}
    assert report.abandoned == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", ["*.attention", "layers.*", "*.attention.out"])
def test_submodules_by_pattern(device, pattern):
    model = tiny_model(device)
    graphs = moe_graphs.graph(model, GraphConfig(pattern, warmup_steps=2, on_mismatch="error"))
    train(model, graphs, device).assert_equal(reference(device, "mixed", True, "local"))
    assert graphs.report().captured == 2


@pytest.mark.parametrize("device", DEVICES)
def test_two_lists_of_names_and_patterns_together(device):
    model = tiny_model(device, layers="moe")
    config = GraphConfig(["moe_router", "*.attention"], warmup_steps=2)
    with pytest.raises(ValueError, match="lies inside scope"):
        moe_graphs.graph(model, config)
    graphs = moe_graphs.graph(model.layers, GraphConfig("0.attention,1.attention"))
    assert [scope.name for scope in graphs.report().scopes] == ["0.attention", "1.attention"]
    graphs.release()
