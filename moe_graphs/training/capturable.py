"""Checks that a graph can hold an optimizer's step, and hyperparameters at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moe_graphs.engine.whole_step.optimizers import check_capturable_flags, remedy_for
from moe_graphs.kernels.local_part import local_part


def check_capturable_optimizer(optimizer: Optimizer) -> None:
    """Check that the optimizer's step can be captured: no host sync, no counter in Python.

    Raises:
        ValueError: it cannot; the message names the optimizer and what to use instead.
    """
    remedy = remedy_for(optimizer)
    if remedy is not None:
        name = type(optimizer).__name__
        raise ValueError(f"optimizer: {name} cannot be captured in a graph: {remedy}")


def tensor_hyperparameters(optimizer: Optimizer, *, weight_decay: bool = False) -> None:
    """Make the learning rate of every group a 0-dim fp32 tensor on its parameters' device.

    A graph then reads the rate at every replay; a float would be frozen in the graph. Torch's
    schedulers update such a tensor in place, in fp32 and without waiting for the device. Each group
    gets a tensor of its own; torch would share the one that the optimizer was constructed with.

    This function can be called before or after the scheduler is built. Before, the scheduler's
    starting point is on the device, too. After, schedulers with a closed form (``LambdaLR``)
    compute in fp64 on the host. Schedulers that compute a rate from the last one add up rounding
    errors: over 20,000 steps 7e-6 of the rate for a cosine, 5e-4 for ``ExponentialLR``.

    Args:
        weight_decay: make AdamW's weight decay a tensor, too. No optimizer of torch reads the
            decay from a tensor, so it moves to ``group["tensor_weight_decay"]``; change it by
            ``group["tensor_weight_decay"].fill_(...)``. A hook before ``optimizer.step()`` applies
            it, with and without ``DeviceStep``. ``copy.deepcopy`` of an optimizer loses hooks in
            torch: call this function again for the copy.

    Raises:
        ValueError: ``weight_decay`` is asked for, but the optimizer's is not decoupled from the
            gradient; or the optimizer has ``capturable=True`` without ``fused=True`` on a CPU.
    """
    check_capturable_flags(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = _scalar(group["lr"], group)
        if weight_decay and "tensor_weight_decay" not in group:
            if not group.get("decoupled_weight_decay"):
                raise ValueError(
                    f"weight_decay: {type(optimizer).__name__} adds it to the gradient, and reads "
                    f"it as a number: use torch.optim.AdamW, or leave it constant"
                )
            group["tensor_weight_decay"] = _scalar(group["weight_decay"], group)
            group["weight_decay"] = 0.0
    if weight_decay and not applies_tensor_decay(optimizer):
        optimizer.register_step_pre_hook(_decay_before_update)


def applies_tensor_decay(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step()`` applies ``group["tensor_weight_decay"]``."""
    return _decay_before_update in optimizer._optimizer_step_pre_hooks.values()


@torch.no_grad()
def decay_weights(optimizer: Optimizer, skipped: Tensor | None = None) -> None:
    """Apply AdamW's decay by a tensor; call it before the update.

    Args:
        skipped: 0-dim: 1.0 if the step changes nothing, else 0.0.
    """
    for group in optimizer.param_groups:
        decay_of_group(group, [p for p in group["params"] if p.grad is not None], skipped)


@torch.no_grad()
def decay_of_group(
    group: dict[str, Any], decayed: Sequence[Tensor], skipped: Tensor | None = None
) -> None:
    """Apply the decay by a tensor, if the group has one, to some of its parameters."""
    decay = group.get("tensor_weight_decay")
    if decay is not None and decayed:
        step = group["lr"] * decay
        step = step if skipped is None else step * (1 - skipped)
        torch._foreach_mul_(list(map(local_part, decayed)), 1 - step)


