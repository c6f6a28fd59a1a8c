"""Keys and values for later tokens, which training has no use for.

They are more than memory: given a cache, transformers builds other masks (rows packed by
``position_ids`` see one another), linear attention runs other kernels, and no graph can hold it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.integrations.transformers.changes import Changes, by_class

_NOTE = (
    "off in training unless asked for; rows packed by position_ids without a mask do not see one "
    "another then, as with use_cache=False and under Trainer"
)


def stop_caching(model: Any, done: Changes) -> None:
    """The model takes ``use_cache=False`` in training mode where the caller gives no ``use_cache``.

    What the caller gives, and evaluation, stay as they are. ``done`` takes the change.
    """
    from transformers import PreTrainedModel

    models = [m for m in model.base_model.modules() if isinstance(m, PreTrainedModel)]
    if model not in models and _looks_it_up(type(model).forward):
        models.append(model)
    found = [m for m in models if _place_of_flag(type(m)) is not None]
    for modules in by_class(found):
        done.changed_classes("caching", modules, _uncached, _NOTE)


def is_decoding(hidden: Tensor) -> bool:
    """Whether a model generates with a cache: no gradient, and one token of each sequence."""
    return not torch.is_grad_enabled() and hidden.dim() >= 3 and hidden.shape[1] == 1


def theirs_in_decoding(maker: Callable[[type[Any]], Any]) -> Callable[[type[Any]], Any]:
    """Let the forward that ``maker`` makes give way to the one before it in generation.

    A token of each sequence waits for the host, which launches transformers' operators faster than
    our kernels. The first argument of both forwards, or ``hidden_states``, has the sequence in its
    second dimension.
    """

    @functools.wraps(maker)
    def made(kind: type[Any]) -> Any:
        ours, theirs = maker(kind), kind.forward

        @functools.wraps(ours)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.get("hidden_states")
            generates = hidden is not None and is_decoding(hidden)
            return (theirs if generates else ours)(self, *args, **kwargs)

        return forward

    return made


def _place_of_flag(kind: type[Any]) -> int | None:
    """The position of ``use_cache`` behind ``self`` in the forward, None without one."""
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return names.index("use_cache") if "use_cache" in names else None


def _looks_it_up(forward: Any) -> bool:
    """Whether a model with a head passes on what its configuration says, not what it was given."""
    while hasattr(forward, "__wrapped__"):
        if forward.__code__.co_qualname.startswith("merge_with_config_defaults"):
            return True
        forward = forward.__wrapped__
    return "use_cache" in forward.__code__.co_names  # self.config.use_cache


def _uncached(kind: type[Any]) -> Any:
    forward, place = kind.forward, _place_of_flag(kind)
    assert place is not None

    @functools.wraps(forward)
    def uncached(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_given = len(args) > place or kwargs.get("use_cache") is not None
        if self.training and not is_given:
            kwargs["use_cache"] = False
        return forward(self, *args, **kwargs)

    return uncached
