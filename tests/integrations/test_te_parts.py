"""Transformer Engine's kernels as parts of our layers, on a GPU: against ours, in FP8, graphed.

Their products of fp32 are in TF32. Shapes: D model, F ffn, e experts, R rows, T tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import moe_graphs
from lm_runs import (
    QUIET,
    advance,
    fresh_trainer,
    on_transformer_engine,
    options,
    save_checkpoint,
    small_corpus,
)
from moe_graphs import GraphConfig
from moe_graphs.config import FullIterationConfig
from moe_graphs.engine.report import Report
from moe_graphs.integrations import transformer_engine as parts
from moe_graphs.layers import (
    GroupedExperts,
    LanguageModel,
    MoEConfig,
    MoELayer,
    TransformerConfig,
)
from moe_graphs.lm.checkpoint import load_checkpoint
from moe_graphs.lm.compare import compare
from moe_graphs.lm.data import HeldOut
from moe_graphs.registry import FP8_RECIPES
from stand_in_experts import run_on_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="waits for transformer-engine (../shared/peers brings it to the GPU machine)",
    ),
    pytest.mark.filterwarnings("ignore"),  # TE's own: deprecated names, recipes that change
]


@pytest.fixture(autouse=True, scope="module")
def _loads() -> None:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except OSError as error:  # of the cuDNN that others in this process have loaded
        pytest.skip(f"waits for a process of its own: {error}")


THEIRS = "transformer_engine"
D, F, E = 256, 128, 8
MOE = MoEConfig(
    num_experts=E,
    top_k=2,
    ffn_hidden_size=F,
    aux_loss_coef=0.01,
    shared_ffn_hidden_size=64,
    shared_gate=True,
)
CONFIG = TransformerConfig(
    hidden_size=D,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=512,
    vocab_size=97,
    max_sequence_length=64,
    qk_norm="head",
    hidden_dropout=0.1,
    moe=MOE,
    moe_layers=(False, True),
)
COUNTS = {
    "uneven": (5, 1, 70, 9, 33, 16, 2, 128),
    "empty experts": (0, 70, 0, 0, 1, 0, 3, 0),
    "fewer rows than experts": (0, 1, 0, 0, 0, 0, 1, 0),
    "no rows": (0,) * 8,
}
RECIPES = tuple(FP8_RECIPES)
SCOPES = (
    "attn",
    "moe_router",
    "attn,moe_router",
    "moe_router,moe_preprocess",
    "attn,mlp,moe_router,moe_preprocess",
)


def offsets(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def error(found: Tensor, wanted: Tensor) -> float:
    difference = found.detach().cpu().double() - wanted.detach().cpu().double()
    return (difference.norm() / wanted.double().norm().clamp(min=1e-30)).item()


def experts_and_oracle(dtype: torch.dtype) -> tuple[parts.TEExperts, nn.Module, nn.Module]:
    """Theirs and ours on the GPU, ours in fp64 on the CPU, with the same weights."""
    torch.manual_seed(0)
    theirs = parts.TEExperts(E, D, F, device="cuda", dtype=dtype)
    theirs.init_weights(std=0.1, out_std=0.1)
    ours = GroupedExperts(E, D, F, device="cuda", dtype=dtype)
    exact = GroupedExperts(E, D, F, dtype=torch.float64)
    for each in (ours, exact):
        each.load_stacked_weights(*theirs.stacked_weights())
    return theirs, ours, exact


def gradients(experts: nn.Module) -> tuple[Tensor, Tensor]:
    """The gradients in our layout."""
    if isinstance(experts, GroupedExperts):
        return experts.w1.grad, experts.w2.grad
    stacks = (
        torch.stack([p.grad.T for p in module.parameters()]) for module in (experts.w1, experts.w2)
    )
    return tuple(stacks)


def results(experts: nn.Module, rows_RD: Tensor, ends_e: Tensor, grad_RD: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    where = next(experts.parameters())
    experts.zero_grad()
    rows_RD = rows_RD.to(where.device, where.dtype, copy=True).requires_grad_()
    out_RD = run_on_rows(experts, rows_RD, ends_e.to(where.device))
    out_RD.backward(grad_RD.to(where))
    return [out_RD, rows_RD.grad, *gradients(experts)]


def rows_and_gradient(counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    shape = (sum(counts), D)
    return torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_experts_in_fp32(counts):
    theirs, _, exact = experts_and_oracle(torch.float32)
    rows_RD, grad_RD = rows_and_gradient(counts)
    found, wanted = (results(each, rows_RD, offsets(counts), grad_RD) for each in (theirs, exact))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert error(one, other) < 4e-3
    assert all(p.grad is not None for p in theirs.parameters())


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_experts_in_bf16_err_as_ours_do(counts):
    theirs, ours, exact = experts_and_oracle(torch.bfloat16)
    rows_RD, grad_RD = rows_and_gradient(counts)
    found, near, wanted = (
        results(each, rows_RD, offsets(counts), grad_RD) for each in (theirs, ours, exact)
    )
    for one, other, oracle in zip(found, near, wanted, strict=True):
        assert one.shape == oracle.shape
        assert error(one, oracle) <= 2 * error(other, oracle) + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_errs_as_ours_does(dtype):
    torch.manual_seed(0)
    hidden_TD = torch.randn(96, D).bfloat16()
    kinds = {"theirs": (THEIRS, "cuda", dtype), "exact": ("moe_graphs", "cpu", torch.float64)}
    if dtype == torch.bfloat16:
        kinds["ours"] = ("moe_graphs", "cuda", dtype)
    layers, found = {}, {}
    for name, (kind, device, precision) in kinds.items():
        layer = MoELayer(replace(MOE, experts=kind), D, linear="torch", device=device,
                         dtype=precision)  # fmt: skip
        layers[name] = layer
        if name == "theirs":
            layer.init_weights(0.1, 0.1)
        else:
            first = layers["theirs"]
            layer.experts.load_stacked_weights(*first.experts.stacked_weights())
            for part in ("router", "shared_expert", "shared_gate"):
                getattr(layer, part).load_state_dict(getattr(first, part).state_dict())
        x_TD = hidden_TD.to(device, precision, copy=True).requires_grad_()
        output = layer(x_TD)
        (output.hidden.square().sum() + output.aux_loss).backward()
        others = [p.grad for n, p in layer.named_parameters() if not n.startswith("experts.")]
        found[name] = [output.hidden, x_TD.grad, *others, *gradients(layer.experts)]
    for index, oracle in enumerate(found["exact"]):
        limit = 4e-3 if dtype == torch.float32 else 2 * error(found["ours"][index], oracle) + 1e-6
        assert error(found["theirs"][index], oracle) <= limit, index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_convert_bitwise_both_ways(dtype):
    theirs, ours, _ = experts_and_oracle(dtype)
    assert all(map(torch.equal, ours.stacked_weights(), theirs.stacked_weights()))
    assert torch.equal(theirs.w1.weight3, ours.w1[3].T)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_in_fp8_lose_little(recipe, counts):
    theirs, _, _ = experts_and_oracle(torch.bfloat16)
    rows_RD, grad_RD = rows_and_gradient(counts)
    wanted = [x.clone() for x in results(theirs, rows_RD, offsets(counts), grad_RD)]
    chosen = parts.fp8_recipe(recipe)
    for _ in range(4):  # until delayed scaling knows the scales
        with parts.fp8_autocast(chosen):
            found = results(theirs, rows_RD, offsets(counts), grad_RD)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.isfinite().all()
        assert error(one, other) < 0.15
    assert not sum(counts) or not torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("linear", ["torch", THEIRS])
def test_a_model_begins_with_the_same_weights(linear):
    found = []
    for config in (CONFIG, replace(CONFIG, linear=linear, moe=replace(MOE, experts=THEIRS))):
        torch.manual_seed(3)
        model = LanguageModel(config, device="cuda", dtype=torch.bfloat16)
        others = {n: p for n, p in model.named_parameters() if ".experts." not in n}
        found.append(others | dict(enumerate(model.layers[1].moe.experts.stacked_weights())))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_states_go_both_ways():
    ours = LanguageModel(CONFIG, device="cuda")
    theirs = LanguageModel(replace(CONFIG, linear=THEIRS), device="cuda")
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_meta_then_real():
    config = replace(CONFIG, linear=THEIRS, moe=replace(MOE, experts=THEIRS))
    model = LanguageModel(config, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cuda")
    model.init_weights()
    logits = model(torch.randint(97, (2, 32), device="cuda")).logits_BSV
    logits.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def trained(
    config: TransformerConfig,
    scopes: str | None,
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[list[Tensor], Report]:
    """Losses and gradients of every step, two microbatches each, and the last parameters."""
    torch.manual_seed(0)
    model = LanguageModel(config, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs = moe_graphs.graph(model, GraphConfig(scopes, "local" if scopes else "none"))
    generator, found = torch.Generator("cuda").manual_seed(1), []
    for _ in range(8):
        with around(), graphs.step():
            for _ in range(2):
                tokens = torch.randint(97, (2, 32), device="cuda", generator=generator)
                output = model(tokens)
                loss = output.logits_BSV.float().square().mean() + output.aux_loss
                loss.backward()
                found.append(loss.detach().clone())
                del output, loss  # their autograd functions keep views of outputs until they go
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    found += [p.detach().clone() for p in model.parameters()]
    report = graphs.report()
    graphs.release()
    return found, report


def check_replayed(report) -> None:
    assert report.replayed, report
    # The backward of their modules can be run once: the second microbatch is captured.
    assert set(report.eager_calls) <= {"warmup", "backward: not_captured"}, report


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("scopes", SCOPES)
def test_legal_scopes_are_bitwise_in_bf16(scopes):
    config = replace(CONFIG, linear=THEIRS, moe=replace(MOE, experts=THEIRS))
    expected, _ = trained(config, None)
    found, report = trained(config, scopes)
    assert all(map(torch.equal, expected, found))
    check_replayed(report)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("scopes", ["full", "attn,mlp,moe"])
def test_our_experts_among_their_projections_are_bitwise(scopes):
    expected, _ = trained(replace(CONFIG, linear=THEIRS), None)
    found, report = trained(replace(CONFIG, linear=THEIRS), scopes)
    assert all(map(torch.equal, expected, found))
    check_replayed(report)


@pytest.mark.parametrize("scopes", ["moe", "full"])
def test_scopes_with_their_experts_are_refused(scopes):
    model = LanguageModel(replace(CONFIG, moe=replace(MOE, experts=THEIRS)), device="cuda")
    with pytest.raises(ValueError, match="numbers of rows from the host"):
        moe_graphs.graph(model, GraphConfig(scopes))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("scopes", ["attn", "attn,mlp,moe_router,moe_preprocess"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_scopes_are_bitwise_in_fp8(recipe, scopes):
    config = replace(CONFIG, linear=THEIRS, moe=replace(MOE, experts=THEIRS))
    chosen = parts.fp8_recipe(recipe)
    expected, _ = trained(config, None, lambda: parts.fp8_autocast(chosen))
    found, report = trained(config, scopes, lambda: parts.fp8_autocast(chosen))
    assert all(map(torch.equal, expected, found))
    check_replayed(report)
    plain, _ = trained(config, None)
    assert not torch.equal(plain[0], expected[0])


def on_gpu(**changes):
    given = options(steps=12, microbatches=2)
    moe = replace(given.preset.model.moe, ffn_hidden_size=128)
    model = replace(given.preset.model, hidden_size=128, ffn_hidden_size=256, moe=moe)
    preset = replace(given.preset, model=model)
    given = replace(given, preset=preset, device=torch.device("cuda"))
    graphs = {"graph_config": changes.pop("graph_config", None)}
    return replace(on_transformer_engine(given, **changes), **graphs)


GRAPHS = {
    "scopes": (GraphConfig("attn,moe_router,moe_preprocess"), THEIRS),
    "whole steps": (FullIterationConfig(), "moe_graphs"),
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("graphs", "experts"), GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("fp8", ["none", *RECIPES])
def test_a_small_model_trains_graphed_as_eager(fp8, graphs, experts):
    given = on_gpu(fp8=fp8, experts=experts, graph_config=graphs)
    result = compare(given, small_corpus(), QUIET)
    assert result.losses_bitwise_equal, result.first_difference
    assert result.parameters_bitwise_equal
    assert result.eager.losses[-1] < result.eager.losses[0]
    check_replayed(result.report)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("fp8", ["none", *RECIPES])
def test_runs_are_resumed_bitwise(fp8, tmp_path):
    given = on_gpu(fp8=fp8)
    trainer = fresh_trainer(given)
    advance(trainer, 6)
    held_out = HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)
    assert trainer.bits_per_byte(held_out) < 8
    path = save_checkpoint(tmp_path, trainer)
    advance(trainer, 12)
    resumed = fresh_trainer(given)
    assert not load_checkpoint(path, resumed)
    advance(resumed, 12)
    assert torch.equal(resumed.history.loss, trainer.history.loss)
    assert all(map(torch.equal, resumed.model.parameters(), trainer.model.parameters()))
