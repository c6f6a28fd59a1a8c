"""The kernels behind split_heads on a CUDA GPU: errors, gradients, graphs.

Everything is held against fp64; an error may be at most twice that of torch's ops in the dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe_graphs.kernels.heads import (
    plain_heads_by_rank,
    plain_split_heads,
    split_heads,
    split_heads_by_rank,
)
from moe_graphs.layers import LanguageModel, TransformerConfig
from replays import check_replays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """B batch, S sequence, H query heads, G kv heads, Q head dim."""

    B: int
    S: int
    H: int
    G: int
    Q: int


SHAPES = [
    Shape(4, 4096, 32, 4, 128),
    Shape(2, 1024, 16, 4, 64),
    Shape(8, 1024, 12, 12, 64),
    Shape(3, 77, 6, 2, 96),
    Shape(1, 1, 1, 1, 2),
    Shape(2, 50, 40, 8, 256),
]


def operands(shape: Shape, norm: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> tuple:
    """Tables, then qkv and the weights."""
    torch.manual_seed(0)
    angles = torch.rand(shape.S, shape.Q // 2, device="cuda") * 100
    width = (shape.H + 2 * shape.G) * shape.Q
    leaves = [torch.randn(shape.B, shape.S, width, device="cuda").to(dtype)]
    if norm != "none":
        spans = (1, 1) if norm == "head" else (shape.H, shape.G)
        sizes = [span * shape.Q for span in spans]
        leaves += [(torch.rand(n, device="cuda") + 0.5).to(weight_dtype) for n in sizes]
    return (angles.cos(), angles.sin()), leaves


def output_gradients(shape: Shape, dtype: torch.dtype, transposed: bool) -> list[Tensor]:
    found = []
    for heads in (shape.H, shape.G, shape.G):
        grad = torch.randn(shape.B, heads, shape.S, shape.Q, device="cuda").to(dtype)
        grad = grad.transpose(1, 2)
        found.append(grad if transposed else grad.contiguous())
    return found


def plain(qkv, cos, sin, heads, kv_heads, query_weight=None, key_weight=None, eps=EPS):
    return plain_split_heads(qkv, cos, sin, query_weight, key_weight, heads, kv_heads, eps)


def results(split, shape: Shape, tables, leaves, gradients) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    heads = split(leaves[0], *tables, shape.H, shape.G, *leaves[1:], eps=EPS)
    return [*(x.detach() for x in heads), *torch.autograd.grad(heads, leaves, gradients)]


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", ["none", "head", "full"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_fp64(shape, norm, dtype):
    for weight_dtype in {dtype, torch.float32}:
        tables, leaves = operands(shape, norm, dtype, weight_dtype)
        gradients = output_gradients(shape, dtype, transposed=weight_dtype == dtype)
        ours = results(split_heads, shape, tables, leaves, gradients)
        again = results(split_heads, shape, tables, leaves, gradients)
        others = results(plain, shape, tables, leaves, gradients)
        exact = results(
            plain,
            shape,
            [x.double() for x in tables],
            [x.double() for x in leaves],
            [x.double() for x in gradients],
        )
        assert torch.equal(ours[2], others[2])
        for got, twice, other, want in zip(ours, again, others, exact, strict=True):
            assert (got.dtype, got.shape) == (other.dtype, other.shape)
            assert torch.equal(got, twice)
            assert error(got, want) <= 2 * error(other, want) + 1e-6


@pytest.mark.parametrize("norm", ["head", "full"])
def test_gradients_asked_for_one_by_one(norm):
    """Zero-bubble schedules and frozen parameters do so; an output that is not used is zero."""
    shape = SHAPES[1]
    tables, leaves = operands(shape, norm, torch.bfloat16, torch.float32)
    leaves = [x.requires_grad_() for x in leaves]
    heads = split_heads(leaves[0], *tables, shape.H, shape.G, *leaves[1:], EPS)
    gradients = output_gradients(shape, torch.bfloat16, transposed=True)
    together = torch.autograd.grad(heads, leaves, gradients, retain_graph=True)
    for leaf, want in zip(leaves, together, strict=True):
        (got,) = torch.autograd.grad(heads, leaf, gradients, retain_graph=True)
        assert torch.equal(got, want)
    (unused,) = torch.autograd.grad(heads[0], leaves[0], gradients[0])
    assert torch.equal(unused[..., : shape.H * shape.Q], together[0][..., : shape.H * shape.Q])
    assert not unused[..., shape.H * shape.Q :].any()


@pytest.mark.parametrize("norm", ["none", "head", "full"])
@pytest.mark.parametrize(("number", "ranks"), [(0, 4), (1, 2), (5, 8)])
def test_laid_out_by_rank_as_in_two_passes(number, ranks, norm):
    """Results agree to the bit: the same numbers in the same order, at other places."""
    shape = SHAPES[number]
    tables, leaves = operands(shape, norm, torch.bfloat16, torch.float32)
    given = (*tables, shape.H, shape.G)
    found, gradient = [], None
    for by_rank in (True, False):
        copies = [x.detach().clone().requires_grad_() for x in leaves]
        if by_rank:
            sent = split_heads_by_rank(copies[0], *given, ranks, *copies[1:], eps=EPS)
            gradient = torch.randn_like(sent)
        else:
            heads = split_heads(copies[0], *given, *copies[1:], eps=EPS)
            sent = plain_heads_by_rank(heads, ranks)
        found.append([sent.detach(), *torch.autograd.grad(sent, copies, gradient)])
    for ours, others in zip(*found, strict=True):
        assert torch.equal(ours, others)


def test_strided_inputs_and_gradients():
    """A row that is part of a wider one; gradients of a sum, which have no strides at all."""
    shape = SHAPES[3]
    tables, (qkv,) = operands(shape, "none", torch.bfloat16, torch.bfloat16)
    wide = torch.cat([qkv, qkv], -1)[..., : qkv.shape[-1]].requires_grad_()
    assert not wide.is_contiguous()
    whole = qkv.clone().requires_grad_()
    for leaf in (wide, whole):
        heads = split_heads(leaf, *tables, shape.H, shape.G)
        sum(x.sum() for x in heads).backward()
    assert torch.equal(wide.grad, whole.grad)


def test_replays_bitwise_on_other_numbers():
    shape = SHAPES[2]
    tables, leaves = operands(shape, "head", torch.bfloat16, torch.float32)
    gradients = output_gradients(shape, torch.bfloat16, transposed=True)
    leaves = [x.requires_grad_() for x in leaves]

    def step() -> list[Tensor]:
        heads = split_heads(leaves[0], *tables, shape.H, shape.G, *leaves[1:], EPS)
        # The third head is a view of its input.
        return [*(x.detach() for x in heads[:2]), *torch.autograd.grad(heads, leaves, gradients)]

    check_replays(step, leaves[0].normal_)


@pytest.mark.parametrize("norm", ["none", "head", "full"])
def test_a_model_under_autocast_equals_fp64(norm):
    config = TransformerConfig(
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=256,
        vocab_size=97,
        qk_norm=norm,
    )
    torch.use_deterministic_algorithms(False)  # flash attention's backward
    model = LanguageModel(config, device="cuda")
    exact = LanguageModel(config, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(97, (2, 64))
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        found = model(tokens.cuda()).logits_BSV
    found.float().square().mean().backward()
    expected = exact(tokens).logits_BSV
    expected.square().mean().backward()
    assert error(found.cpu(), expected) < 0.02
    for (name, got), want in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert got.grad.dtype == torch.float32
        assert error(got.grad.cpu(), want.grad) < 0.05, name
