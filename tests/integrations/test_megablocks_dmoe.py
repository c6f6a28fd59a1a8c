"""MegaBlocks' own dMoE on a GPU: in a user's model under scopes, and against ours after conversion.

A dMoE reads sizes on the host in its forward: it stays eager, what lies beside it is replayed.
"""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional

import moe_graphs
from moe_graphs import GraphConfig, GraphError
from moe_graphs.integrations.megablocks import from_megablocks, to_megablocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("megablocks") is None,
        reason="waits for megablocks (../shared/peers brings it to the GPU machine)",
    ),
    pytest.mark.filterwarnings("ignore"),  # MegaBlocks' own: names that torch has deprecated
]

DEVICE, WIDTH = "cuda", 128


def arguments(**options):
    from megablocks.layers.arguments import Arguments

    given = dict(
        hidden_size=WIDTH,
        ffn_hidden_size=256,
        bias=False,
        return_bias=False,
        activation_fn=functional.silu,
        moe_num_experts=8,
        moe_top_k=2,
        moe_normalize_expert_weights=1,
        moe_loss_weight=0.01,
        mlp_type="glu",
        mlp_impl="grouped",
        fp16=False,
        bf16=True,
        device=torch.device(DEVICE),
        init_method=functools.partial(nn.init.normal_, std=0.2),
    )
    return Arguments(**{**given, **options})


def dmoe(**options) -> nn.Module:
    from megablocks.layers.dmoe import dMoE

    torch.manual_seed(0)
    return dMoE(arguments(**options))


class Block(nn.Module):
    """A layer as a user of MegaBlocks writes it."""

    def __init__(self, **options) -> None:
        super().__init__()
        factory = dict(device=DEVICE, dtype=torch.bfloat16)
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH, **factory), nn.GELU())
        self.moe = dmoe(**options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.before(hidden)
        return hidden + self.moe(hidden)


def trained(scopes: str | None, z_loss: float = 0.0, steps: int = 6):
    """Losses, gradients and parameters; what was refused; the report."""
    from megablocks.layers import moe, router

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(moe_zloss_weight=z_loss, num_layers=2) for _ in range(2)))
    given = model[0].moe.experts.args
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    graphed = GraphConfig(scopes, warmup_steps=2, on_capture_error="error") if scopes else None
    config = graphed or GraphConfig(impl="none")
    graphs = moe_graphs.graph(model, config)
    generator = torch.Generator().manual_seed(1)
    seen, refused = [], []
    for _ in range(steps):
        moe.clear_load_balancing_loss()
        router.clear_router_zloss()
        hidden = torch.randn(4, 32, WIDTH, generator=generator).bfloat16().to(DEVICE)
        try:
            with graphs.step():
                out = model(hidden)
                loss = out.float().square().mean() + moe.batched_load_balancing_loss(given)
                if z_loss:
                    loss = loss + router.batched_router_zloss(given).sum()
                loss.backward()
                seen += [out.detach().clone(), loss.detach().clone()]
        except GraphError as error:  # at the end of the step
            refused.append(str(error))
        seen += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [parameter.detach().clone() for parameter in model.parameters()]
    report = graphs.report()
    graphs.release()
    moe.clear_load_balancing_loss()
    router.clear_router_zloss()
    return seen, refused, report


@functools.cache
def eager(z_loss: float = 0.0) -> list[torch.Tensor]:
    return trained(None, z_loss)[0]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    differing = [i for i, (a, b) in enumerate(zip(found, expected, strict=True))
                 if not torch.equal(a, b)]  # fmt: skip
    assert not differing, differing[:5]


@pytest.mark.parametrize("scopes", ["*.before", "*.router", "*.before,*.router"])
def test_scopes_beside_its_experts_are_replayed(scopes):
    found, refused, report = trained(scopes)
    assert not refused
    assert_equal(found, eager())
    assert report.captured == len(report.scopes) == 2 * len(scopes.split(","))
    assert report.matched == 4 * report.captured


