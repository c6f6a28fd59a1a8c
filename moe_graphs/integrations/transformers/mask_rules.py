"""Whether a model of transformers wants nothing but causal masks, read off its code.

transformers' functions build masks for an attention implementation that they know. The rule is
closed: a model whose code reaches another function, or looks at the implementation by itself, is
not known.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import types
from dataclasses import dataclass
from typing import Any

from moe_graphs.integrations.transformers.reached_code import (
    codes,
    named_functions,
    reached,
    strings,
)

CAUSAL, RECURRENT = "create_causal_mask", "create_recurrent_attention_mask"
# What the configuration calls the number of tokens up to which the mask is causal alone.
WINDOWS = {
    "create_sliding_window_causal_mask": "sliding_window",
    "create_chunked_causal_mask": "attention_chunk_size",
}
# Built beside the causal one, it is that of cross attention.
_ACROSS = "create_bidirectional_mask"
_BUILDERS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
_OF_PADDING = "apply_mask_to_padding_states"  # of linear attention, with a mask of the batch alone
_MORE = {"or_mask_function", "and_mask_function", "block_sequence_ids", "allow_is_causal_skip"}
_IMPLEMENTATION, _TABLE = "_attn_implementation", "ALL_ATTENTION_FUNCTIONS"
_WITHOUT_WINDOW = {"full_attention", "linear_attention"}


@dataclass(frozen=True)
class MaskRule:
    """The masks of a model where a batch has no padding.

    Attributes:
        window: causal up to so many tokens, None for any number.
        named: what the configuration calls it.
        reads_padding: other layers than attention read padding from a mask of two dimensions.
    """

    window: int | None = None
    named: str = ""
    reads_padding: bool = False

    def too_long(self, tokens: int) -> str | None:
        if self.window is None or tokens <= self.window:
            return None
        return (
            f"{self.named}={self.window} needs a mask at {tokens} tokens, and whole steps build "
            f"none: shorten the rows, or use graphs of layers"
        )


class UnknownMasksError(ValueError):
    """A model whose masks may be other than causal; the text says why."""


def mask_rule(model: Any) -> MaskRule:
    """The rule of ``model``, a ``PreTrainedModel`` without its head.

    Raises:
        UnknownMasksError: its masks are not known to be causal.
    """
    functions, configs = list(reached(model.modules())), configs_of(model)
    builders = set().union(*(_builders(function, configs) for function in functions))
    unknown = builders - {CAUSAL, RECURRENT, *WINDOWS}
    if unknown:
        raise UnknownMasksError(f"its code builds masks by {', '.join(sorted(unknown))}")
    if not builders:
        raise UnknownMasksError("its code builds none by transformers' functions")
    if not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise UnknownMasksError("it has attention that is not causal")
    for function in functions:
        _check(function)
    if not all(getattr(config, "is_causal", True) for config in configs):
        raise UnknownMasksError("its configuration says is_causal=False")
    windows = [
        (window, named)
        for builder, named in WINDOWS.items()
        for config in configs
        if builder in builders
        and not set(getattr(config, "layer_types", None) or ["unknown"]) <= _WITHOUT_WINDOW
        and (window := getattr(config, named, None)) is not None
    ]
    window, named = min(windows, default=(None, ""))
    return MaskRule(window, named, RECURRENT in builders)


def builder_of(model: Any) -> Any:
    """The one model within ``model`` whose forward builds masks, else the one without its head."""
    from transformers import PreTrainedModel

    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    found = [m for m in models if _builders(inspect.unwrap(type(m).forward), [])]
    return found[0] if len(found) == 1 else model.base_model


def configs_of(model: Any) -> list[Any]:
    """The configurations that ``model`` and its modules read, each once."""
    found = {
        id(config): config
        for module in model.modules()
        if hasattr(config := vars(module).get("config"), _IMPLEMENTATION)
    }
    return list(found.values())


def _builders(function: types.FunctionType, configs: list[Any]) -> set[str]:
    """The names of transformers' functions for masks that ``function`` names."""
    found = {
        value.__name__ for value in named_functions(function, []) if value.__module__ in _BUILDERS
    }
    crosses = any(getattr(config, "add_cross_attention", True) for config in configs)
    return found if crosses or CAUSAL not in found else found - {_ACROSS}


def _check(function: types.FunctionType) -> None:
    where = function.__qualname__
    if "mask" in function.__name__ and function.__name__ != _OF_PADDING:
        raise UnknownMasksError(f"{where} makes masks by hand")
    more = _MORE & set(strings(function.__code__))
    if more:
        raise UnknownMasksError(f"{where} gives masks {', '.join(sorted(more))}")
    read = table = 0
    for code in codes(function.__code__):
        instructions = list(dis.get_instructions(code))
        for instruction, following in itertools.pairwise(instructions):
            # Whether it is "eager" has one answer for all others.
            read += instruction.argval == _IMPLEMENTATION and following.argval != "eager"
            table += instruction.argval == _TABLE
    if read > table:
        raise UnknownMasksError(f"{where} looks at {_IMPLEMENTATION} by itself")
