"""Dispatchers by name, for command lines and configuration files."""

from __future__ import annotations

import inspect
from typing import Any

from moe_graphs.dispatch.all_gather import AllGatherDispatcher
from moe_graphs.dispatch.all_to_all import AllToAllDispatcher
from moe_graphs.dispatch.dispatcher import Dispatcher
from moe_graphs.dispatch.local import LocalDispatcher
from moe_graphs.dispatch.padded import PaddedDispatcher
from moe_graphs.dispatch.symmetric import SymmetricDispatcher


def make_dispatcher(name: str, **options: Any) -> Dispatcher:
    """Make a dispatcher by its name.

    Args:
        name: ``local``, ``padded``, ``all_to_all``, ``all_gather`` or ``symmetric``.
        options: fields of that dispatcher: ``capacity_factor`` for ``padded``; ``group`` for
            ``all_to_all``, ``all_gather`` and ``symmetric``; ``rows_factor`` for ``all_gather`` and
            ``symmetric``.

    Raises:
        ValueError: no such name, or an option that this dispatcher does not have.
    """
    known = (
        LocalDispatcher,
        PaddedDispatcher,
        AllToAllDispatcher,
        AllGatherDispatcher,
        SymmetricDispatcher,
    )
    classes = {cls.name: cls for cls in known}
    if name not in classes:
        raise ValueError(f"dispatcher {name!r} is unknown: choose one of {', '.join(classes)}")
    accepted = list(inspect.signature(classes[name]).parameters)
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(
            f"dispatcher {name!r} has no option {', '.join(unknown)}: it takes "
            f"{', '.join(accepted) or 'none'}"
        )
    return classes[name](**options)
