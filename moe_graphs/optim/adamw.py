"""AdamW with torch's interface and state, and an update at the speed of memory."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from moe_graphs.kernels.adamw.reference import adamw_update_reference
from moe_graphs.kernels.availability import has_kernel
from moe_graphs.optim.averages import swapped_in
from moe_graphs.optim.gradient_factor import multiply
from moe_graphs.optim.loaded_states import noting_loaded, take_states
from moe_graphs.optim.rounding_key import rounding_key
from moe_graphs.optim.update_options import UpdateOptions
from moe_graphs.optim.update_rows import Row, checked, columns_of, is_plain, row_of

LARGE = 1 << 16  # Parameters with at least this many elements are worth a launch of our kernel.
_UNSUPPORTED = {"amsgrad": False, "differentiable": False, "foreach": None}
_ALWAYS = {"fused": True, "capturable": True}
_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(..., fused=True, capturable=True)``, faster for large CUDA parameters.

    Like torch's fused AdamW it never waits for the device and works in graphs, with
    ``torch.amp.GradScaler`` and with ``DeviceStep``. Its state is torch's (``step``, ``exp_avg``,
    ``exp_avg_sq``): each of the two loads the other's state. The attribute ``grad_factor``, like
    those that ``torch.amp.GradScaler`` sets, multiplies gradients as they are read (clipping). A
    tensor learning rate is read on the device at every step; a graph freezes all other options of
    a group.

    Parameters of bf16, fp16 or fp32 with at least 65,536 elements are updated by a Triton kernel
    that computes in fp32 and rounds once; one launch updates all parameters of the same dtypes. A
    gradient may have another dtype than its parameter. Torch's fused kernel updates all other
    parameters: small ones, fp64, tensor subclasses, and all parameters on other devices than CUDA
    or without Triton. With one of the last four arguments our kernel updates small parameters, too,
    and torch's plain operations update the rest, with the same formulas and the same random bits;
    tensor subclasses are refused then. Each rank updates its local shards of DTensors (FSDP2,
    tensor parallelism).

    Args:
        params: parameters or groups, as in ``torch.optim.AdamW``.
        lr: a number or a 0-dim tensor, which has to be fp32 if it is on the device.
        betas: numbers.
        fused, capturable: always True; the arguments exist for code that is written for torch's.
        amsgrad, foreach, differentiable: not supported.
        state_dtype: dtype of ``exp_avg`` and ``exp_avg_sq``: fp32, bf16, uint8 for 8-bit codes, or
            None for the parameter's dtype, as in torch. Loaded states are cast to it. In bf16
            ``exp_avg_sq`` loses changes below 1/256 of its value, so with a ``beta2`` of 0.999 it
            never falls, unless it is rounded stochastically.
            8-bit codes (``kernels/adamw/state_codes.py``) are always rounded stochastically, by
            ``seed``. The state then has ``exp_avg_code``, in the parameter's shape, and
            ``exp_avg_scale``, ``[..., Y // 64]``, both uint8, and the same two for ``exp_avg_sq``;
            Y is the parameter's last dimension. States stay in fp32 for parameters with fewer than
            4,096 elements or only one dimension, parameters in another memory order than their
            shape's, fp64 parameters, and parameters whose Y (on a rank) 64 does not divide.
            Every AdamW of ours loads codes and averages from each other. Codes become averages
            exactly. Averages become codes rounded to the nearest: the relative error is at most
            1/16, for squares 1/32, down to 2^-14 of the largest number that shares a scale; below
            that the absolute error is at most 2^-17 of the largest number. To load codes into
            torch's AdamW, load them first into one of ours with another dtype and save its state.
        stochastic_rounding: round bf16 parameters and states up or down at random, so that they
            are right on average. fp16 and fp32 are rounded to the nearest as usual.
        seed: seed of stochastic rounding, from 0 to ``2**64 - 1``, the same on all ranks. It is
            saved and loaded with the group's options, so that a run goes on with the same bits.
        ema_decay: keep an average of each parameter as the state ``ema``, in fp32: after each step
            it becomes ``ema_decay * ema + (1 - ema_decay) * parameter``, starting with the result
            of the first step. If a loaded state has no ``ema``, the average starts from the
            parameter before the next step. See ``averaged``.

    Raises:
        ValueError: an option that is not supported, also in a group or in a loaded state. At a
            step, before any parameter has changed: a sparse or complex gradient, a state of another
            shape, or memory with gaps or in another order than that of the gradient or the state.
    """

    starts_from_zeros = True  # FullIteration reads it: a state of zeros means no step yet.
    takes_grad_factor = True  # DeviceStep reads it.
    _step_supports_amp_scaling = True  # A class attribute, since copies lose torch's own.

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
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        ema_decay: float | None = None,
    ) -> None:
        options = {"amsgrad": amsgrad, "foreach": foreach, "differentiable": differentiable}
        _check(options | {"fused": fused, "capturable": capturable, "betas": betas})
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed: {seed} must be from 0 to 2**64 - 1")
        self.options = UpdateOptions(state_dtype, stochastic_rounding, ema_decay)
        # The seed is an option of groups, because torch saves and loads these.
        self._seed = {"seed": seed} if self.options.needs_random_bits else {}
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, capturable=True, fused=True
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check(param_group)
        super().add_param_group({**self._seed, **param_group, **_ALWAYS})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options, "_seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state and make it fused, also if a plain AdamW has saved it.

        ``load_state_dict`` ends with this method.
        """
        for group in state.get("param_groups", ()):
            _check({name: group[name] for name in ("amsgrad", "betas") if name in group})
        super().__setstate__(state)
        for group in self.param_groups:
            group |= {**self._seed, **{k: v for k, v in group.items() if k in self._seed}}
            group |= {**_UNSUPPORTED, **_ALWAYS}
            for parameter in group["params"]:
                values = self.state.get(parameter, {})
                if "step" in values:
                    step = torch.as_tensor(values["step"], dtype=torch.float32)
                    values["step"] = step.to(parameter.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, but cast the saved states to the dtypes of this optimizer.

        Saved averages that this optimizer does not keep are dropped with a warning.
        """
        with noting_loaded(self) as loaded:
            super().load_state_dict(state_dict)
        take_states(self.options, self._parameters(), self.state, loaded)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Context in which parameters hold their moving averages, for an evaluation.

        Parameters without a step keep their values. All parameters stay at their addresses, and
        nothing waits for the device. FSDP2 modules that keep gathered weights have to ``reshard()``
        at the beginning and after the end of the context.

        Raises:
            ValueError: the optimizer has no ``ema_decay``.
        """
        if self.options.ema_decay is None:
            raise ValueError("averaged: there are no averages: pass ema_decay=... to AdamW")
        return swapped_in(self.state)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update.

        Args:
            closure: computes the loss and its gradients anew, before the update.

        Returns:
            What ``closure`` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            _check_gradients(group["params"], number)
        rows = [
            self._rows(each, enumerate(each["params"], self._first(each)))
            for each in self.param_groups
        ]
        for group, of_group in zip(self.param_groups, rows, strict=True):
            self._update(group, of_group)
        return loss

    @torch.no_grad()
    def update(self, number: int, numbered: Iterable[tuple[int, Tensor]]) -> None:
        """Make one update of some parameters of group ``number``, as ``step`` would make it.

        Args:
            numbered: parameters with their numbers among all parameters of the optimizer.
        """
        group, numbered = self.param_groups[number], list(numbered)
        _check_gradients([parameter for _, parameter in numbered], number)
        self._update(group, self._rows(group, numbered))

    def _rows(self, group: dict[str, Any], numbered: Iterable[tuple[int, Tensor]]) -> list[Row]:
        options, states, rows = self.options, self.state, []
        averaged, drawn = options.ema_decay is not None, options.stochastic_rounding
        needs_random_bits = options.needs_random_bits
        for number, parameter in numbered:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = states[parameter]
            if not state or (averaged and "ema" not in state):
                options.complete(state, parameter)
            has_key = needs_random_bits and (drawn or "exp_avg_code" in state)
            key = rounding_key(group["seed"], number, parameter) if has_key else None
            rows.append(row_of(parameter, gradient, state, key))
        return checked(rows, may_be_default=options.is_default)

    def _first(self, group: dict[str, Any]) -> int:
        """Number of a group's first parameter among all parameters."""
        before = itertools.takewhile(lambda other: other is not group, self.param_groups)
        return sum(len(other["params"]) for other in before)

    def _update(self, group: dict[str, Any], rows: Sequence[Row]) -> None:
        flags = ("found_inf", "grad_scale", "grad_factor")
        found_inf, grad_scale, grad_factor = (getattr(self, name, None) for name in flags)
        own = not self.options.is_default
        ours: dict[tuple[torch.device, bool, bool], list[Row]] = {}
        by_torch: list[Row] = []
        kinds = _kinds(rows) if rows else []
        for kind in dict.fromkeys(kinds):
            alike = list(itertools.compress(rows, [each == kind for each in kinds]))
            row, served = alike[0], _is_served(alike[0], small=own)
            key = (row.parameter.device, served, bool(row.scales))
            (ours.setdefault(key, []) if served or own else by_torch).extend(alike)
        for (device, served, _), of_device in ours.items():
            with torch.cuda.device_of(of_device[0].parameter):
                given = [_moved(flag, device) for flag in (grad_scale, found_inf, grad_factor)]
                _update_ours(of_device, served, group, self.options, *given)
        if by_torch:
            parameters, gradients, exp_avgs, exp_avg_sqs, steps = columns_of(by_torch)[:5]
            if grad_factor is not None:
                multiply(gradients, grad_factor)
            beta1, beta2 = group["betas"]
            options: dict[str, Any] = {
                name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")
            }
            options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, **_ALWAYS}
            options |= {"grad_scale": grad_scale, "found_inf": found_inf}
            adamw(parameters, gradients, exp_avgs, exp_avg_sqs, [], steps, **options)
            # Torch's fused update leaves versions alone (2.13). Then autograd would not see that
            # tensors saved for a backward have new values.
            torch.autograd.graph.increment_version([*parameters, *exp_avgs, *exp_avg_sqs])


