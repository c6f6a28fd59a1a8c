"""Options that our AdamW has beyond torch's: dtype of states, stochastic rounding, averages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_graphs.kernels.adamw.state_codes import NEAREST, NUMBERS, decode, encode
from moe_graphs.kernels.local_part import local_part

_DTYPES = (None, torch.float32, torch.bfloat16, torch.uint8)
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
STATES = ("exp_avg", "exp_avg_sq")
SMALL = 4096  # Parameters with fewer elements keep their states in fp32.


@dataclass(frozen=True)
class UpdateOptions:
    """The last four options of ``AdamW``, which documents them.

    Raises:
        ValueError: an option cannot have its value; the message names the option.
    """

    state_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        if self.state_dtype not in _DTYPES:
            raise ValueError(
                f"state_dtype: {self.state_dtype} is none of torch.float32, torch.bfloat16, "
                f"torch.uint8 and None, the parameter's"
            )
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay: {self.ema_decay} must be at least 0 and below 1")

    @property
    def is_default(self) -> bool:
        """Whether torch's own update can do all that the options ask for."""
        return self == UpdateOptions()

    @property
    def needs_random_bits(self) -> bool:
        """Whether an update draws random bits."""
        return self.stochastic_rounding or self.state_dtype == torch.uint8

    def has_codes(self, parameter: Tensor) -> bool:
        """Whether the states of ``parameter`` are 8-bit codes.

        The answer is the same on all ranks, and the same for most layouts.
        """
        shape = parameter.shape
        return (
            self.state_dtype == torch.uint8
            and parameter.ndim >= 2
            and parameter.numel() >= SMALL
            and parameter.dtype in _NARROW
            and parameter.is_contiguous()
            and shape[-1] % (NUMBERS * _ranks_of_last(parameter)) == 0
        )

    def dtype_of(self, name: str, parameter: Tensor) -> torch.dtype:
        """Dtype of the state ``name``, which is neither ``step`` nor stored as codes.

        Averages are at least fp32, because bf16 would lose the small additions of
        ``1 - ema_decay``. With ``state_dtype=torch.uint8``, states that are no codes are at least
        fp32, too.
        """
        if name == "ema" or self.state_dtype == torch.uint8:
            return torch.promote_types(parameter.dtype, torch.float32)
        return self.state_dtype or parameter.dtype

    def complete(self, state: dict[str, Any], parameter: Tensor) -> None:
        """Create the state that a first step starts from.

        If there have been steps without an average, the average starts from the present parameter.
        """
        averages = [] if self.ema_decay is None else ["ema"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            has_codes = self.has_codes(parameter)
            for name in (*(() if has_codes else STATES), *averages):
                dtype = self.dtype_of(name, parameter)
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            for name in STATES if has_codes else ():
                zeros = torch.zeros_like(local_part(parameter.detach()), dtype=torch.float32)
                state |= _coded(name, zeros, parameter)
        for name in averages:
            if name not in state:
                state[name] = parameter.detach().to(self.dtype_of(name, parameter), copy=True)

    def take(self, state: dict[str, Any], saved: Mapping[str, Any], parameter: Tensor) -> None:
        """Put a saved state into ``state``, without torch's cast to the parameter's dtype.

        Saved codes stay as they are if these options have codes, and else become averages. Saved
        averages become codes, rounded to the nearest, if these options have codes.
        """
        for name in STATES:
            own = code_names(name)
            if name not in saved and own[0] not in saved:
                continue
            for each in (name, *own):
                state.pop(each, None)
            if not self.has_codes(parameter):
                value = saved[name] if name in saved else _averages(name, saved, parameter)
                state[name] = value.to(parameter.device, self.dtype_of(name, parameter))
            elif name in saved:
                whole = local_part(saved[name]).to(parameter.device, torch.float32)
                state |= _coded(name, whole.contiguous(), parameter)
            else:
                state |= {each: saved[each].to(parameter.device, torch.uint8) for each in own}
        if "ema" in saved:
            state["ema"] = saved["ema"].to(parameter.device, self.dtype_of("ema", parameter))


def code_names(name: str) -> tuple[str, str]:
    """Keys of a state's codes and of their scales."""
    return f"{name}_code", f"{name}_scale"


def _coded(name: str, values: Tensor, parameter: Tensor) -> dict[str, Tensor]:
    """Encode ``values``, this rank's shard in fp32, as codes and scales."""
    codes, scales = encode(values, NEAREST, signed=name == "exp_avg")
    code, scale = code_names(name)
    shape = (*parameter.shape[:-1], parameter.shape[-1] // NUMBERS)
    return {
        code: _laid_out(codes, parameter, parameter.shape),
        scale: _laid_out(scales, parameter, shape),
    }


def _averages(name: str, saved: Mapping[str, Any], parameter: Tensor) -> Tensor:
    codes, scales = (local_part(saved[each]) for each in code_names(name))
    values = decode(codes, scales.to(codes.device), signed=name == "exp_avg")
    return _laid_out(values.to(parameter.device), parameter, parameter.shape)


def _laid_out(local: Tensor, parameter: Any, shape: tuple[int, ...]) -> Tensor:
    """Make ``local`` a DTensor of ``shape`` with the parameter's placements, if that is one."""
    if not hasattr(parameter, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    placed = {"device_mesh": parameter.device_mesh, "placements": parameter.placements}
    return DTensor.from_local(
        local, **placed, run_check=False, shape=torch.Size(shape), stride=strides
    )


def _ranks_of_last(parameter: Any) -> int:
    """Number of ranks that shard the parameter's last dimension."""
    if not hasattr(parameter, "placements"):
        return 1
    places = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    last = (-1, parameter.ndim - 1)
    return math.prod(size for size, place in places if getattr(place, "dim", None) in last)
