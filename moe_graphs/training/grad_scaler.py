"""Loss scaling for fp16 whose decisions are made on the device: nothing is read back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from moe_graphs.optim.gradient_factor import by_dtype

HYSTERESIS_RULES = ("apex", "megatron")
_CONSTANTS = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis")
# Defaults are torch's behaviour. A state has these keys only if the values differ from the
# defaults, so that torch's scaler can load it.
_DEFAULTS = {"hysteresis_rule": "apex", "min_scale": 0.0}


class GradScaler:
    """Loss scaling for fp16: finds the largest factor of the loss with finite gradients.

    It works like ``torch.amp.GradScaler``, with hysteresis: the scale stays the same for
    ``hysteresis - 1`` steps whose gradients are not finite, and backs off at each such step after
    them. A hysteresis of 1 is torch's behaviour. Steps with gradients that are not finite are
    always skipped. ``hysteresis_rule`` says when the count starts anew: with "apex" at every finite
    step, so only steps in a row count (apex's ``update_scale_hysteresis``); with "megatron" when
    the scale grows, after ``growth_interval`` finite steps in a row (Megatron's
    ``DynamicGradScaler``).

        skipped (hysteresis=2)   -     yes   -     yes   yes   yes   -
        scale after it, apex     8     8     8     8     4     2     2
        scale after it, megatron 8     8     8     4     2     1     1

    The scale backs off down to ``min_scale`` and grows while it is finite (Megatron's may become
    infinite).

    Every method but ``state_dict`` only enqueues work on tensors whose addresses never change
    (``scale_factor``, ``growth_tracker``, ``hysteresis_tracker``, 0-dim), so it can be captured in
    a graph. The arguments of the constructor are constants of such a graph.

    To skip steps with gradients that are not finite, without scaling (bf16), pass
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
        hysteresis_rule: str = "apex",
        min_scale: float = 0.0,
    ) -> None:
        _check_factors(init_scale, growth_factor, backoff_factor, min_scale)
        _check_counts(growth_interval=growth_interval, hysteresis=hysteresis)
        if hysteresis_rule not in HYSTERESIS_RULES:
            accepted = ", ".join(map(repr, HYSTERESIS_RULES))
            raise ValueError(f"hysteresis_rule: {hysteresis_rule!r} must be one of {accepted}")
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.hysteresis_rule, self.min_scale = hysteresis_rule, float(min_scale)
        self.scale_factor = torch.full((), init_scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.full((), hysteresis, dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.scale_factor

    @torch.no_grad()
    def unscale_(
        self, gradients: Sequence[Tensor], process_group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Divide the gradients by the scale in place, and look for inf and NaN on the way.

        Args:
            process_group: ranks that get the same answer; all of them call this method.

        Returns:
            1.0 if a gradient (of any rank) was not finite, else 0.0: fp32, 0-dim.
        """
        found_inf = torch.zeros((), dtype=torch.float32, device=self.scale_factor.device)
        # In fp64 as in torch's scaler, so that the reciprocal of a power of two is exact.
        inverse = self.scale_factor.double().reciprocal().float()
        for same in by_dtype(gradients):
            _unscale(same, found_inf, inverse)
        if process_group is not None:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=process_group)
        return found_inf

    @torch.no_grad()
    def update(self, found_inf: Tensor, unless: Tensor | None = None) -> None:
        """Set the scale of the next step.

        Args:
            found_inf: the result of ``unscale_`` for this step.
            unless: 0-dim; if it is above 0, nothing changes, as if the step had not been taken.
        """
        if unless is None:
            self._update(found_inf)
            return
        trackers = (self.scale_factor, self.growth_tracker, self.hysteresis_tracker)
        before = [tracker.clone() for tracker in trackers]
        self._update(found_inf)
        for tracker, value in zip(trackers, before, strict=True):
            tracker.copy_(torch.where(unless > 0, value, tracker))

    def _update(self, found_inf: Tensor) -> None:
        found = found_inf > 0
        before = self.scale_factor.clone()
        torch._amp_update_scale_(
            self.scale_factor,
            self.growth_tracker,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        forgiven = ~found
        if self.hysteresis_rule == "megatron":
            forgiven &= self.growth_tracker == 0  # growing has just set the tracker to 0
        left = self.hysteresis_tracker - found.int()
        self.hysteresis_tracker.copy_(torch.where(forgiven, self.hysteresis, left))
        lowered = torch.where(left > 0, before, self.scale_factor.clamp(min=self.min_scale))
        self.scale_factor.copy_(torch.where(found, lowered, self.scale_factor))

    def state_dict(self) -> dict[str, float | int | str]:
        """Read the state as numbers; waits for the device.

        The keys are those of ``torch.amp.GradScaler``, and some of our own if needed.
        """
        beyond = {name: getattr(self, name) for name in _DEFAULTS}
        return {
            "scale": self.scale_factor.item(),
            "_growth_tracker": self.growth_tracker.item(),
            "_hysteresis_tracker": self.hysteresis_tracker.item(),
            **{name: getattr(self, name) for name in _CONSTANTS},
            **{name: value for name, value in beyond.items() if value != _DEFAULTS[name]},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of this class or of torch's, in place, so that graphs go on with it.

        Raises:
            ValueError: a constant differs from this scaler's, or the state has no scale, since it
                is that of a disabled scaler. Nothing is loaded then.
        """
        missing = [name for name in ("scale", "_growth_tracker") if name not in state]
        if missing:
            raise ValueError(
                f"state: has no {missing[0]!r}, only {sorted(state)}: it is of another kind of "
                f"scaler, or of one that was not enabled"
            )
        ours = _DEFAULTS if "hysteresis" in state else {}
        for name in (*_CONSTANTS, *_DEFAULTS):
            now = getattr(self, name)
            saved = state.get(name, ours.get(name, now))
            if saved != now:
                raise ValueError(
                    f"{name}: {saved} in the state, {now} in this scaler, whose graphs "
                    f"hold it as a constant: build the scaler with {name}={saved!r}, or put "
                    f"{now!r} into the state"
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
    # Torch's kernel takes no bfloat16 on CUDA (torch 2.11). For bf16 the norm shows inf and NaN.
    gradients = [gradient for gradient in gradients if gradient.numel()]  # a shard may be empty
    if not gradients:
        return
    largest = torch.stack(torch._foreach_norm(gradients, math.inf))
    found_inf.copy_(torch.maximum(found_inf, (~largest.isfinite()).any().float()))
    torch._foreach_mul_(gradients, inverse)


def _check_factors(init_scale: float, growth: float, backoff: float, min_scale: float) -> None:
    accepted = {
        "init_scale": (init_scale, 0 < init_scale < math.inf, "above 0 and finite"),
        "growth_factor": (growth, 1 <= growth < math.inf, "at least 1 and finite"),
        "backoff_factor": (backoff, 0 < backoff <= 1, "above 0 and at most 1"),
        "min_scale": (min_scale, 0 <= min_scale <= init_scale, "from 0 to init_scale"),
    }
    for name, (given, fits, wanted) in accepted.items():
        if not fits:
            raise ValueError(f"{name}: {given} must be {wanted}")


def _check_counts(**counts: int) -> None:
    for name, given in counts.items():
        if not (isinstance(given, Integral) and given >= 1):
            raise ValueError(f"{name}: {given} must be an integer of at least 1")
