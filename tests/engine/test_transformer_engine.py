"""Transformer Engine's modules under each FP8 recipe: graphed training is eager training.

The state that FP8 keeps is the same after it. ``test_fp8.py`` tests the same with a stand-in, on
the CPU.
"""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import CaptureError, FullIteration, GraphConfig, make_graphed_callables

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


# cuDNN attention of shorter sequences is wrong or an illegal access in plain CUDA graphs, too.
WIDTH, HEADS, LENGTH, BATCH, STEPS, MICROBATCHES = 256, 4, 256, 2, 20, 2
RECIPES = ("bf16", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
ENGINES = ("scopes", "whole steps", "callables")
# Each module is built and called, with the flag of the weights' cache if the module knows it.
MODULES = {
    "Linear": lambda te, **kw: te.Linear(WIDTH, WIDTH, **kw),
    "LayerNormLinear": lambda te, **kw: te.LayerNormLinear(WIDTH, WIDTH, **kw),
    "LayerNormMLP": lambda te, **kw: te.LayerNormMLP(WIDTH, 2 * WIDTH, **kw),
    "GroupedLinear": lambda te, **kw: te.GroupedLinear(4, WIDTH, WIDTH, **kw),
    "DotProductAttention": lambda te, **kw: te.DotProductAttention(
        HEADS, WIDTH // HEADS, attention_dropout=0.0
    ),
    "MultiheadAttention": lambda te, **kw: te.MultiheadAttention(
        WIDTH, HEADS, attention_dropout=0.0, input_layernorm=True, fuse_qkv_params=True, **kw
    ),
    "TransformerLayer": lambda te, **kw: te.TransformerLayer(
        WIDTH, 2 * WIDTH, HEADS, attention_dropout=0.0, hidden_dropout=0.1, fuse_qkv_params=True,
        self_attn_mask_type="causal", **kw
    ),
}  # fmt: skip


class Scope(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.kind = kind
        self.inner = MODULES[kind](te, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        if self.kind == "DotProductAttention":
            heads = x.view(LENGTH, BATCH, HEADS, WIDTH // HEADS)
            return self.inner(heads, 2 * heads, heads + 1)
        flag = {} if is_first_microbatch is None else {"is_first_microbatch": is_first_microbatch}
        if self.kind == "GroupedLinear":
            return self.inner(x.view(-1, WIDTH), [LENGTH * BATCH // 4] * 4, **flag)
        if self.kind in ("MultiheadAttention", "TransformerLayer"):
            return self.inner(x, **flag)
        return self.inner(x.view(-1, WIDTH), **flag)


class Model(nn.Module):
    """An eager layer, then two scopes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.scope_a, self.scope_b = Scope(kind), Scope(kind)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        x = self.scope_a(self.first(x), is_first_microbatch=is_first_microbatch).view(x.shape)
        return self.scope_b(x, is_first_microbatch=is_first_microbatch)


def fp8(recipe: str) -> contextlib.AbstractContextManager:
    if recipe == "bf16":
        return contextlib.nullcontext()
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    return te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, recipe)())


def fp8_state(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for module in model.modules():
        meta = getattr(module, "fp8_meta", {})
        states = [meta[key] for key in ("scaling_fwd", "scaling_bwd") if key in meta]
        for state in states:
            names = ("scale", "amax_history")
            found += [getattr(state, name) for name in names if hasattr(state, name)]
        for kept in getattr(module, "_fp8_workspaces", {}).values():
            found.append(kept.dequantize())
    return [tensor.clone() for tensor in found if isinstance(tensor, torch.Tensor)]


def train(kind: str, recipe: str, place: str, engine: str | None, *, cached: bool):
    """Losses, gradients, parameters and the state of FP8 after every step; the report."""
    torch.manual_seed(0)
    model = Model(kind).cuda()
    for parameter in model.parameters():  # whatever their own initialisation draws from
        nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    around = {name: lambda: contextlib.nullcontext() for name in ("call", "step")}
    around[place] = lambda: fp8(recipe)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (LENGTH, BATCH, WIDTH)

    def step(batch: torch.Tensor) -> torch.Tensor:
        losses = []
        for number, x in enumerate(batch):
            with around["call"]():
                output = model(x, is_first_microbatch=number == 0 if cached else None)
            losses.append(output.float().square().mean())
            losses[-1].backward()
        return torch.stack(losses).detach()

    run, graphs = step, None
    if engine == "scopes":
        graphs = moe_graphs.graph(model, GraphConfig("scope_*", warmup_steps=2))
        run = lambda batch: _in_step(graphs, step, batch)  # noqa: E731
    elif engine == "whole steps":
        graphs = run = FullIteration(step, model=model, warmup_steps=2)
    elif engine == "callables":
        sample = torch.zeros(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        kwargs = {"is_first_microbatch": True if cached else None}
        with fp8(recipe):
            make_graphed_callables(
                (model.scope_a, model.scope_b), ((sample,),) * 2, sample_kwargs=(kwargs,) * 2
            )
        graphs = model.scope_a.graphs
    seen = []
    for _ in range(STEPS):
        batch = torch.randn(
            MICROBATCHES, *shape, device="cuda", dtype=torch.bfloat16, generator=generator
        )
        with around["step"]():
            seen.append(run(batch).clone())
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seen += [p.detach().clone() for p in model.parameters()]
        seen += fp8_state(model)
    report = graphs.report() if graphs is not None else None
    if graphs is not None:
        graphs.release()
    return seen, report


def _in_step(graphs, step, batch):
    with graphs.step():
        return step(batch)


# In bf16 nothing is cached, and no autocast is around anything; this attention has no weights.
RECIPES_AND_CACHES = [("bf16", "call", "cast every time")] + [
    (recipe, place, weights)
    for recipe in RECIPES[1:]
    for place in ("call", "step")
    for weights in ("cast every time", "cached")
]
CASES = [
    (kind, *case)
    for kind in MODULES
    for case in RECIPES_AND_CACHES
    if (kind, case[2]) != ("DotProductAttention", "cached")
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kind", "recipe", "place", "weights"), CASES)
def test_graphed_is_bitwise_eager(kind, recipe, place, weights, engine):
    cached = weights == "cached"
    expected, _ = train(kind, recipe, place, None, cached=cached)
    found, report = train(kind, recipe, place, engine, cached=cached)
    assert len(found) == len(expected)
    differing = [i for i, (a, b) in enumerate(zip(found, expected, strict=True))
                 if not torch.equal(a, b)]  # fmt: skip
    assert not differing, (differing[:5], report)
    assert report.replayed, report
    # The backward of these modules can be run only once, so the second microbatch is captured.
    assert not report.eager_calls.keys() - {"warmup", "backward: not_captured"}, report


def test_an_autocast_within_a_scope_is_refused_by_name():
    class Enters(Scope):
        def forward(self, x):
            with fp8("Float8CurrentScaling"):
                return super().forward(x)

    model = nn.Sequential(Enters("Linear")).cuda()
    graphs = moe_graphs.graph(model, GraphConfig("0*", warmup_steps=1, on_capture_error="error"))
    x = torch.randn(LENGTH, BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(CaptureError, match="around the whole step"), graphs.step():
        model(x).float().sum().backward()


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_what_writes_past_the_dispatcher_is_refused_by_name(option):
    import transformer_engine.pytorch as te

    options = {option: True, "params_dtype": torch.bfloat16, "bias": False}
    model = nn.Sequential(te.Linear(WIDTH, WIDTH, **options)).cuda()
    model[0].weight.main_grad = torch.zeros_like(model[0].weight, dtype=torch.float32)
    graphs = moe_graphs.graph(model, GraphConfig("0*", warmup_steps=1, on_capture_error="error"))
    x = torch.randn(LENGTH * BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(CaptureError, match=option), graphs.step():
        model(x).float().sum().backward()
