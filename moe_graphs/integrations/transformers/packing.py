"""Experts modules of transformers whose weights are in few bits, and how products read them.

A module is packed if it has a ``packing``. Its weights are two tensors each, under the names that
the format gives them. Products read them through ``weight_of``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.kernels.packed_weights import FORMATS, PackedWeight, Scratch

WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, eq=False)
class Packing:
    """A record of how an experts module stores its weights.

    Attributes:
        format: a name in ``FORMATS``.
        dtype: that of the weights before, in which products are computed.
        transposed: whether what is stored is ``[E, out, in]``.
        scratch: memory of the whole model that weights are dequantised into.
    """

    format: str
    dtype: torch.dtype
    transposed: bool
    scratch: Scratch


def packing_of(experts: Any) -> Packing | None:
    """The packing of a module, or None."""
    return getattr(experts, "packing", None)


def weight_of(experts: Any, name: str, *, is_transposed: bool) -> Tensor | PackedWeight:
    """A weight ``[E, in, out]`` as products read it.

    Args:
        is_transposed: whether the module's parameters are ``[E, in, out]``.
    """
    packing = packing_of(experts)
    if packing is None:
        weight: Tensor = getattr(experts, name)
        return weight if is_transposed else weight.transpose(1, 2)
    stored = tuple(getattr(experts, name + end) for end in FORMATS[packing.format].suffixes)
    return PackedWeight(stored, packing.format, packing.dtype, packing.transposed, packing.scratch)


def dense_stand_in(experts: Any) -> Any:
    """A packed module as it was before, with weights on the meta device; it shares the rest."""
    kind: Any = next(each for each in type(experts).__mro__ if "_makers" not in vars(each))
    made = kind.__new__(kind)
    made.__dict__.update(vars(experts))
    del made.__dict__["packing"]
    stored = {name + end for end in FORMATS[experts.packing.format].suffixes for name in WEIGHTS}
    others = {name: each for name, each in experts._parameters.items() if name not in stored}
    made.__dict__["_parameters"] = others | placeholders(experts, torch.device("meta"))
    return made


def placeholders(experts: Any, device: torch.device) -> dict[str, nn.Parameter]:
    """Parameters of the names, shapes and dtypes of packed weights before, which take no memory."""
    found = {}
    for name in WEIGHTS:
        packed = weight_of(experts, name, is_transposed=experts.is_transposed)
        count, inner, outer = packed.shape
        shape = (count, inner, outer) if experts.is_transposed else (count, outer, inner)
        number = torch.zeros((), dtype=packed.dtype, device=device)
        found[name] = nn.Parameter(number.expand(shape), requires_grad=False)
    return found


def refuse_summed(reason: str | None) -> None:
    """Refuses what only a sum of weights computes.

    Raises:
        ValueError: there is a reason.
    """
    if reason is not None:
        raise ValueError(
            f"{reason}, and experts in few bits have no weights to add PEFT's factors to"
        )
