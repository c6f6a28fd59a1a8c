"""Batches of changing length, padded on the right to a few lengths, which have graphs.

The model without its head pads what its layers get and cuts what it returns. So heads, losses,
auxiliary losses and the caller see the batch as it was given: nothing counts the padding. Tokens do
not see what stands behind them, so the numbers are those of the batch without padding, to rounding.

Shapes: B batch, S sequence, D hidden size, E experts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from moe_graphs.errors import GraphError
from moe_graphs.integrations.transformers.changes import Change, Changes, change_class, derived
from moe_graphs.integrations.transformers.mask_rules import UnknownMasksError, builder_of, mask_rule
from moe_graphs.integrations.transformers.packed_rows import DOCUMENTS, OF_OTHER_KERNELS
from moe_graphs.layers.expert_load import ExpertLoad
from moe_graphs.staged import open_blocks

SHAPES = 6  # with graphs at once: the chosen lengths, and two more that come later
_CHOSEN = 4
_LOOK = 8  # forwards whose lengths are looked at
_FIRST = 4  # steps that are observed, and the one that captures
_GRAIN = 64
_STATE = "_moe_graphs_lengths"
_TOKENS = ("input_ids", "inputs_embeds")
_BY_LENGTH = ("dynamic", "longrope")  # positions that depend on the length of the batch


class Lengths:
    """The lengths that batches are padded to, and the count of what was padded.

    As long as all batches have one length, nothing is padded, but masks that hide padding on the
    right alone are left out as in other batches. Otherwise the lengths of the first
    forwards are looked at, and the few lengths that cost least padding are chosen. Batches that are
    longer than all of them, or less than half of the next one, add a length. The batches of the
    first four steps are padded to the longest, so that its graphs are captured first, and graphs of
    other lengths work in their memory.

    Args:
        given: the lengths, if the user has chosen them.

    Attributes:
        chosen: the lengths, ascending; empty as long as nothing is padded.
        seen: how many forwards had which length.
        left_alone: why forwards were not padded, and how many.
        graphs: those of the layers, or None.
        model: the one that pads, or None.
        drops_masks: whether the model needs no mask that hides padding on the right alone.
        knows_documents: whether packed rows get the mask of their documents here.
    """

    def __init__(self, given: Sequence[int] = ()) -> None:
        self.chosen = sorted(set(given))
        self.seen: Counter[int] = Counter()
        self.left_alone: Counter[str] = Counter()
        self.tokens = self.padding = self.forwards = 0
        self.graphs: Any = None
        self.model: nn.Module | None = None
        self._loads: list[ExpertLoad] = []
        self._padded_steps = 0
        self.drops_masks = self.knows_documents = self.in_step = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of the model, which have no graphs, pad nothing."""
        return Lengths, ()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context around a training step, within which batches are padded.

        Lengths are chosen when it is entered, if enough forwards were seen.
        """
        if not self.chosen and len(self.seen) > 1 and self.seen.total() >= _LOOK:
            self.chosen = choose(self.seen)
        self._loads = _loads_of(self.model)
        self._padded_steps += bool(self.chosen)
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def count_real(self, tokens: Tensor) -> None:
        """Tells the counters of experts which tokens count: none of the padding."""
        for load in self._loads:
            load.rows = tokens.shape[0]
            if not hasattr(load, "real_length"):
                load.real_length = torch.zeros((), dtype=torch.int64, device=tokens.device)
            load.real_length.fill_(tokens.shape[1])

    def length_for(self, length: int) -> int | None:
        """The length to pad to; None as long as the batch stays as it is."""
        is_late = len(self.seen) == 1 and length not in self.seen and self.seen.total() >= _LOOK
        if is_late and not self.chosen:  # a batch of another length after many of one
            self.chosen = list(self.seen)
        self.seen[length] += 1
        if not self.chosen:
            return None
        place = bisect_left(self.chosen, length)
        if place == len(self.chosen) or self.chosen[place] >= 2 * rounded(length):
            insort(self.chosen, rounded(length))
        return self.chosen[-1 if self._padded_steps <= _FIRST else place]

    @property
    def looks(self) -> bool:
        """Whether it still looks at lengths that differ."""
        return not self.chosen and len(self.seen) > 1

    def lines(self) -> list[Change]:
        """Lines that say how many batches were padded, and why others were not."""
        lines = [Change("lengths", why, n, False, "not padded")
                 for why, n in self.left_alone.items()]  # fmt: skip
        if self.forwards:
            share = self.padding / self.tokens
            note = f"forwards were padded on the right to these lengths, {share:.0%} is padding"
            what = ", ".join(map(str, self.chosen))
            lines.append(Change("lengths", what, self.forwards, True, note))
        return lines


def _loads_of(model: nn.Module | None) -> list[ExpertLoad]:
    """Returns the counters of a model's experts, if ``moe_graphs.routing.watch`` has made some."""
    modules = () if model is None else model.modules()
    found = (vars(module).get("expert_load") for module in modules)
    return [load for load in found if isinstance(load, ExpertLoad)]


