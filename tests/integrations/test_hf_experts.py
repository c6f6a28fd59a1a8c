"""Experts of transformers' families on our kernels, against transformers' own."""

from __future__ import annotations

import contextlib
import copy
import importlib

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs.integrations.transformers import (
    NAME,
    experts_forward,
    experts_interface,
    register,
)
from moe_graphs.kernels.swiglu import swiglu_forward

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

from hf_families import FAMILIES, loss_and_gradients, skip_unknown, tiny, tokens, trained  # noqa: E402
from kept_bytes import kept_bytes  # noqa: E402

OFTEN = ("mixtral", "deepseek_v3", "gpt_oss")
GRAPHED = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe")


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.fixture
def calls(monkeypatch):
    """A list with an entry for each call of our forward, which no graph could lengthen."""
    counted = []

    def forward(*args):
        counted.append(args)
        return experts_forward(*args)

    monkeypatch.setitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, NAME, forward)
    return counted


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_eager_does(family, calls):
    skip_unknown(family)
    # DeepSeek V4's gradients lose 4e-5 in fp32, and its routers' (1e-19) are all rounding.
    dtype = torch.float64 if family == "deepseek_v4" else torch.float32
    expected, found = (
        loss_and_gradients(tiny(family, name).to(dtype), tokens()) for name in ("eager", NAME)
    )
    assert calls
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-12)
        assert (found[name] - value).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize(
    "family",
    [f if f in OFTEN else pytest.param(f, marks=pytest.mark.long) for f in GRAPHED],
)
def test_graphs_of_its_layers_are_eager_bit_for_bit(family):
    """Graphs of plain attention hold no cache, and the error of such a capture says so."""
    eager = trained(tiny(family, NAME, use_cache=False), contextlib.nullcontext)
    model = tiny(family, NAME, use_cache=False)
    graphs = moe_graphs.graph(model, moe_graphs.GraphConfig("model.layers.*"))
    graphed = trained(model, graphs.step)
    assert graphs.report().replayed > 0
    assert all(map(torch.equal, eager, graphed))


def test_a_transposed_weight_gets_its_gradient_as_it_lies():
    model = tiny("mixtral", NAME)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.grad.is_contiguous()
    assert experts.down_proj.grad.is_contiguous()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_of_other_ranks_add_nothing(family, device):
    """Half of the experts are here. Pairs of the others have numbers from 4 on, and any weights."""
    torch.manual_seed(0)
    whole = tiny(family, NAME).model.layers[0].mlp.experts
    for parameter in whole.parameters():  # biases, too
        nn.init.normal_(parameter, std=0.2)
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 1e-2)
    whole = whole.to(device, dtype)
    here = copy.deepcopy(whole)
    here.num_experts, here._is_expert_parallel = 4, True
    for name, parameter in whole.named_parameters():
        setattr(here, name, nn.Parameter(parameter.detach()[:4].clone()))
    experts, weights = torch.rand(20, 8).topk(2).indices.to(device), torch.rand(20, 2).to(device)
    others = experts >= 4
    found = []
    for module, given in ((here, weights), (whole, weights.masked_fill(others, 0))):
        hidden = torch.linspace(-1, 1, 20 * 64).view(20, 64).to(device, dtype).requires_grad_()
        given.requires_grad_()
        out = experts_forward(module, hidden, experts, given)
        leaves = (hidden, given, *module.parameters())
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    got, want = found
    expected = [*want[:2], want[2].masked_fill(others, 0), *(each[:4] for each in want[3:])]
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize(("module", "function"), experts_interface._CLAMPED)
def test_limited_activations_are_those_of_transformers(module, function):
    """The table knows functions by name, so each is tried on numbers below and above its limit."""
    family, (name, _) = module.removeprefix("modeling_"), function.split(".")
    try:
        models = importlib.import_module(f"transformers.models.{family}.{module}")
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    experts = nn.Module.__new__(getattr(models, name))
    nn.Module.__init__(experts)
    experts.has_gate, experts.is_concatenated = True, family != "gpt_oss"
    experts.limit = experts.swiglu_limit = 1.5
    experts.alpha = experts.swiglu_alpha = 1.7
    experts.act_fn = nn.SiLU()
    gate = experts_interface._gate_of(experts)
    rows = 3 * torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(swiglu_forward(rows, gate), experts._apply_gate(rows))
    experts.act_fn = nn.GELU()
    if gate.offset == 0 and family == "deepseek_v4":
        assert experts_interface._gate_of(experts) is None


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v4"])
def test_tokens_and_one_product_are_kept(family):
    """Biases need each token's weights of all experts as well, and the numbers of its experts."""
    experts = tiny(family, NAME).model.layers[0].mlp.experts
    chosen = torch.rand(20, 8).topk(2).indices
    hidden, weights = (torch.rand(20, n, requires_grad=True) for n in (64, 2))
    kept = kept_bytes(
        lambda: experts_forward(experts, hidden, chosen, weights), experts.parameters()
    )
    F = experts.down_proj.numel() // 8 // 64
    of_biases = 4 * 20 * 9 + 8 * 40 if experts.has_bias else 0
    assert kept == 4 * (20 * 64 + 40 * 2 * F) + 4 * 40 + 4 * (2 * 40 + 8) + of_biases


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_its_error_in_bf16_is_at_most_twice_that_of_grouped_mm(family):
    skip_unknown(family)
    # Sizes that both kernels take, and experts that decide alike in both precisions.
    sizes = dict(moe_intermediate_size=64)
    exact = loss_and_gradients(tiny(family, "eager", **sizes).cuda(), tokens("cuda"))
    runs = {}
    for implementation in ("grouped_mm", NAME):
        model = tiny(family, implementation, **sizes).to(torch.bfloat16).cuda()
        runs[implementation] = loss_and_gradients(model, tokens("cuda"))
    for name, value in exact.items():
        if "gate.weight" in name or "router" in name:
            continue  # which experts are chosen changes with the rounding of the layers before
        factor = 2 if value.numel() >= 16 else 4  # fewer elements are a small sample of errors
        theirs, ours = ((runs[i][name].float() - value).norm() for i in ("grouped_mm", NAME))
        assert ours <= factor * theirs + 1e-3 * value.norm(), name
