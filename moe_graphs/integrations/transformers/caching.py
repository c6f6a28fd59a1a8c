"""Keys and values for later tokens, which training has no use for.

They are more than memory: given a cache, transformers builds other masks (rows packed by
``position_ids`` see one another), linear attention runs other kernels, and no graph can hold it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

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
