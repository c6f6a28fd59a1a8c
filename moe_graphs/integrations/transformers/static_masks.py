"""Attention masks of transformers without a look at the batch: what a whole step needs.

transformers reads the attention mask, or the positions, in every forward, to find out whether there
is padding or packing: a host sync, and a branch that a graph would freeze. With
``static_attention`` nobody looks: attention is causal, or follows the 4-D mask of the batch;
``static_batch`` makes such batches from padded ones, on the host, before they are copied. What
needs a mask is an error in training, and transformers' own in evaluation and ``generate()``.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from moe_graphs.integrations.transformers.changes import Changes, change_class, derived
from moe_graphs.integrations.transformers.collected_outputs import collect_within
from moe_graphs.integrations.transformers.mask_rules import (
    MaskRule,
    UnknownMasksError,
    builder_of,
    configs_of,
    mask_rule,
)
from moe_graphs.integrations.transformers.packed_rows import attention_within_documents

STATIC_SDPA = "moe_graphs_sdpa"
_RULE = "_moe_graphs_masks"
IGNORED = -100  # what transformers' losses leave out


def static_attention(model: Any, done: Changes) -> None:
    """Lets a model with ``sdpa`` attention build no masks.

    Training with batches that would need one is an error. A model whose masks are not known to be
    causal is left. ``done`` takes the change.
    """
    before, base = model.config._attn_implementation, builder_of(model)
    if before != "sdpa":
        done.left("masks", before, 1, "only sdpa's are known: set_attn_implementation('sdpa')")
        return
    if "forward" in vars(base):
        done.left("masks", before, 1, "the model has a forward of its own: change it before that")
        return
    try:
        rule = mask_rule(base)
    except UnknownMasksError as error:
        done.left("masks", before, 1, f"{error}: transformers builds masks as before")
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # One with a name that no function for masks is known for: transformers then builds none.
    ALL_ATTENTION_FUNCTIONS.register(STATIC_SDPA, _attention)
    configs = [c for c in configs_of(base) if c._attn_implementation == "sdpa"]
    setattr(base, _RULE, (rule, configs))
    kind: Any = type(base)
    restore = change_class([base], derived(kind, _static))
    undo_collecting = collect_within(base)

    def undo() -> None:
        undo_collecting()
        restore()
        delattr(base, _RULE)

    limit = "" if rule.window is None else f" up to {rule.window} tokens"
    done.changed("masks", before, 1, f"none is built{limit}: see static_batch", undo)


def _static(kind: type[Any]) -> Any:
    forward = kind.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def static(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        rule, configs = getattr(self, _RULE)
        needs = _why_masks(rule, signature.bind(self, *args, **kwargs).arguments)
        if needs is not None and self.training and torch.is_grad_enabled():
            raise ValueError(needs)
        if needs is not None:  # evaluation and generation are transformers' own
            return forward(self, *args, **kwargs)
        for config in configs:
            config._attn_implementation_internal = STATIC_SDPA
        try:
            return forward(self, *args, **kwargs)
        finally:
            for config in configs:
                config._attn_implementation_internal = "sdpa"

    return static


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *args: Any, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    window = kwargs.get("sliding_window")
    if attention_mask is None and window is not None:
        too_long = MaskRule(window, "sliding_window").too_long(key.shape[2])
        if too_long is not None:
            raise ValueError(too_long)
    return attention_within_documents(module, query, key, value, attention_mask, *args, **kwargs)


def _why_masks(rule: MaskRule, given: dict[str, Any]) -> str | None:
    """The reason why a forward's arguments need transformers' masks, None if they do not."""
    given = {**given, **given.get("kwargs", {})}
    mask = given.get("attention_mask")
    has_four = isinstance(mask, Tensor) and mask.dim() == 4
    if mask is not None and not has_four:
        return (
            f"attention_mask {tuple(mask.shape)}: in a whole step nobody looks for padding in it. "
            f"Pass batches through static_batch, or undo()"
        )
    if has_four and rule.reads_padding:
        return (
            "attention_mask: layers of linear attention read no padding from one of four "
            "dimensions. Pad on the right, and pass batches through static_batch"
        )
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    tokens = embeddings if ids is None else ids
    too_long = None if tokens is None else rule.too_long(tokens.shape[1])
    if too_long is not None:
        return too_long
    for name in ("position_ids", "past_key_values", "cache"):
        if mask is None and given.get(name) is not None:
            return (
                f"{name}: in a whole step no mask is built from it. Pass a 4-D attention_mask, or "
                f"undo()"
            )
    return None


def static_batch(
    batch: dict[str, Tensor],
    padding: Literal["right", "any"] = "right",
    lengths: Sequence[int] = (),
) -> dict[str, Tensor]:
    """A padded batch for a model whose masks nobody builds. Use one ``padding`` for all batches.

    Reads the mask: call it on the host, in the collator for instance. It also serves graphs of
    layers, whose input then has one signature, with padding and without.

    Args:
        batch: ``input_ids``, ``attention_mask`` and ``labels``, all ``[B, S]``.
        padding: "right" leaves the mask out, since tokens do not see the padding behind them;
            "any" makes it ``[B, 1, S, S]``, causal and without padding (which keeps flash attention
            from being used). Both set labels of padding to -100.
        lengths: pads the batch on the right to the next of these lengths, if some are given. A
            ``FullIteration`` has one graph, so it takes one length.

    Returns:
        A new dictionary; losses and gradients are those of the padded batch, to rounding.

    Raises:
        ValueError: padding on the left with ``padding="right"``, a mask of another shape, a batch
            that is longer than all ``lengths``, or a tensor in it that nobody knows how to pad.
    """
    if padding not in ("right", "any"):
        raise ValueError(f"padding {padding!r} is unknown: choose right or any")
    made = _lengthened(batch, lengths) if lengths else dict(batch)
    mask = made.pop("attention_mask", None)
    if mask is None:
        mask = torch.ones_like(made["input_ids"])
    if mask.shape != made["input_ids"].shape:
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} wants the shape of input_ids, "
            f"{tuple(made['input_ids'].shape)}"
        )
    real_BS = mask.bool()
    if padding == "any":
        made["attention_mask"] = _causal_mask(real_BS)
    elif (~real_BS[:, :-1] & real_BS[:, 1:]).any():
        raise ValueError("a batch is padded on the left: pad on the right, or pass padding='any'")
    if "labels" in made:
        made["labels"] = made["labels"].masked_fill(~real_BS, IGNORED)
    return made


def _lengthened(batch: dict[str, Tensor], lengths: Sequence[int]) -> dict[str, Tensor]:
    """Returns the batch with padding on the right, up to the next of ``lengths``."""
    rows, length = batch["input_ids"].shape
    wanted = min((each for each in lengths if each >= length), default=None)
    if wanted is None:
        raise ValueError(
            f"a batch has {length} tokens in a row, more than all lengths {tuple(lengths)}: add one"
        )
    values = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    mask = torch.ones((rows, length), dtype=torch.long, device=batch["input_ids"].device)
    made = {"attention_mask": mask, **batch}
    for name, given in made.items():
        if name in values and given.shape == (rows, length):
            made[name] = pad(given, (0, wanted - length), value=values[name])
        elif length in given.shape[1:]:
            raise ValueError(f"{name} {tuple(given.shape)}: nobody knows how to pad it")
    return made


def _causal_mask(real_BS: Tensor) -> Tensor:
    length = real_BS.shape[1]
    causal_SS = torch.ones(length, length, dtype=torch.bool, device=real_BS.device).tril()
    return (causal_SS & real_BS[:, None, :])[:, None]
