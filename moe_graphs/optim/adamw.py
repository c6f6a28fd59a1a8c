"""torch's AdamW with an update that takes as long as its memory does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from moe_graphs.kernels.availability import has_kernel
from moe_graphs.optim.gradient_factor import multiply

LARGE = 1 << 16  # numbers of a parameter that are worth a launch
_UNSUPPORTED = {"amsgrad": False, "differentiable": False, "foreach": None}
_ALWAYS = {"fused": True, "capturable": True}


class _Row(NamedTuple):
    """A parameter with all that its update reads and writes, in the order of torch's functions."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(..., fused=True, capturable=True)``, faster for large CUDA parameters.

    No host sync; for graphs, ``torch.amp.GradScaler`` and ``DeviceStep`` as torch's fused one is.
    The state is torch's (``step``, ``exp_avg``, ``exp_avg_sq``): either loads what the other has
    saved. ``grad_factor``, an attribute like those of ``torch.amp.GradScaler``, multiplies
    gradients on their way (clipping). A tensor learning rate is read on the device at every step;
    everything else of a group is a number that a graph freezes.

    A parameter of bf16, fp16 or fp32 with at least 65,536 numbers is one launch of a Triton kernel
    that computes in fp32 and rounds once. Its state has its dtype, its gradient may have another.
    Torch's own fused kernel serves all others, together: small ones, fp64, subclasses of tensors,
    and everything on the CPU and on other devices, or without Triton. Of DTensors (FSDP2, tensor
    parallelism) each rank updates what it has.

    Args:
        params: as torch's.
        lr: a number or a 0-dim tensor; of fp32 if it is on the device.
        betas: numbers.
        fused, capturable: always True; in the signature for what is written for torch's.
        amsgrad, foreach, differentiable: not supported.

    Raises:
        ValueError: an option that is not supported, also of a group or of a loaded state; at a
            step, before any parameter has changed, a sparse or complex gradient, a state of another
            shape, or memory with gaps or in another order than the gradient's or the state's.
    """

    starts_from_zeros = True  # for FullIteration: a first step from zero state is a first step
    takes_grad_factor = True  # for DeviceStep
    _step_supports_amp_scaling = True  # which copies of torch's fused optimizers lose

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = True,
        differentiable: bool = False,
        fused: bool | None = True,
    ) -> None:
        options = {"amsgrad": amsgrad, "foreach": foreach, "differentiable": differentiable}
        _check(options | {"fused": fused, "capturable": capturable, "betas": betas})
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, capturable=True, fused=True
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check(param_group)
        super().add_param_group({**param_group, **_ALWAYS})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also the end of ``load_state_dict``: what a plain AdamW has saved becomes fused."""
        for group in state.get("param_groups", ()):
            _check({name: group[name] for name in ("amsgrad", "betas") if name in group})
        super().__setstate__(state)
        for group in self.param_groups:
            group |= {**_UNSUPPORTED, **_ALWAYS}
            for parameter in group["params"]:
                values = self.state.get(parameter, {})
                if "step" in values:
                    step = torch.as_tensor(values["step"], dtype=torch.float32)
                    values["step"] = step.to(parameter.device)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        parameters: Iterable[Tensor] | None = None,
        max_programs: int | None = None,
    ) -> Any:
        """One update.

        Args:
            closure: computes the loss and its gradients anew, before the update.
            parameters: only these are updated.
            max_programs: of our kernel at a time, so that others run beside it: the same bits.

        Returns:
            What ``closure`` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups if parameters is None else self._groups_of(set(parameters))
        for number, group in enumerate(groups):
            _check_gradients(group["params"], number)
        rows = [self._rows(group) for group in groups]
        for group, of_group in zip(groups, rows, strict=True):
            self._update(group, of_group, max_programs)
        return loss

    def _groups_of(self, chosen: set[Tensor]) -> list[dict[str, Any]]:
        return [
            group | {"params": [p for p in group["params"] if p in chosen]}
            for group in self.param_groups
        ]

    def _rows(self, group: dict[str, Any]) -> list[_Row]:
        columns: list[list[Tensor]] = [[] for _ in _Row._fields]
        parameters, gradients, exp_avgs, exp_avg_sqs, steps = columns
        self._init_group(group, parameters, gradients, exp_avgs, exp_avg_sqs, [], steps)
        rows = [_local(_Row(*each)) for each in zip(*columns, strict=True)]
        for row in rows:
            _check_memory(row)
        return rows

    def _update(
        self, group: dict[str, Any], rows: Sequence[_Row], max_programs: int | None
    ) -> None:
        flags = ("found_inf", "grad_scale", "grad_factor")
        found_inf, grad_scale, grad_factor = (getattr(self, name, None) for name in flags)
        by_kernel: dict[torch.device, list[_Row]] = {}
        by_torch: list[_Row] = []
        for row in rows:
            where = by_kernel.setdefault(row.parameter.device, []) if _is_served(row) else by_torch
            where.append(row)
        for device, of_device in by_kernel.items():
            with torch.cuda.device_of(of_device[0].parameter):
                given = [_moved(flag, device) for flag in (grad_scale, found_inf, grad_factor)]
                _update_by_kernel(of_device, group, max_programs, *given)
        if by_torch:
            parameters, gradients, exp_avgs, exp_avg_sqs, steps = _columns(by_torch)
            if grad_factor is not None:
                multiply(gradients, grad_factor)
            beta1, beta2 = group["betas"]
            options: dict[str, Any] = {
                name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")
            }
            options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, **_ALWAYS}
            options |= {"grad_scale": grad_scale, "found_inf": found_inf}
            adamw(parameters, gradients, exp_avgs, exp_avg_sqs, [], steps, **options)
            # Which torch's fused update does not (2.13), so that a backward would use new values.
            torch.autograd.graph.increment_version([*parameters, *exp_avgs, *exp_avg_sqs])


def _columns(rows: Sequence[_Row]) -> tuple[list[Tensor], ...]:
    return tuple(map(list, zip(*rows, strict=True)))


def _local(row: _Row) -> _Row:
    """What this rank has of DTensors that are sharded alike: an update is element by element."""
    shared: list[Any] = list(row[:4])
    if not all(hasattr(tensor, "to_local") for tensor in shared):
        return row
    if len({(tensor.device_mesh, tensor.placements) for tensor in shared}) > 1:
        return row
    parameter, gradient, exp_avg, exp_avg_sq = (tensor.to_local() for tensor in shared)
    return _Row(parameter, gradient, exp_avg, exp_avg_sq, row.step)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _is_served(row: _Row) -> bool:
    """By our kernel, and worth it: torch's takes no gradient of another dtype."""
    parameter, gradient = row[:2]
    return (
        (parameter.numel() >= LARGE or gradient.dtype != parameter.dtype)
        and _is_plain(parameter)
        and all(map(has_kernel, row[:4]))
        and all(tensor.device == parameter.device for tensor in row)
    )


