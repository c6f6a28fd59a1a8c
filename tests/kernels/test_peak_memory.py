"""Memory at the peak of kernels' forward and backward, on fake tensors that take a GPU's path.

Shapes: T tokens, D model, F ffn, E experts, K top-k, r rank, R = T*K rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from moe_graphs.kernels import linear_cross_entropy, route_rows, routed_experts
from moe_graphs.kernels.availability import as_on_gpus
from moe_graphs.kernels.cross_entropy.linear import CHUNK_BYTES
from moe_graphs.kernels.packed_weights import FORMATS, PackedWeight, Scratch
from moe_graphs.kernels.routed_experts.lora import LoRA, routed_experts_with_lora
from moe_graphs.planning.microbatch_memory import LiveStorages

T, D, F, E, K, RANK = 4096, 1024, 512, 32, 4, 8
ROWS_OF_D, ROWS_OF_F, TOKENS = 2 * T * K * D, 2 * T * K * F, 2 * T * D
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    with FakeTensorMode(), as_on_gpus():
        yield


def peak_of(run: Callable[[], object]) -> int:
    with LiveStorages() as live:
        run()
    return max(live.peaks.values())


def leaves() -> tuple[list[Tensor], list[Tensor]]:
    """Tokens, routing weights and two frozen weights; and factors."""
    shapes = ((T, D), (T, K), (E, D, 2 * F), (E, F, D))
    given = [torch.empty(shape, dtype=BF16) for shape in shapes]
    shapes = ((E, D, RANK), (E, RANK, 2 * F), (E, F, RANK), (E, RANK, D))
    factors = [torch.empty(shape, dtype=BF16) for shape in shapes]
    return [each.requires_grad_(i < 2) for i, each in enumerate(given)], factors


def experts(tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, *factors: Tensor) -> Tensor:
    order = route_rows(torch.zeros(T, K, dtype=torch.int64), E)
    if not factors:
        return routed_experts(tokens, order, weights, w1, w2)
    lora = LoRA(*factors[:2]), LoRA(*factors[2:])
    return routed_experts_with_lora(tokens, order, weights, w1, w2, *lora)


def packed_experts(tokens: Tensor, weights: Tensor, *stored: Tensor) -> Tensor:
    order, scratch = route_rows(torch.zeros(T, K, dtype=torch.int64), E), Scratch()
    pairs = stored[:2], stored[2:]
    packed = [PackedWeight(pair, "nf4", BF16, False, scratch) for pair in pairs]
    return routed_experts_with_lora(tokens, order, weights, *packed, None, None)


@pytest.mark.parametrize("kind", ["frozen", "LoRA", "packed"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_the_backward_of_experts_makes_of_rows(kind, checkpointed):
    """Gradients of outputs, of activations, and of gate and up, which may take their place.

    Gradients of outputs go before those of gate and up come: factors' gradients read the tokens.
    """
    given, factors = leaves()
    function, beside = experts, kind == "LoRA"
    if beside:
        given += [each.requires_grad_() for each in factors]
    elif kind == "packed":
        function = packed_experts
        shapes = [FORMATS["nf4"].packed_shapes(each.shape) for each in given[2:]]
        stored = [
            torch.empty(shape, dtype=dtype)
            for pair in shapes
            for shape, dtype in zip(pair, FORMATS["nf4"].dtypes, strict=True)
        ]
        given = [*given[:2], *stored]
    out = checkpoint(function, *given, use_reentrant=False) if checkpointed else function(*given)
    peak = peak_of(out.sum().backward)
    gate_up, of_outputs, of_activations = 2 * ROWS_OF_F, ROWS_OF_D, ROWS_OF_F
    if checkpointed:
        allowed = gate_up + of_outputs + of_activations
    else:
        allowed = of_activations + max(gate_up, of_outputs)
    short = 3 * TOKENS + 2 * sum(each.nbytes for each in factors) + 32 * T * K
    assert allowed <= peak <= allowed + short


def test_a_head_has_the_logits_of_one_chunk():
    rows, columns, width = 8192, 200_000, 64
    hidden = torch.empty(rows, width, dtype=BF16, requires_grad=True)
    weight, targets = torch.empty(columns, width, dtype=BF16), torch.zeros(rows).long()
    peak = peak_of(lambda: linear_cross_entropy(hidden, weight, targets))
    assert 0.9 * CHUNK_BYTES[False] <= peak <= CHUNK_BYTES[False] + 8 * rows * width
