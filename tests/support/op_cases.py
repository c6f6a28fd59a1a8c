"""A call of every public op of `moe_graphs.kernels`, for tests that hold for all of them.

Shapes: T tokens, D model, F ffn, E experts, K top-k, R = T*K rows, N rows of logits, V vocabulary,
B batch, S sequence, M heads side by side, Q head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_graphs import kernels
from moe_graphs.kernels.fp8.linear import linear_fp8
from moe_graphs.kernels.heads.reference import rotate
from moe_graphs.kernels.routed_experts import down_projection
from moe_graphs.kernels.routed_experts.fp8 import routed_experts_fp8
from moe_graphs.kernels.swiglu import ClampedGate

T, D, F, E, K = 24, 64, 16, 4, 2
RULE = kernels.RoutingRule(
    top_k=K,
    sigmoid=True,
    normalize=True,
    scaling=2.5,
    num_groups=2,
    top_k_groups=1,
    aux_loss_coef=0.1,
    z_loss_coef=0.01,
)


@dataclass(frozen=True)
class OpCase:
    """`run(*leaves)` gives tensors; gradients flow from those of floats to all leaves."""

    run: Callable[..., Sequence[Tensor]]
    leaves: list[Tensor]

    def results(self, run: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
        """Outputs, then the leaves' gradients for fixed ones of the outputs."""
        outputs = list(run(*self.leaves))
        found = [o.detach() for o in outputs]
        floats = [o for o in outputs if o.requires_grad]
        if floats:
            gradients = [torch.linspace(-1, 1, o.numel()).view(o.shape).to(o) for o in floats]
            found += torch.autograd.grad(floats, self.leaves, gradients)
        return found