def rounded(length: int) -> int:
    """The next multiple of 64, or of an eighth of the power of two below."""
    grain = max(_GRAIN, (1 << (length.bit_length() - 1)) // 8)
    return -(-length // grain) * grain


def choose(seen: Mapping[int, int]) -> list[int]:
    """The few lengths that cost least padding; those seen themselves if these are few."""
    if len(seen) <= _CHOSEN:
        return sorted(seen)
    *smaller, largest = sorted(set(map(rounded, seen)))
    ways: Any = itertools.combinations(smaller, min(_CHOSEN - 1, len(smaller)))

    def padding(lengths: Any) -> int:
        return sum(n * lengths[bisect_left(lengths, each)] for each, n in seen.items())

    fits: list[tuple[int, ...]] = [(*way, largest) for way in ways]
    return list(min(fits, key=padding))


def pad_lengths(model: Any, lengths: Lengths, done: Changes) -> None:
    """Lets a model pad the batches of training; ``done`` takes the change."""
    base = builder_of(model)
    why = _why_not(base)
    if why is not None:
        done.left("lengths", type(base).__name__, 1, why)
        return
    with contextlib.suppress(UnknownMasksError):
        mask_rule(base)
        lengths.drops_masks = True
    lengths.model, lengths.knows_documents = base, hasattr(base, DOCUMENTS)
    setattr(base, _STATE, lengths)
    kind: Any = type(base)
    restore = change_class([base], derived(kind, _padding))

    def undo() -> None:
        restore()
        delattr(base, _STATE)

    done.on_undo(undo)
    done.watch(lengths.lines)


def _why_not(base: Any) -> str | None:
    if not set(_TOKENS) & inspect.signature(type(base).forward).parameters.keys():
        return "its forward takes no input_ids"
    if "forward" in vars(base):
        return "the model has a forward of its own: accelerate it before that"
    for config in (base.config, base.config.get_text_config()):
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        for each in (rope, *rope.values()) if isinstance(rope, dict) else ():
            if isinstance(each, dict) and each.get("rope_type") in _BY_LENGTH:
                return f"its positions depend on the length ({each['rope_type']})"
    return None


def _padding(kind: type[Any]) -> Any:
    forward = kind.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def padding(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        lengths: Lengths = getattr(self, _STATE)
        if not (lengths.in_step and self.training and torch.is_grad_enabled()):
            return forward(self, *args, **kwargs)
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        given |= given.pop("kwargs", {})
        tokens = next((x for name in _TOKENS if (x := given.get(name)) is not None), None)
        why = "no tokens are given" if tokens is None else _why_left_alone(given, tokens, lengths)
        if tokens is not None:
            lengths.count_real(tokens)
        if why is not None:
            lengths.left_alone[why] += 1
            return forward(self, *args, **kwargs)
        assert tokens is not None
        if lengths.drops_masks and _hides_only_the_right(given):
            given["attention_mask"] = None
        length = lengths.length_for(tokens.shape[1])
        if length is None:
            with _looking(lengths):
                return forward(self, **given)
        lengths.forwards += 1
        lengths.tokens += tokens.shape[0] * length
        lengths.padding += tokens.shape[0] * (length - tokens.shape[1])
        output = forward(self, **_padded(given, tokens, length, makes=not lengths.drops_masks))
        return _cut(output, tokens.shape[0], length, tokens.shape[1])

    return padding


def _looking(lengths: Lengths) -> contextlib.AbstractContextManager[None]:
    if not lengths.looks or lengths.graphs is None:
        return contextlib.nullcontext()
    paused: contextlib.AbstractContextManager[None] = lengths.graphs.paused("lengths")
    return paused


def _why_left_alone(given: Mapping[str, Any], tokens: Tensor, lengths: Lengths) -> str | None:
    """The reason why a batch stays as it is, or None."""
    if open_blocks.get():
        return "experts are recorded or replayed, for the tokens that there are"
    rows = {"attention_mask", "position_ids", *_TOKENS}
    if given.get("position_ids") is not None and given.get("attention_mask") is None:
        if not lengths.drops_masks:
            return "nobody knows what position_ids without a mask hide"
        if lengths.knows_documents:  # the mask of the documents takes the place of these
            rows |= set(OF_OTHER_KERNELS)
    for name, value in given.items():
        if name in ("past_key_values", "cache") and value is not None:
            return f"{name} is given"
        if isinstance(value, Tensor) and value.dim() and name not in rows:
            return f"nobody knows how to pad {name}"
    for name in ("attention_mask", "position_ids"):
        value = given.get(name)
        if value is not None and (value.dim() != 2 or value.shape[1] != tokens.shape[1]):
            return f"{name} has another shape than the tokens"
    return None


def _hides_only_the_right(given: Mapping[str, Any]) -> bool:
    """Whether a mask hides nothing but padding on the right, which no token sees anyway.

    All batches are alike without such masks: transformers makes none for a batch without padding.
    It waits for the device, as transformers' masks do.
    """
    mask_BS = given.get("attention_mask")
    if mask_BS is None or given.get("position_ids") is not None:
        return False
    real_BS = mask_BS.bool()
    return not bool((~real_BS[:, :-1] & real_BS[:, 1:]).any())


def _padded(
    given: Mapping[str, Any], tokens: Tensor, length: int, *, makes: bool
) -> dict[str, Any]:
    """The arguments with padding on the right; ``makes`` a mask that hides it if none is given."""
    padded, more = dict(given), length - tokens.shape[1]
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if mask is None and positions is None and makes:
        mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    padded["attention_mask"] = None if mask is None else pad(mask, (0, more))
    if positions is not None and more:
        behind = torch.arange(1, more + 1, device=positions.device, dtype=positions.dtype)
        padded["position_ids"] = torch.cat([positions, positions[:, -1:] + behind], 1)
    if given.get("input_ids") is not None:
        padded["input_ids"] = pad(given["input_ids"], (0, more))
    if given.get("inputs_embeds") is not None:
        padded["inputs_embeds"] = pad(given["inputs_embeds"], (0, 0, 0, more))
    return padded


def _cut(output: Any, rows: int, length: int, wanted: int) -> Any:
    """The output without its padding.

    Raises:
        GraphError: the output has something that nobody knows how to cut.
    """
    if length == wanted:
        return output
    if not hasattr(output, "items"):
        raise GraphError(
            f"the model returns a {type(output).__name__}, whose padding nobody knows how to cut: "
            f"accelerate_model(lengths=False), or return_dict=True"
        )
    for name, value in list(output.items()):
        if name == "last_hidden_state":
            output[name] = value[:, :wanted]
        elif name == "hidden_states":
            output[name] = tuple(each[:, :wanted] for each in value)
        elif name == "attentions":
            output[name] = tuple(each[..., :wanted, :wanted] for each in value)
        elif name == "router_logits":
            output[name] = tuple(_cut_router(each, rows, length, wanted) for each in value)
        else:
            raise GraphError(
                f"the model returns {name}, whose padding nobody knows how to cut: "
                f"accelerate_model(lengths=False)"
            )
    return output


def _cut_router(logits: Tensor, rows: int, length: int, wanted: int) -> Tensor:
    """Cuts ``[B * S, E]`` or ``[B, S, E]``."""
    cut = logits.reshape(rows, length, -1)[:, :wanted]
    return cut if logits.dim() == 3 else cut.reshape(rows * wanted, -1)
