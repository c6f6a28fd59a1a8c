"""Which optimizers a graph can hold, and their hyperparameters and state at fixed addresses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_EXAMPLE = "torch.optim.AdamW(..., fused=True, capturable=True)"


def check_capturable_optimizer(optimizer: Optimizer) -> None:
    """Returns if the optimizer's step can be captured: no host sync, no counter in Python.

    Raises:
        ValueError: naming the optimizer and what to use instead.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        on_cuda = any(parameter.is_cuda for parameter in group["params"])
        fused, capturable = group.get("fused"), group.get("capturable")
        # Adam's family refuses to run in a capture unless capturable is set, fused or not;
        # SGD and Adagrad do not know the word. On the CPU only the fused ones read no values.
        if fused and (capturable or capturable is None or not on_cuda):
            continue
        if capturable and on_cuda:
            continue
        raise ValueError(f"optimizer: {name} cannot be captured in a graph: {_remedy(group)}")


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
            moves to ``group["tensor_weight_decay"]``, which ``DeviceStep`` applies and which is
            changed by ``group["tensor_weight_decay"].fill_(...)``.

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


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict(state)`` that keeps every tensor at its address.

    ``load_state_dict`` puts new tensors into the optimizer (a learning rate even on the device it
    was loaded to), and a graph would go on with the old ones.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    before = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = _kept(rate, group["lr"])
        if "tensor_weight_decay" in group:
            group["tensor_weight_decay"] = _scalar(group["tensor_weight_decay"], group)
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            values[name] = _kept(before.get(parameter, {}).get(name), value)


def _kept(old: Any, new: Any) -> Any:
    """The old tensor with the new value; the new value itself where there was no tensor."""
    if not isinstance(old, Tensor):
        return new
    return old.copy_(new) if isinstance(new, Tensor) else old.fill_(new)


def _scalar(value: float | Tensor, group: dict[str, Any]) -> Tensor:
    device = group["params"][0].device
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(device, torch.float32, copy=True)
    return torch.tensor(value, dtype=torch.float32, device=device)


def _remedy(group: dict[str, Any]) -> str:
    flags = [f"{name}=True" for name in ("fused", "capturable") if name in group]
    if flags:
        return f"pass {', '.join(flags)}"
    return f"use {_EXAMPLE}, or step outside of the graph"