def op_cases(
    place: Callable[[Tensor], Tensor] = lambda x: x, dtype: torch.dtype = torch.float32
) -> dict[str, OpCase]:
    """Name -> case. `place` brings a tensor from the CPU to where the case is to run."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return place(torch.randn(shape, generator=generator).to(dtype)).requires_grad_()

    def random(*shape: int) -> Tensor:
        return place(torch.rand(shape, generator=generator))

    targets_N = torch.randint(40, (T,), generator=generator)
    targets_N[::3] = -100
    targets_N = place(targets_N)
    experts_TK, bias_E = torch.rand((T, E), generator=generator).topk(K).indices, random(E)
    order, gapped = _orders(experts_TK, place)
    experts_TK = place(experts_TK)
    tables, weights_TK = (random(6, 4), random(6, 4)), random(T, K).requires_grad_()
    documents_BS = place(torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]))
    wide_tables = [place(f(torch.arange(48.0)).view(1, 6, 8)) for f in (torch.cos, torch.sin)]

    def heads(qkv_BSM: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        return kernels.split_heads(qkv_BSM, *tables, 4, 2, *weights)

    def by_rank(qkv_BSM: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        return [kernels.split_heads_by_rank(qkv_BSM, *tables, 4, 2, n, *weights) for n in (2, 4)]

    def losses(logits_NV: Tensor) -> Sequence[Tensor]:
        kinds = ("mean", "sum", "none")
        return [kernels.cross_entropy(logits_NV, targets_N, reduction=kind) for kind in kinds]

    def rotary(query_BHSQ: Tensor, key_BGSQ: Tensor) -> Sequence[Tensor]:
        return kernels.apply_rotary(query_BHSQ, key_BGSQ, *wide_tables)

    def norms(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
        return [
            kernels.rms_norm(x, weight, 0.1, zero_centred=zero_centred)
            for zero_centred in (False, True)
        ]

    def sums(residual: Tensor, update: Tensor, weight: Tensor) -> Sequence[Tensor]:
        both = kernels.add_rms_norm(residual, update, weight, 0.1)
        return *both, *kernels.add_rms_norm(update, None, weight, 0.1, zero_centred=True)

    return {
        "add_rms_norm": OpCase(sums, [leaf(2, 6, D), leaf(2, 6, D), leaf(D)]),
        "apply_rotary": OpCase(rotary, [leaf(2, 3, 6, 8), leaf(2, 1, 6, 8)]),
        "cross_entropy": OpCase(losses, [leaf(T, 40)]),
        "document_attention": OpCase(
            lambda q, k, v: [kernels.document_attention(q, k, v, documents_BS)],
            [leaf(2, 4, 6, 8), leaf(2, 2, 6, 8), leaf(2, 2, 6, 16)],
        ),
        "gather_gemm": OpCase(
            lambda x, w: [kernels.gather_gemm(x, order, w)], [leaf(T, D), leaf(E, D, F)]
        ),
        "grouped_gemm": OpCase(
            lambda x, w: [kernels.grouped_gemm(x, w, order.offsets_E)],
            [leaf(T * K, D), leaf(E, D, F)],
        ),
        "permute": OpCase(lambda x: [kernels.permute(x, order)], [leaf(T, D)]),
        "permute with gaps": OpCase(lambda x: [kernels.permute(x, gapped)], [leaf(T, D)]),
        "rms_norm": OpCase(norms, [leaf(2, 6, D), leaf(D)]),
        "rotate": OpCase(lambda x: [rotate(x, *tables)], [leaf(2, 6, 3, 8)]),
        "route": OpCase(lambda x, w: kernels.route(x, w, bias_E, RULE), [leaf(T, D), leaf(E, D)]),
        "route_rows": OpCase(lambda: _tensors(kernels.route_rows(experts_TK, E)), []),
        "routed_experts": OpCase(
            lambda x, s, w1, w2: [kernels.routed_experts(x, order, s, w1, w2)],
            [leaf(T, D), weights_TK, leaf(E, D, 2 * F), leaf(E, F, D)],
        ),
        "routed_experts with gaps": OpCase(
            lambda x, s, w1, w2: [kernels.routed_experts(x, gapped, s, w1, w2)],
            [leaf(T, D), weights_TK, leaf(E, D, 2 * F), leaf(E, F, D)],
        ),
        "routed_experts, recomputed": OpCase(
            lambda x, s, w1, w2: [kernels.routed_experts(x, order, s, w1, w2, recompute=True)],
            [leaf(T, D), weights_TK, leaf(E, D, 2 * F), leaf(E, F, D)],
        ),
        "down_projection of a clamped gate": OpCase(
            lambda h, s, w2: [down_projection(h, order, s, w2, gate=ClampedGate(1.7, 0.8))],
            [leaf(T * K, 2 * F), weights_TK, leaf(E, F, D)],
        ),
        "split_heads": OpCase(heads, [leaf(2, 6, 64)]),
        "split_heads, norm per head": OpCase(heads, [leaf(2, 6, 64), leaf(8), leaf(8)]),
        "split_heads, norm of all": OpCase(heads, [leaf(2, 6, 64), leaf(32), leaf(16)]),
        "split_heads_by_rank": OpCase(by_rank, [leaf(2, 6, 64)]),
        "split_heads_by_rank, norm of all": OpCase(by_rank, [leaf(2, 6, 64), leaf(32), leaf(16)]),
        "swiglu": OpCase(lambda x: [kernels.swiglu(x)], [leaf(T, 2 * F)]),
        "swiglu_linear": OpCase(
            lambda x, w: [kernels.swiglu_linear(x, w)], [leaf(2, 3, 2 * F), leaf(D, F)]
        ),
        "unpermute": OpCase(
            lambda x, w: [kernels.unpermute(x, order, w)], [leaf(T * K, D), weights_TK]
        ),
        "unpermute with gaps": OpCase(
            lambda x, w: [kernels.unpermute(x, gapped, w)], [leaf(T * K, D), weights_TK]
        ),
        "routed_experts in FP8": OpCase(
            lambda x, s, w1, w2: [routed_experts_fp8(x, order, s, w1, w2)],
            [leaf(T, 128), weights_TK, leaf(E, 128, 256), leaf(E, 128, 128)],
        ),
        "routed_experts in FP8, weights, too": OpCase(
            lambda x, s, w1, w2: [
                routed_experts_fp8(x, order, s, w1, w2, keep_codes=True, weight_gradients=True)
            ],
            [leaf(T, 128), weights_TK, leaf(E, 128, 256), leaf(E, 128, 128)],
        ),
        "linear in FP8": OpCase(lambda x, w: [linear_fp8(x, w)], [leaf(2, T, 128), leaf(256, 128)]),
        "all": OpCase(_layer, [leaf(T, D), leaf(E, D), leaf(E, D, 2 * F), leaf(E, F, D)]),
    }


def _layer(hidden_TD: Tensor, gate_ED: Tensor, w1: Tensor, w2: Tensor) -> Sequence[Tensor]:
    """The dropless path of a layer; the order of rows is made within."""
    chosen = kernels.route(hidden_TD, gate_ED, None, RULE)
    order = kernels.route_rows(chosen.experts_TK, E)
    sums_TD = kernels.routed_experts(hidden_TD, order, chosen.weights_TK, w1, w2)
    return sums_TD, chosen.aux_loss


def _tensors(order: kernels.RowOrder) -> Sequence[Tensor]:
    return order.order_R, order.inverse_R, order.offsets_E


def _orders(
    experts_TK: Tensor, place: Callable[[Tensor], Tensor]
) -> tuple[kernels.RowOrder, kernels.RowOrder]:
    """Two orders: one without gaps, and one whose first row has no pair, and its pair no row."""
    order_R, inverse_R, offsets_E = _tensors(kernels.route_rows(experts_TK, E))
    whole = kernels.RowOrder(*map(place, (order_R, inverse_R, offsets_E)))
    order_R, inverse_R = order_R.clone(), inverse_R.clone()
    inverse_R[order_R[:1]], order_R[0] = -1, -1
    return whole, kernels.RowOrder(*map(place, (order_R, inverse_R, offsets_E)), has_gaps=True)