def _decay_before_update(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pre-step hook that applies the decay; torch calls it with the arguments of ``step``."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        # torch.amp.GradScaler and DeviceStep set this attribute for steps that are to be skipped.
        decay_weights(optimizer, getattr(optimizer, "found_inf", None))
        return None

    def with_decay() -> Any:
        """Run the closure, then decay the parameters that have gradients from it."""
        loss = closure()
        decay_weights(optimizer, getattr(optimizer, "found_inf", None))
        return loss

    return (args[0],), {**kwargs, "closure": with_decay}


def check_capturable_scheduler(scheduler: LRScheduler) -> None:
    """Check that the scheduler changes nothing but learning rates, which can be tensors.

    Raises:
        ValueError: the scheduler cycles the momentum, a number that a graph freezes.
    """
    for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if getattr(each, "cycle_momentum", False):
            raise ValueError(
                f"scheduler: {type(each).__name__} changes the momentum, which torch's optimizers "
                f"read as a number and a graph therefore freezes: pass cycle_momentum=False"
            )


@torch.no_grad()
def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state and keep every tensor at its address.

    ``optimizer.load_state_dict`` puts new tensors into the optimizer (tensors of groups even on the
    device that they were loaded to), and a graph would go on with the old ones. Hyperparameters
    that are numbers stay numbers. A saved weight decay goes where this optimizer has it, be that a
    number or a tensor.

    Raises:
        ValueError: the state lacks a tensor that this optimizer has, or has a tensor of another
            shape. The optimizer is not changed then.
    """
    old_state, old_groups = optimizer.state, optimizer.param_groups
    optimizer.load_state_dict(state)
    changed = _first_changed_shape(old_state, optimizer.state)
    if changed is not None:
        optimizer.__setstate__({"state": old_state, "param_groups": old_groups})
        raise ValueError(
            f"state: {changed}, and graphs hold the tensor that this optimizer has: load it with "
            f"optimizer.load_state_dict, and capture again (step.capture(batch) of a FullIteration)"
        )
    for group, old in zip(optimizer.param_groups, old_groups, strict=True):
        _place_decay(group, as_tensor="tensor_weight_decay" in old)
        for name in group.keys() & old.keys() - {"params"}:
            group[name] = _kept(old[name], group[name])
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            values[name] = _kept(old_state.get(parameter, {}).get(name), value)


def _first_changed_shape(
    before: Mapping[Tensor, dict[str, Any]], now: Mapping[Tensor, dict[str, Any]]
) -> str | None:
    for number, (parameter, values) in enumerate(before.items()):
        for name, old in values.items():
            new = now.get(parameter, {}).get(name)
            shape = None if new is None else list(torch.as_tensor(new).shape)
            if isinstance(old, Tensor) and shape != list(old.shape):
                found = "none" if shape is None else f"one of shape {shape}"
                return f"{name!r} of parameter {number} has shape {list(old.shape)}, got {found}"
    return None


def _place_decay(group: dict[str, Any], *, as_tensor: bool) -> None:
    if as_tensor and "tensor_weight_decay" not in group:
        group["tensor_weight_decay"], group["weight_decay"] = group["weight_decay"], 0.0
    elif not as_tensor and "tensor_weight_decay" in group:
        group["weight_decay"] = float(group.pop("tensor_weight_decay"))


def _kept(old: Any, new: Any) -> Any:
    """Fill the old tensor with the new value and return it; the new value if there was none."""
    if isinstance(old, Tensor):
        return old.copy_(new) if isinstance(new, Tensor) else old.fill_(new)
    if isinstance(old, tuple) and any(isinstance(each, Tensor) for each in old):  # betas
        return tuple(map(_kept, old, new))
    return new.item() if isinstance(old, (int, float)) and isinstance(new, Tensor) else new


def _scalar(value: float | Tensor, group: dict[str, Any]) -> Tensor:
    device = group["params"][0].device
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(device, torch.float32, copy=True)
    return torch.tensor(value, dtype=torch.float32, device=device)
