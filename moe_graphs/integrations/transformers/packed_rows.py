"""Rows of several documents (``position_ids`` that begin anew, no mask) in graphs.

transformers reads the positions on the host to find out whether there are several documents, and
builds no mask for a single one, so neither layers nor whole steps would have one signature. Here
the model gets the number of each token's document in training, computed on the device, in place of
a mask. transformers hands on a mask of four dimensions as it is; attention reads the documents off
it (`kernels.document_attention`). So the inputs of layers are as long as the row, not its square,
and have one shape.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.integrations.transformers.changes import Changes, change_class, derived
from moe_graphs.integrations.transformers.mask_rules import (
    CAUSAL,
    WINDOWS,
    MaskRule,
    UnknownMasksError,
    builder_of,
    mask_rule,
)
from moe_graphs.kernels import document_attention
from moe_graphs.kernels.document_attention import has_document_kernel
from moe_graphs.layers.documents import document_ids, document_mask

DOCUMENTS = "_moe_graphs_documents"
_NOT_PACKED = ("attention_mask", "past_key_values", "cache")
# Collators give these for kernels that are not sdpa's. They differ from batch to batch.
OF_OTHER_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def mask_documents(model: Any, done: Changes) -> None:
    """Gives the model, in training, the mask of packed rows. ``done`` takes the change.

    A model whose masks are not known to be causal, or that has other attention than ``sdpa``, is
    left: transformers then builds its masks outside of the graphs of layers.
    """
    before, base = model.config._attn_implementation, builder_of(model)
    rule = _rule_or_reason(before, base)
    if not isinstance(rule, MaskRule):
        done.left("packing", before, 1, f"{rule}: packed rows are transformers' own")
        return
    setattr(base, DOCUMENTS, rule)
    kind: Any = type(base)
    restore = change_class([base], derived(kind, _masking))

    def undo() -> None:
        restore()
        delattr(base, DOCUMENTS)

    limit = "" if rule.window is None else f" of up to {rule.window} tokens"
    note = f"in rows{limit} that are packed by position_ids, documents see themselves alone"
    done.changed("packing", before, 1, note, undo)


def attention_within_documents(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """``sdpa`` of transformers, which also takes document ids ``[B, 1, 1, S]`` for a mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None and attention_mask.dtype == torch.int64:
        ids_BS = attention_mask[:, 0, 0]
        plain = kwargs.get("position_bias") is None
        if plain and has_document_kernel(query, value, dropout):
            mixed = document_attention(query, key, value, ids_BS, scale=scaling)
            return mixed.transpose(1, 2), None
        attention_mask = document_mask(ids_BS)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, **kwargs
    )


def _know_documents() -> None:
    """Lets ``sdpa`` take document ids; nothing else changes, for other models neither."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not attention_within_documents:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", attention_within_documents)


def _rule_or_reason(attention: str, base: Any) -> MaskRule | str:
    if attention != "sdpa":
        return f"{attention} attention"
    if "forward" in vars(base):
        return "the model has a forward of its own"
    try:
        rule = mask_rule(base)
    except UnknownMasksError as error:
        return str(error)
    if rule.reads_padding:
        return "linear attention"
    return rule if _masks_by_position(base) else "its masks are not known to follow position_ids"


class _Asked(Exception):
    """Signal that the model has asked for a mask; it was given ``position_ids`` or not."""


@torch.no_grad()
def _masks_by_position(base: Any) -> bool:
    """Whether the model gives ``position_ids`` to transformers' function for masks.

    Its forward is called with two tokens and ends there, before the first layer.
    """

    def asked(*args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> None:
        raise _Asked(position_ids is not None)

    forward: Any = inspect.unwrap(type(base).forward)
    names, device = forward.__globals__, base.device
    before = {name: names[name] for name in (CAUSAL, *WINDOWS) if name in names}
    two = torch.zeros(1, 2, dtype=torch.int64, device=device)
    names |= dict.fromkeys(before, asked)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            forward(base, input_ids=two, position_ids=two, use_cache=False)
    except _Asked as answer:
        return bool(answer.args[0])
    except Exception:
        return False
    finally:
        names |= before
    return False


def _masking(kind: type[Any]) -> Any:
    forward = kind.forward
    names = list(inspect.signature(forward).parameters)[1:]
    place = names.index("attention_mask")
    _know_documents()  # here, as unpickling calls this, too

    @functools.wraps(forward)
    def masking(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        positions = _packed(self, {**dict(zip(names, args, strict=False)), **kwargs})
        if positions is None:
            return forward(self, *args, **kwargs)
        kept = {name: x for name, x in kwargs.items() if name not in OF_OTHER_KERNELS}
        mask = document_ids(positions)[:, None, None]
        if place < len(args):
            return forward(self, *args[:place], mask, *args[place + 1 :], **kept)
        return forward(self, *args, **(kept | {"attention_mask": mask}))

    return masking


def _packed(model: nn.Module, given: dict[str, Any]) -> Tensor | None:
    """The positions of rows in training that may be packed, None for other calls."""
    positions, rule = given.get("position_ids"), getattr(model, DOCUMENTS)
    if (
        not model.training
        or not torch.is_grad_enabled()
        or not isinstance(positions, Tensor)
        or positions.dim() != 2
        or any(given.get(name) is not None for name in _NOT_PACKED)
        or given.get("use_cache")
        or rule.too_long(positions.shape[1]) is not None
    ):
        return None
    return positions
