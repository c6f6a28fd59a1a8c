"""Dispatchers by name, for command lines and configuration files."""

from __future__ import annotations

from typing import Any

from moe_graphs.dispatch.dispatcher import Dispatcher
from moe_graphs.registry import DISPATCHERS


def make_dispatcher(name: str, **options: Any) -> Dispatcher:
    """Make a dispatcher by its name.

    Args:
        name: a name of ``registry.DISPATCHERS``, or ``"module:Class"`` for a class of your own.
        options: fields of that dispatcher: ``capacity_factor`` for ``padded``; ``group`` for those
            between ranks; ``rows_factor`` for ``all_gather`` and ``symmetric``.

    Raises:
        ValueError: no such name, or an option that this dispatcher does not have.
    """
    kind = DISPATCHERS[name]
    unknown = sorted(set(options) - set(kind.options()))
    if unknown:
        raise ValueError(
            f"dispatcher {name!r} has no option {', '.join(unknown)}: it takes "
            f"{', '.join(kind.options()) or 'none'}"
        )
    return kind(**options)
