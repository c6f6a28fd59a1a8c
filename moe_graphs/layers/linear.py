"""Kernels of a layer's projections: torch's, ours in FP8, or Transformer Engine's."""

from __future__ import annotations

import functools
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_graphs.kernels.fp8 import PRECISIONS, check_sizes
from moe_graphs.kernels.fp8.linear import linear_fp8
from moe_graphs.registry import PROJECTIONS

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Projection(nn.Module):
    """Interface of a projection, for type checkers alone: no kind is a subclass."""

    weight: nn.Parameter


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a call of ``module`` is ``functional.linear`` with its weight, and nothing else."""
    return (
        type(module) is nn.Linear
        and module.bias is None
        and not is_traceable_wrapper_subclass(module.weight)  # DTensors, quantized weights
        and not is_watched(module)
    )


def is_watched(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs more than the forward of its class: hooks or a patch."""
    # By getattr: graphs compare hooks by themselves, and call them hooks in their reports.
    hooked = any(getattr(module, kind) for kind in _HOOKS)
    return hooked or _has_any_global_hook() or "forward" in module.__dict__


def build_linear(
    kind: str,
    in_features: int,
    out_features: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Projection:
    """Build a projection without bias.

    Every kind has a ``weight`` of the same shape with the same values, and draws the same numbers
    from the random generator.

    Raises:
        ValueError: there is no such ``kind``; the message says what there is.
        ImportError: ``kind`` needs a library that is not installed; the message says which.
    """
    return cast(
        Projection, PROJECTIONS[kind](in_features, out_features, device=device, dtype=dtype)
    )


def torch_linear(
    in_features: int,
    out_features: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False, device=device, dtype=dtype)


class FP8Linear(nn.Linear):
    """A projection whose products are in FP8.

    Attributes:
        precision: as in ``TransformerConfig``, but ``"weights"``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        precision: str = "fp8",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(in_features=in_features, out_features=out_features)
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)
        self.precision = precision

    def forward(self, input: Tensor) -> Tensor:
        return linear_fp8(input, self.weight, **PRECISIONS[self.precision])


# By the name of a precision, as places that `build_linear` takes.
IN_FP8 = {
    "fp8": f"{__name__}:FP8Linear",
    "fp8_powers": f"{__name__}:fp8_powers_linear",
    "fp8_rows": f"{__name__}:fp8_rows_linear",
}
fp8_powers_linear = functools.partial(FP8Linear, precision="fp8_powers")
fp8_rows_linear = functools.partial(FP8Linear, precision="fp8_rows")
