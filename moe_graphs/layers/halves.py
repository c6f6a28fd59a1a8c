"""Two halves of a rank's tokens, one of which travels while the experts work on the other.

    main stream   send A | experts of A | experts of B  | return B
    side stream          | send B       | return A      |

The backward is the same from right to left. In every column at most one stream waits for other
ranks, and no expert waits for any: so a wait always ends, however few of a GPU's multiprocessors
are left to it, and all exchanges of a rank run one after the other in one order. Both halves so
have the same peers' memory: half of what the whole batch takes, and a second one if T is odd. Rows
for experts have room for the worst routing of each half, together that of the whole.

The reference is this layer run eagerly, which graphs are to the bit. A token's output is the sum of
the same addends as uncut, and the same to the bit where the products of a row do not depend on how
many rows there are. Gradients of the experts' weights are sums of two halves, each rounded to the
dtype of the weights: uncut ones to that rounding.

Shapes: T tokens of a rank, D model, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_graphs.dispatch import Dispatcher, SymmetricDispatcher
from moe_graphs.dispatch.symmetric_beside import (
    begin_combine,
    begin_preprocess,
    end_combine,
    end_preprocess,
)
from moe_graphs.staged import record


@record
class Uncut:
    """Tokens and their routing, of which nothing has been sent."""

    hidden_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor


def check_halves(dispatcher: Dispatcher, has_stack: bool, tokens: int) -> None:
    """
    Raises:
        ValueError: what does not go together with ``overlap="halves"``.
    """
    if not isinstance(dispatcher, SymmetricDispatcher):
        problem = f"it is for dispatcher 'symmetric', and this layer has {dispatcher.name!r}"
    elif dispatcher.process_group is None:
        problem = "experts are on one rank, where nothing travels"
    elif dispatcher.rows_factor is not None:
        problem = f"it has room for the worst routing, and rows_factor is {dispatcher.rows_factor}"
    elif has_stack:
        problem = "it is not built with an activation stack"
    elif tokens < 2:
        problem = f"{tokens} tokens have no two halves"
    else:
        return
    raise ValueError(f"overlap='halves': {problem}: change one of the two")


def run_halves(
    dispatcher: Dispatcher, experts: nn.Module, uncut: Uncut, num_experts: int
) -> tuple[Tensor, Tensor]:
    """``hidden_TD`` and the dropped pairs, 0-dim int64. The first half has one token more if T is
    odd."""
    assert isinstance(dispatcher, SymmetricDispatcher)
    tokens = uncut.hidden_TD.shape[0]
    sizes = [tokens - tokens // 2, tokens // 2]
    whole = (uncut.hidden_TD, uncut.weights_TK, uncut.experts_TK)
    (hidden_a, hidden_b), (weights_a, weights_b), (experts_a, experts_b) = (
        each.split(sizes) for each in whole
    )
    a = dispatcher.preprocess(hidden_a, weights_a, experts_a, num_experts)
    b_begun = begin_preprocess(dispatcher, hidden_b, weights_b, experts_b, num_experts)
    rows_a = experts(a.rows_RD, a.order.offsets_E)
    b = end_preprocess(b_begun)
    a_begun = begin_combine(dispatcher, rows_a, a)
    rows_b = experts(b.rows_RD, b.order.offsets_E)
    sums_a = end_combine(a_begun)
    sums_b = dispatcher.combine(rows_b, dispatcher.dispatch(b), b)
    return torch.cat([sums_a, sums_b]), a.dropped + b.dropped
