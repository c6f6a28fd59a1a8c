"""Loading of states with another dtype than their parameter's, to which torch would cast them."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from moe_graphs.optim.update_options import UpdateOptions


@contextlib.contextmanager
def noting_loaded(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Context that yields what ``load_state_dict`` loads, after the hooks that may change it."""
    loaded: dict[str, Any] = {}
    hook = optimizer.register_load_state_dict_pre_hook(lambda _, state: loaded.update(state))
    try:
        yield loaded
    finally:
        hook.remove()


def take_states(
    options: UpdateOptions,
    parameters: Sequence[Tensor],
    states: MutableMapping[Tensor, dict[str, Any]],
    loaded: dict[str, Any],
) -> None:
    """Replace states that torch has cast by the loaded ones, in the dtypes of ``options``.

    Loaded averages are dropped with a warning if ``options`` keep none.
    """
    numbers = itertools.chain(*(group["params"] for group in loaded["param_groups"]))
    for parameter, number in zip(parameters, numbers, strict=True):
        if number in loaded["state"]:
            options.take(states[parameter], loaded["state"][number], parameter)
    if options.ema_decay is None:
        averages = [state.pop("ema", None) for state in states.values()]
        if any(average is not None for average in averages):
            warnings.warn(
                "moe_graphs.optim.AdamW: the averages (ema) of this state are dropped: load it "
                "into an optimizer with ema_decay=... to keep them",
                stacklevel=3,
            )
