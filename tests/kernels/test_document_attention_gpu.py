"""Attention within documents on a GPU: as right as a mask, and one graph for any documents."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe_graphs.kernels import document_attention
from moe_graphs.kernels.document_attention import has_document_kernel
from moe_graphs.kernels.document_attention.reference import plain_attention

pytestmark = pytest.mark.gpu

# Lengths of documents in rows of 700 tokens: some, one, one of a token, all of a token.
ROWS = ([1, 2, 130, 300, 267], [700], [699, 1], [1] * 700, [128] * 5 + [60])
SHAPES = [(8, 2, 128, 128), (4, 4, 192, 128), (3, 1, 64, 64), (2, 2, 24, 16), (2, 1, 256, 256)]


def ids_of(lengths):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).cuda()


def leaves_of(heads, kv_heads, size, value_size, dtype=torch.bfloat16, rows=2):
    torch.manual_seed(0)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size)]
    return [
        torch.randn(rows, 700, *shape, device="cuda")
        .to(dtype)
        .transpose(1, 2)
        .detach()
        .requires_grad_()
        for shape in shapes
    ]


def results(attend, leaves, gradient):
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_at_most_twice_those_of_a_mask(shape, dtype):
    for first, second in itertools.pairwise(ROWS):
        ids = torch.stack([ids_of(first), ids_of(second)])
        leaves = leaves_of(*shape, dtype)
        assert has_document_kernel(leaves[0], leaves[2], 0.0)
        exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
        gradient = torch.randn(2, shape[0], 700, shape[3], device="cuda").to(dtype)
        found = results(lambda *x, ids=ids: document_attention(*x, ids), leaves, gradient)
        masked = results(lambda *x, ids=ids: plain_attention(*x, ids, 0.0, None), leaves, gradient)
        expected = results(
            lambda *x, ids=ids: plain_attention(*x, ids, 0.0, None), exact, gradient.float()
        )
        for got, plain, right in zip(found, masked, expected, strict=True):
            norm = right.norm()
            error, theirs = ((x.float() - right).norm() / norm for x in (got, plain))
            assert error <= 2 * theirs + 1e-4


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_documents_in_a_row_are_bitwise_those_beside_other_documents(shape):
    """Other tokens in other documents change nothing, to the last bit."""
    leaves, ids = leaves_of(*shape, rows=1), ids_of(ROWS[0])[None]
    gradient = torch.randn(1, shape[0], 700, shape[3], device="cuda").bfloat16()
    before = results(lambda *x: document_attention(*x, ids), leaves, gradient)
    with torch.no_grad():
        for leaf in leaves:
            leaf[:, :, :133] = torch.randn_like(leaf[:, :, :133])
    after = results(lambda *x: document_attention(*x, ids), leaves, gradient)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:, :, 133:], other[:, :, 133:])


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_one_graph_serves_any_documents_bit_for_bit(shape):
    """Sums are in one order always, also without deterministic algorithms."""
    leaves, ids = leaves_of(*shape, rows=1), ids_of(ROWS[0])[None]
    gradient = torch.randn(1, shape[0], 700, shape[3], device="cuda").bfloat16()

    def run():
        return results(lambda *x: document_attention(*x, ids), leaves, gradient)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for lengths in ROWS:
        ids.copy_(ids_of(lengths))
        graph.replay()
        assert all(map(torch.equal, found, run()))
