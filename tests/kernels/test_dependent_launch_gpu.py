"""Programmatic dependent launch on a GPU: the bits that kernels give which wait for one another."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from moe_graphs import kernels
from moe_graphs.kernels.availability import has_triton

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = pytest.mark.gpu


@pytest.fixture
def chains():
    if not has_triton() or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("waits for a Hopper GPU with Triton")
    import dependent_launch

    return dependent_launch


@pytest.mark.parametrize("size", [1 << 12, 1 << 20])
@pytest.mark.parametrize("name", ["own", "torch", "memset", "copy", "fork", "norms"])
def test_chain(chains, name, size):
    """Eager and replayed; kernels of torch, memsets, copies and other streams in between."""
    record = chains.run(chains.CHAINS[name], size)
    assert record["bitwise"], record
    assert record["replays_eager"], record
    assert record["plain_edges"].startswith("0 of "), record
    assert not record["pdl_edges"].startswith("0 of "), record


def test_layer(chains):
    """Routing, permutation and experts, forward and backward, eager and replayed."""
    torch.manual_seed(0)
    T, D, F, E, K = 2048, 512, 256, 16, 4
    rule = kernels.RoutingRule(K, False, True, 1.0, 1, 1, 0.01, 0.001)
    shapes = (T, D), (E, D), (E, D, 2 * F), (E, F, D), (D,)
    leaves = [torch.randn(s, device="cuda").bfloat16() * 0.1 for s in shapes]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    grad = torch.randn(T, D, device="cuda").bfloat16()

    def step() -> list[torch.Tensor]:
        hidden, gate, w1, w2, scale = leaves
        normed = kernels.rms_norm(hidden, scale, 1e-5)
        chosen = kernels.route(normed, gate, None, rule)
        order = kernels.route_rows(chosen.experts_TK, E)
        rows = kernels.swiglu_gemms(kernels.permute(normed, order), w1, w2, order.offsets_E)
        out = kernels.unpermute(rows, order, chosen.weights_TK)
        found = torch.autograd.grad(
            (out, chosen.aux_loss), leaves, (grad, torch.ones_like(chosen.aux_loss))
        )
        return [out.detach(), *found]

    expected = step()
    with chains.dependent_launch():
        eager = step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = step()
    for _ in range(3):
        for static in replayed:
            static.fill_(77)
        graph.replay()
        for want, *others in zip(expected, eager, replayed, strict=True):
            assert all(torch.equal(want, other) for other in others)