def _kinds(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Properties of each row that decide which kernel updates it."""
    columns = columns_of(rows)
    parameters, scales = columns[0], columns[-1]
    large = [n >= LARGE for n in map(Tensor.numel, parameters)]
    dtypes = (map(_dtype, of) for of in columns[:4])
    indices = (map(Tensor.get_device, of) for of in columns[:5])
    own = map(type, parameters), large, map(bool, scales), map(_device, parameters)
    return list(zip(*own, *dtypes, *indices, strict=True))


def _is_served(row: Row, *, small: bool) -> bool:
    """Whether our kernel can update the row, and should.

    Torch's kernel takes no gradient of another dtype than the parameter's.
    """
    parameter, gradient = row[:2]
    return (
        (small or parameter.numel() >= LARGE or gradient.dtype != parameter.dtype)
        and is_plain(parameter)
        and all(map(has_kernel, row[:2] if row.scales else row[:4]))
        and all(tensor.device == parameter.device for tensor in row[:5])
    )


def _update_ours(
    rows: Sequence[Row],
    by_kernel: bool,
    group: dict[str, Any],
    options: UpdateOptions,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    grad_factor: Tensor | None,
) -> None:
    """Update ``rows``; steps count as in torch: up, and down again if the update is skipped."""
    if by_kernel:
        from moe_graphs.kernels.adamw.triton_kernels import adamw_update as update
    else:
        update = adamw_update_reference
    parameters, gradients, exp_avgs, exp_avg_sqs, steps, emas, keys, scales = columns_of(rows)
    torch._foreach_add_(steps, 1)
    lr, (beta1, beta2) = group["lr"], group["betas"]
    at_hand = lr.device.type == "cpu" != steps[0].device.type if isinstance(lr, Tensor) else True
    update(
        parameters, gradients, exp_avgs, exp_avg_sqs, steps,
        float(lr) if at_hand else 0.0, None if at_hand else _moved(lr, steps[0].device),
        beta1, beta2, group["eps"], group["weight_decay"], group["maximize"],
        grad_scale, found_inf, grad_factor,
        *(([], 0.0) if options.ema_decay is None else (emas, options.ema_decay)),
        [] if None in keys else keys, *(zip(*scales, strict=True) if scales[0] else ([], [])),
        options.stochastic_rounding,
    )  # fmt: skip
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def _moved(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else value.to(device, non_blocking=True)


def _check(options: dict[str, Any]) -> None:
    """Check options of the constructor or of a group; any of them may be missing."""
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
        if gradient is None or (gradient.layout is torch.strided and not gradient.dtype.is_complex):
            continue
        kind = "complex" if gradient.is_complex() else "sparse"
        raise ValueError(
            f"parameter {number} of group {group} has a {kind} gradient, which AdamW has no update "
            f"for: use torch.view_as_real, sparse=False or torch.optim.SparseAdam"
        )
