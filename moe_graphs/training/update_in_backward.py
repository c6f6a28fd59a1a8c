"""Updates within the backward: a weight is updated and its gradient freed as soon as it is there.

So gradients of few weights are there at once. bf16 weights and 8-bit states of AdamW take 4 bytes a
parameter, which is 114 GiB for a model of 30 B parameters, and gradients take next to nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from moe_graphs.kernels.local_part import local_part
from moe_graphs.optim.adamw import AdamW
from moe_graphs.training.capturable import decay_of_group
from moe_graphs.training.device_step import multiplied
from moe_graphs.training.grad_norm import clip_factor

ClipBy = Literal["previous", "weight"]


class UpdateInBackward:
    """Lets an ``AdamW`` or ``Muon`` of ours update each parameter within the backward.

    The gradient is freed at once.

    Call ``optimizer.step()`` after each backward as before; it finds no gradients, ends the step
    and runs schedulers' hooks. The parameters have the bits that ``optimizer.step()`` would give
    them, if nothing clips. ``close()`` ends it.

    Scopes with ``recompute`` share the memory of their backwards; other scopes keep gradients of
    their own. A whole step needs ``FullIteration(..., state=[updates])``.

    A step has one backward. Gradients of several backwards cannot add up, since each one updates.
    ``torch.nn.utils.clip_grad_norm_`` finds no gradients and clips nothing: give ``max_norm`` here,
    and Trainer ``max_grad_norm=0``.

    Args:
        optimizer: has all of its parameters on one device, and no DTensors.
        max_norm: the largest norm of gradients; ``None`` for no clipping.
        clip_by: the norm that ``max_norm`` limits. The norm of all gradients is known when all of
            them are there, which is too late. ``"previous"`` takes the norm of the step before, and
            in the first step each weight's own; ``"weight"`` takes each weight's own norm.

    Attributes:
        grad_norm: 2-norm of all gradients of the last step before clipping; fp32, 0-dim, on the
            device. ``inf`` before the first step.

    Raises:
        TypeError: another optimizer.
        ValueError: a parameter is a DTensor, or ``max_norm`` or ``clip_by`` is not accepted.
        RuntimeError: in a backward that is the second one of a step.

    Example::

        optimizer = AdamW(model.parameters(), state_dtype=torch.uint8, stochastic_rounding=True)
        updates = UpdateInBackward(optimizer, max_norm=1.0)
        loss.backward()
        optimizer.step()
    """

    def __init__(
        self, optimizer: Optimizer, max_norm: float | None = None, clip_by: ClipBy = "previous"
    ) -> None:
        if not isinstance(optimizer, AdamW):
            raise TypeError(
                f"UpdateInBackward wants a moe_graphs.optim.AdamW, got {type(optimizer).__name__}"
            )
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm: {max_norm} must be above 0, or None for no clipping")
        if clip_by not in ("previous", "weight"):
            raise ValueError(f"clip_by={clip_by!r}: accepted are 'previous', 'weight'")
        self.optimizer, self.max_norm, self.clip_by = optimizer, max_norm, clip_by
        groups = enumerate(optimizer.param_groups)
        places = [(number, p) for number, group in groups for p in group["params"]]
        parameters = [parameter for _, parameter in places]
        if any(local_part(parameter) is not parameter for parameter in parameters):
            raise ValueError("a parameter is a DTensor: updates in the backward take whole weights")
        devices = {parameter.device for parameter in parameters}
        if len(devices) != 1:
            raise ValueError(
                f"parameters on {', '.join(map(str, devices))}: one device is accepted"
            )
        (device,) = devices
        self.grad_norm = torch.full((), torch.inf, device=device)
        # One norm per weight, since a graph and eager run the hooks in different orders.
        self._norms = torch.zeros(len(parameters), device=device)
        self._updated: set[int] = set()
        self._is_first = True
        self._places = {id(p): (g, number) for number, (g, p) in enumerate(places)}
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._update)
            for parameter in parameters
            if parameter.requires_grad
        ]
        self._handles.append(optimizer.register_step_post_hook(self._end_step))

    def close(self) -> None:
        """Leave updates to ``optimizer.step()`` again."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Tensor]:
        """The norm that the next step clips by; save it beside the optimizer's state."""
        return {"grad_norm": self.grad_norm.clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self.grad_norm.copy_(state_dict["grad_norm"])
        self._is_first = bool(self.grad_norm.isinf())

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        if id(parameter) in self._updated:
            raise RuntimeError(
                "a second backward within a step, and the first one has updated the weights: call "
                "optimizer.step() after each backward, since gradients of several backwards cannot "
                "add up where each backward updates"
            )
        self._updated.add(id(parameter))
        optimizer, gradient = self.optimizer, parameter.grad
        assert gradient is not None
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        group, number = self._places[id(parameter)]
        self._norms[number].copy_(norm)
        factor = None
        if self.max_norm is not None:
            by_weight = self._is_first or self.clip_by == "weight"
            factor = clip_factor(self.max_norm, norm if by_weight else self.grad_norm)
        decay_of_group(optimizer.param_groups[group], [parameter])
        with multiplied(optimizer, [gradient], factor):
            optimizer.update(group, [(number, parameter)])
        parameter.grad = None

    _update.frees_gradient = True  # type: ignore[attr-defined]  # graphs keep no memory for it

    def _end_step(self, *_: Any) -> None:
        if self._updated:
            self.grad_norm.copy_(torch.linalg.vector_norm(self._norms))
            self._norms.zero_()
            self._updated.clear()
            self._is_first = False
