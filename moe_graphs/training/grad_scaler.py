"""Loss scaling for fp16 whose decisions are made on the device: nothing is read back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

_CONSTANTS = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis")


class GradScaler:
    """Multiplies the loss, so that small fp16 gradients survive, and finds the largest safe factor.

    As ``torch.amp.GradScaler``, with hysteresis as in APEX and Megatron: the scale backs off at the
    ``hysteresis``-th step in a row whose gradients are not finite, and at each one after it, and a
    finite step forgives them all; with 1 it is torch's. The steps are skipped in every case.

        skipped (hysteresis=2)   -     yes   -     yes   yes   yes   -
        scale after the step     8     8     8     8     4     2     2

    Every method but ``state_dict`` only enqueues work, on tensors whose addresses never change
    (``scale_factor``, ``growth_tracker``, ``hysteresis_tracker``, 0-dim): all of them can be
    captured in a graph. The numbers given here are constants of such a graph.

    To skip steps that are not finite without scaling (bf16), pass
    ``GradScaler(device, init_scale=1.0, growth_factor=1.0, backoff_factor=1.0)``.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
    ) -> None:
        _check_constants(init_scale, growth_factor, backoff_factor, growth_interval, hysteresis)
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.scale_factor = torch.full((), init_scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.full((), hysteresis, dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.scale_factor

    @torch.no_grad()
    def unscale_(
        self, gradients: Sequence[Tensor], process_group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Divides the gradients by the scale in place, and looks for inf and NaN on the way.

        Args:
            process_group: whose ranks must agree. All of them have to come here.

        Returns:
            1.0 if a gradient (of any rank) was not finite, else 0.0: fp32, 0-dim.
        """
        found_inf = torch.zeros((), dtype=torch.float32, device=self.scale_factor.device)
        # In fp64, as torch's scaler does it: the reciprocal of a power of two must be exact.
        inverse = self.scale_factor.double().reciprocal().float()
        for same in by_dtype(gradients):
            _unscale(same, found_inf, inverse)
        if process_group is not None:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=process_group)
        return found_inf

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Sets the scale of the next step by what ``unscale_`` returned for this one."""
        found = found_inf > 0
        left = torch.where(found, self.hysteresis_tracker - 1, self.hysteresis)
        self.hysteresis_tracker.copy_(left)
        before = self.scale_factor.clone()
        torch._amp_update_scale_(
            self.scale_factor,
            self.growth_tracker,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        self.scale_factor.copy_(torch.where(found & (left > 0), before, self.scale_factor))

    def state_dict(self) -> dict[str, float | int]:
        """Numbers, under the keys of ``torch.amp.GradScaler`` where it has them. Synchronises."""
        return {
            "scale": self.scale_factor.item(),
            "_growth_tracker": self.growth_tracker.item(),
            "_hysteresis_tracker": self.hysteresis_tracker.item(),
            **{name: getattr(self, name) for name in _CONSTANTS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fills the tensors in place, so that graphs go on with them. Takes torch's state, too.

        Raises:
            ValueError: if a constant differs from this scaler's.
        """
        for name in _CONSTANTS:
            now = getattr(self, name)
            if state.get(name, now) != now:
                raise ValueError(
                    f"{name}: {state[name]} in the state, {now} in this scaler, whose graphs "
                    f"hold it as a constant: build the scaler with {name}={state[name]}, or drop "
                    f"the key from the state"
                )
        self.scale_factor.fill_(state["scale"])
        self.growth_tracker.fill_(state["_growth_tracker"])
        self.hysteresis_tracker.fill_(state.get("_hysteresis_tracker", self.hysteresis))


def _unscale(gradients: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    dtype = gradients[0].dtype
    if dtype == torch.float16:
        raise ValueError(
            "gradients: float16, which unscaling would underflow: keep the parameters in "
            "float32 and run the forward under torch.autocast(dtype=torch.float16)"
        )
    if dtype != torch.bfloat16:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse)
        return
    # That kernel has no bfloat16 on CUDA (torch 2.11). A norm that is not finite tells as much.
    largest = torch.stack(torch._foreach_norm(gradients, math.inf))
    found_inf.copy_(torch.maximum(found_inf, (~largest.isfinite()).any().float()))
    torch._foreach_mul_(gradients, inverse)


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Torch's multi-tensor kernels take one dtype at a time."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _check_constants(
    init_scale: float, growth: float, backoff: float, interval: int, hysteresis: int
) -> None:
    accepted = {
        "init_scale": (init_scale, init_scale > 0, "above 0"),
        "growth_factor": (growth, growth >= 1, "at least 1"),
        "backoff_factor": (backoff, 0 < backoff <= 1, "above 0 and at most 1"),
        "growth_interval": (interval, interval >= 1, "at least 1"),
        "hysteresis": (hysteresis, hysteresis >= 1, "at least 1"),
    }
    for name, (given, fits, wanted) in accepted.items():
        if not fits:
            raise ValueError(f"{name}: {given} must be {wanted}")
