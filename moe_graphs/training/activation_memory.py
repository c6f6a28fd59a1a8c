"""One stack for what all MoE layers of a model keep for their backward (``ActivationStack``).

    dispatcher = make_dispatcher("symmetric", rows_factor=2.0)
    model = LanguageModel(config, dispatcher, dtype=torch.bfloat16)
    balanced = tokens * top_k * num_moe_layers             # rows on this rank, of a microbatch
    stack = use_activation_stack(model, rows=int(1.1 * balanced * microbatches_in_flight))
    step = DeviceStep(optimizer, process_group=dist.group.WORLD, activation_stack=stack)

    result = train(batch)                                  # as in ``training.overflow``, with
    if result.overflowed:                                  # step(overflow=output.dropped_tokens)
        with other_activation_stack(model, None), other_rows_factor(model, None):
            result = train(batch)

``rows_factor`` bounds the rows of one layer, which costs memory once; ``rows`` those of all of them
together, which costs memory for each. Routings differ from layer to layer, and so their sum differs
less from a balanced one than each of them: ``stack.most_rows`` says what would have been enough.

Every replay takes and gives back room as its routing asks for. What a forward without its backward
has left (an exception, a loss that was dropped, a backward that no graph served) is given back by
``DeviceStep`` behind the update, which no backward survives, or by ``stack.empty()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from moe_graphs.layers.activation_stack import ActivationStack
from moe_graphs.layers.moe import MoELayer, moe_layers


def use_activation_stack(
    model: nn.Module,
    rows: int,
    *,
    recompute_dispatch: bool = False,
    dtype: torch.dtype | None = None,
) -> ActivationStack:
    """Makes a stack, and all MoE layers of the model keep on it what they keep: before graphs are
    made.

    Args:
        rows: of all layers whose backwards are to come at the same time.
        recompute_dispatch: see ``ActivationStack``.
        dtype: of the activations, if autocast makes another one of it than the weights have.

    Raises:
        ValueError: the model has no MoE layers, or not of one size, or with dispatchers or experts
            that have no use for a stack.
    """
    layers = _some_moe_layers(model)
    weight = layers[0].router.weight
    stack = ActivationStack(
        rows,
        weight.shape[1],
        layers[0].config.ffn_hidden_size,
        recompute_dispatch=recompute_dispatch,
        dtype=next(layers[0].experts.parameters()).dtype if dtype is None else dtype,
        device=weight.device,
    )
    for layer in layers:
        layer.use_activation_stack(stack)
    return stack


@contextlib.contextmanager
def other_activation_stack(model: nn.Module, stack: ActivationStack | None) -> Iterator[None]:
    """Within this context the model's MoE layers use another stack, or none.

    Graphs were captured with their own: calls run eagerly in the block and are counted
    (``attribute``; with another stack ``moved``, and a warning), behind it they replay again.

    Raises:
        ValueError: as ``use_activation_stack``.
    """
    layers = _some_moe_layers(model)
    before = [layer.activation_stack for layer in layers]
    try:
        for layer in layers:
            layer.use_activation_stack(stack)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.use_activation_stack(own)


def _some_moe_layers(model: nn.Module) -> list[MoELayer]:
    layers = moe_layers(model)
    if not layers:
        raise ValueError("model: it has no MoE layer, and other layers use no activation stack")
    return layers
