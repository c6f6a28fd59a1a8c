"""Which optimizers a graph can hold, and their hyperparameters and state at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moe_graphs.engine.whole_step.optimizers import remedy_for
from moe_graphs.optim.gradient_factor import local_part


def check_capturable_optimizer(optimizer: Optimizer) -> None:
    """Returns if the optimizer's step can be captured: no host sync, no counter in Python.

    Raises:
        ValueError: naming the optimizer and what to use instead.
    """
    remedy = remedy_for(optimizer)
    if remedy is not None:
        name = type(optimizer).__name__
        raise ValueError(f"optimizer: {name} cannot be captured in a graph: {remedy}")


def tensor_hyperparameters(optimizer: Optimizer, *, weight_decay: bool = False) -> None:
    """Makes the learning rate of every group a 0-dim fp32 tensor beside its parameters.

    A graph then reads the rate at every replay, where a float would be frozen in it. Torch's
    schedulers update such a tensor in place without waiting for the device, in fp32. Call this
    before building the scheduler or after it: before, also the rate's starting point is on
    the device; after, schedulers with a closed form (``LambdaLR``) compute in fp64 on the host.
    Those that go from rate to rate add up rounding errors: over 20,000 steps 7e-6 of the rate for
    a cosine, 5e-4 for ``ExponentialLR``.
    Each group gets a tensor of its own, where torch shares the one it was constructed with.

    Args:
        weight_decay: AdamW's decay, too. No optimizer of torch reads that from a tensor, so it
            moves to ``group["tensor_weight_decay"]``, which is changed by
            ``group["tensor_weight_decay"].fill_(...)``. A hook before ``optimizer.step()`` applies
            it, with and without ``DeviceStep``. ``copy.deepcopy`` of an optimizer loses its hooks,
            as torch does it: call this function again for the copy.

    Raises:
        ValueError: if ``weight_decay`` is asked for and not decoupled from the gradient.
    """
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
    """AdamW's decay by a tensor, to be called before the update as AdamW does it.

    Args:
        skipped: 1.0 if the step changes nothing, else 0.0.
    """
    for group in optimizer.param_groups:
        decay = group.get("tensor_weight_decay")
        decayed = [p for p in group["params"] if p.grad is not None]
        if decay is not None and decayed:
            step = group["lr"] * decay
            step = step if skipped is None else step * (1 - skipped)
            torch._foreach_mul_(list(map(local_part, decayed)), 1 - step)


def _decay_before_update(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook of torch: called before every step, with its arguments."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        # As torch.amp.GradScaler and DeviceStep tell fused optimizers to leave out a step.
        decay_weights(optimizer, getattr(optimizer, "found_inf", None))
        return None

    def with_decay() -> Any:
        """The gradients that say which parameters decay are made by the closure."""
        loss = closure()
        decay_weights(optimizer, getattr(optimizer, "found_inf", None))
        return loss

    return (args[0],), {**kwargs, "closure": with_decay}


def check_capturable_scheduler(scheduler: LRScheduler) -> None:
    """Returns if the scheduler changes nothing but learning rates, which can be tensors.

    Raises:
        ValueError: for schedulers that cycle the momentum, a number that is frozen in a graph.
    """
    for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if getattr(each, "cycle_momentum", False):
            raise ValueError(
                f"scheduler: {type(each).__name__} changes the momentum, which torch's optimizers "
                f"read as a number and a graph therefore freezes: pass cycle_momentum=False"
            )


@torch.no_grad()
def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict(state)`` that keeps every tensor at its address.

    ``load_state_dict`` puts new tensors into the optimizer (those of its groups even on the device
    they were loaded to), and a graph would go on with the old ones. Hyperparameters that are
    numbers stay numbers; a decay goes where this optimizer has it, wherever it was saved from.

    Raises:
        ValueError: if the state lacks a tensor that this optimizer has, or has one of another
            shape. The optimizer is as it was then.
    """
    old_state, old_groups = optimizer.state, optimizer.param_groups
    optimizer.load_state_dict(state)
    changed = _first_changed_shape(old_state, optimizer.state)
    if changed is not None:
        optimizer.__setstate__({"state": old_state, "param_groups": old_groups})
        raise ValueError(
            f"state: {changed}, and graphs hold the tensor that this optimizer has: load it with "
            f"optimizer.load_state_dict, and capture again"
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
    """The old tensor with the new value; the new value itself where there was no tensor."""
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
