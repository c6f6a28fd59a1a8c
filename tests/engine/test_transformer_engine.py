"""Transformer Engine's modules under each FP8 recipe: equal to eager, or eager and counted."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import FullIteration, GraphConfig, GraphError, make_graphed_callables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="waits for transformer-engine (../shared/peers brings it to the GPU machine)",
    ),
    pytest.mark.filterwarnings("ignore"),  # TE's own: deprecated names, FP8 on small shapes
]


@pytest.fixture(autouse=True, scope="module")
def _loads() -> None:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except OSError as error:  # of the cuDNN that others in this process have loaded
        pytest.skip(f"waits for a process of its own: {error}")


WIDTH, TOKENS, STEPS = 256, 128, 7
RECIPES = ("bf16", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP")
PLACES = ("around the call", "around the step", "in the forward")


class Model(nn.Module):
    """An eager layer, then the scope. ``within``: enters the recipe in its own forward."""

    def __init__(self, kind: str, recipe: str, within: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        sizes = (WIDTH, 2 * WIDTH) if kind == "LayerNormMLP" else (WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.scope = Scope(getattr(te, kind)(*sizes, params_dtype=torch.bfloat16), recipe, within)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scope(self.first(x))


class Scope(nn.Module):
    def __init__(self, inner: nn.Module, recipe: str, within: bool) -> None:
        super().__init__()
        self.inner, self.recipe, self.within = inner, recipe, within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fp8(self.recipe) if self.within else contextlib.nullcontext():
            return self.inner(x)


def fp8(recipe: str) -> contextlib.AbstractContextManager:
    if recipe == "bf16":
        return contextlib.nullcontext()
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    return te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, recipe)())


def train(kind: str, recipe: str, place: str, engine: str | None):
    """Losses and parameters after every step; named errors; replays; eager calls by reason."""
    torch.manual_seed(0)
    model = Model(kind, recipe, place == "in the forward").cuda()
    for parameter in model.parameters():  # whatever their own initialisation draws from
        nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    around_call = fp8(recipe) if place == "around the call" else contextlib.nullcontext()
    around_step = place == "around the step"
    generator = torch.Generator("cuda").manual_seed(1)
    sample = torch.zeros(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    named: list[str] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        with fp8(recipe) if place == "around the call" else contextlib.nullcontext():
            loss = model(x).float().square().mean()
        loss.backward()
        return loss.detach()

    graphs = None
    run = step
    if engine == "scopes":
        graphs = moe_graphs.graph(model, GraphConfig("scope*", warmup_steps=2))
        run = lambda x: _in_step(graphs, step, x, named)  # noqa: E731
    elif engine == "whole steps":
        graphs = FullIteration(step, model=model, warmup_steps=2, on_mismatch="eager")
        run = lambda x: _whole(graphs, step, x, named)  # noqa: E731
    elif engine == "callables":
        try:
            with around_call, fp8(recipe) if around_step else contextlib.nullcontext():
                make_graphed_callables(model.scope, (sample,), warmup_steps=2)
            graphs = model.scope.graphs
        except GraphError as error:
            named.append(str(error))
    seen = []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
        with fp8(recipe) if around_step else contextlib.nullcontext():
            seen.append(run(x).clone())
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seen += [p.detach().clone() for p in model.parameters()]
    report = graphs.report() if graphs is not None else None
    if graphs is not None:
        graphs.release()
    return seen, named, report


def _in_step(graphs, step, x, named):
    loss = None
    try:
        with graphs.step():
            loss = step(x)
    except GraphError as error:
        named.append(str(error))
    return loss


def _whole(graphs, step, x, named):
    try:
        return graphs(x)
    except GraphError as error:  # before anything was launched
        named.append(str(error))
        return step(x)


@pytest.mark.parametrize("engine", ["scopes", "whole steps", "callables"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_equal_refused_or_eager(kind, recipe, place, engine, record_property):
    expected, _, _ = train(kind, recipe, place, None)
    found, named, report = train(kind, recipe, place, engine)
    reasons = {} if report is None else dict(report.eager_calls)
    record_property("found", f"{0 if report is None else report.replayed} {reasons} {named}")
    assert len(found) == len(expected)
    differing = [i for i, (a, b) in enumerate(zip(found, expected, strict=True))
                 if not torch.equal(a, b)]  # fmt: skip
    assert not differing, (differing[:5], report, named)
    beside_warmup = {k: n for k, n in reasons.items() if k != "warmup"}
    assert named or beside_warmup or report.replayed
    if recipe == "bf16":
        # LayerNormMLP's gelu is a function of torch.compile, unless NVTE_TORCH_COMPILE=0.
        assert named or report.replayed
        assert all("torch.compile" in each for each in named)
        assert not named or kind == "LayerNormMLP"
