"""Context in which parameters hold their averages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_graphs.kernels.local_part import local_part


@contextlib.contextmanager
def swapped_in(states: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[None]:
    """Context in which the parameters of ``states`` hold their averages ``ema``.

    Parameters without ``ema`` or without a step keep their values. Addresses stay the same, and
    nothing waits for the device.
    """
    with torch.no_grad():
        held = [
            (local_part(parameter), local_part(state["ema"]), state["step"])
            for parameter, state in states.items()
            if "ema" in state
        ]
        trained = [parameter.clone() for parameter, _, _ in held]
        for parameter, average, step in held:
            parameter.copy_(torch.where(step > 0, average.to(parameter.dtype), parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for (parameter, _, _), before in zip(held, trained, strict=True):
                parameter.copy_(before)