def _check_memory(row: _Row) -> None:
    """Torch's fused update takes it as one row, too: on CUDA it refuses others, on the CPU not."""
    p, g, m, v, _ = row
    if not _is_plain(p):
        return
    shape = p.shape
    if m.shape != shape or v.shape != shape:
        raise ValueError(
            f"a parameter of shape {tuple(shape)} has states of shapes {tuple(m.shape)} and "
            f"{tuple(v.shape)}: load the state of this model"
        )
    if p.is_contiguous() and g.is_contiguous() and m.is_contiguous() and v.is_contiguous():
        return
    orders = [_order(tensor) for tensor in (p, g, m, v)]
    if orders[0] is None or any(order != orders[0] for order in orders):
        raise ValueError(
            f"a parameter of shape {tuple(shape)} and strides {p.stride()} has a gradient with "
            f"{g.stride()} and states with {m.stride()} and {v.stride()}: make all dense and "
            f"alike, or use torch.optim.AdamW(foreach=True)"
        )


def _order(tensor: Tensor) -> list[int] | None:
    """Of its dimensions in memory; None if there are gaps."""
    long = [d for d in range(tensor.ndim) if tensor.size(d) > 1]
    order = sorted(long, key=tensor.stride, reverse=True)
    ones = [d for d in range(tensor.ndim) if tensor.size(d) <= 1]
    return order if tensor.permute(*order, *ones).is_contiguous() else None


def _update_by_kernel(
    rows: Sequence[_Row],
    group: dict[str, Any],
    max_programs: int | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    grad_factor: Tensor | None,
) -> None:
    """Steps count as in torch: up, and down again where the update is left out."""
    from moe_graphs.kernels.adamw_triton import adamw_update

    parameters, gradients, exp_avgs, exp_avg_sqs, steps = _columns(rows)
    torch._foreach_add_(steps, 1)
    lr, (beta1, beta2) = group["lr"], group["betas"]
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    adamw_update(
        parameters, gradients, exp_avgs, exp_avg_sqs, steps,
        0.0 if on_device else float(lr), _moved(lr, steps[0].device) if on_device else None,
        beta1, beta2, group["eps"], group["weight_decay"], group["maximize"],
        grad_scale, found_inf, grad_factor, max_programs,
    )  # fmt: skip
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def _moved(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else value.to(device, non_blocking=True)


def _check(options: dict[str, Any]) -> None:
    """Of the constructor, or of a group, which may lack any."""
    instead = "leave it out, or use torch.optim.AdamW"
    for name in _UNSUPPORTED:
        if options.get(name):
            raise ValueError(f"{name}: moe_graphs.optim.AdamW does not have it: {instead}")
    for name in _ALWAYS:
        if options.get(name) is False:
            raise ValueError(f"{name}: moe_graphs.optim.AdamW is always {name}: {instead}")
    if any(isinstance(beta, Tensor) for beta in options.get("betas", ())):
        raise ValueError("betas: they are read on the host: pass numbers instead of tensors")


def _check_gradients(parameters: Sequence[Tensor], group: int) -> None:
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None or (gradient.layout is torch.strided and not gradient.is_complex()):
            continue
        kind = "complex" if gradient.is_complex() else "sparse"
        raise ValueError(
            f"parameter {number} of group {group} has a {kind} gradient, which AdamW has no update "
            f"for: use torch.view_as_real, sparse=False or torch.optim.SparseAdam"
        )