@pytest.mark.parametrize("scopes", ["*.moe", "*.experts", "*.mlp"])
def test_scopes_that_contain_its_experts_are_refused_and_training_goes_on(scopes):
    found, refused, report = trained(scopes)
    assert len(refused) == 1
    assert "Tensor.cpu reads values on the host" in refused[0]
    assert "glu.py" in refused[0]
    assert_equal(found, eager())
    assert report.replayed == 0


def test_the_z_loss_keeps_its_router_out_of_graphs():
    """MegaBlocks appends logits to a list, once for every call that is the program's own."""
    found, refused, report = trained("*.router", z_loss=0.001)
    assert len(refused) == 1
    assert "_ROUTER_LOGITS" in refused[0]
    assert_equal(found, eager(0.001))
    assert report.replayed == 0


@pytest.mark.parametrize("shared", [False, True])
def test_conversions_are_bitwise_both_ways(shared):
    kwargs = dict(device=DEVICE, dtype=torch.bfloat16)
    layer = dmoe(shared_expert=shared, shared_expert_hidden_size=64, fc_kwargs=kwargs)
    for experts in ("moe_graphs", "megablocks"):
        ours = from_megablocks(layer, experts)
        state, found = layer.state_dict(), to_megablocks(ours).state_dict()
        assert list(state) == list(found)
        assert all(torch.equal(state[name], found[name]) for name in state)
    theirs = {name: each for name, each in state.items() if name.startswith("experts.")}
    assert all(torch.equal(ours.state_dict()[name], each) for name, each in theirs.items())


@pytest.mark.parametrize("experts", ["moe_graphs", "megablocks"])
def test_outputs_and_gradients_are_those_of_a_dmoe(experts):
    """MegaBlocks' router rounds its scores to bfloat16, so a few tokens go elsewhere.

    Such tokens are left out. For the others the tolerance allows that rounding, one in 256 for each
    score.
    """
    layer = dmoe(moe_loss_weight=0)
    ours = from_megablocks(layer, experts)
    generator = torch.Generator().manual_seed(3)
    hidden, grad = (torch.randn(4, 128, WIDTH, generator=generator).bfloat16() for _ in range(2))
    hidden_TD = hidden.view(-1, WIDTH).to(DEVICE)
    with torch.no_grad():
        chosen = (layer.router(hidden_TD)[2], ours.choose(hidden_TD).experts_TK)
    same_T = (chosen[0].sort(1).values == chosen[1].sort(1).values).all(1)
    assert same_T.float().mean() > 0.9
    grad = grad.to(DEVICE) * same_T.view(4, 128, 1)
    runs = []
    for module, output_of in ((layer, lambda out: out), (ours, lambda out: out.hidden)):
        inputs = hidden.to(DEVICE).requires_grad_()
        output = output_of(module(inputs))
        output.backward(grad.to(output.dtype))
        runs.append({"output": output.detach() * same_T.view(4, 128, 1), "input": inputs.grad})
    runs[0] |= _gradients(layer.router.layer.weight, layer.experts.mlp)
    in_theirs = to_megablocks(_with_gradients_as_weights(ours))
    runs[1]["router"] = in_theirs.router.layer.weight.detach()
    for name in ("w1", "v1", "w2"):
        runs[1][name] = getattr(in_theirs.experts.mlp, name).detach()
    for name, tolerance in TOLERANCES.items():
        theirs, found = (run[name].float() for run in runs)
        assert (found - theirs).norm() < tolerance * theirs.norm(), name


TOLERANCES = {"output": 0.02, "input": 0.05, "router": 0.1, "w1": 0.02, "v1": 0.02, "w2": 0.02}


def _gradients(router, mlp) -> dict[str, torch.Tensor]:
    return {"router": router.grad, **{name: getattr(mlp, name).grad for name in ("w1", "v1", "w2")}}


@torch.no_grad()
def _with_gradients_as_weights(layer):
    for parameter in layer.parameters():
        parameter.copy_(parameter.grad)
    return layer
