"""Muon (arXiv 2502.16982) for the matrices of layers and of experts, AdamW for everything else.

    m = lerp(m, g, 1 - momentum),  u = lerp(g, m, momentum) (Nesterov; else m)
    p -= lr * decay * p + lr * ratio * orthogonal(u)

`orthogonal` brings all singular values of a matrix to about 1, by a few steps of a polynomial in
bf16 GEMMs (Newton-Schulz). The weight of all experts is one batch of matrices; each matrix becomes
orthogonal by itself.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from moe_graphs.kernels.local_part import local_part
from moe_graphs.optim.adamw import AdamW
from moe_graphs.optim.whole_matrices import Rows, in_turn, on_owners, rows_of

_RATIOS = (None, "original", "match_rms_adamw")
_OPTIONS = (
    "momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_eps", "adjust_lr_fn", "muon", "split"
)  # fmt: skip
_FLAGS = ("grad_scale", "grad_factor", "found_inf")


class _Row(NamedTuple):
    """Rows of a parameter, of its gradient and of its momentum on this rank."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    rows: Rows


class Muon(AdamW):
    """Optimizer that updates groups by Muon or, with ``"muon": False``, by our ``AdamW``.

    Parameters of a group by Muon are matrices ``[out, in]``, as in ``nn.Linear``, or matrices of
    experts ``[E, in, out]``, as in ``GroupedExperts``. For 2-D parameters the update is that of
    ``torch.optim.Muon``, up to roundings to bf16. One parameter may hold several weights side by
    side (gate and up; queries, keys and values). Each of them becomes orthogonal by itself if the
    group has ``"split"``, the sizes of the weights along ``out``.

    A step does not wait for the device. Graphs and ``DeviceStep`` work as with ``AdamW``: learning
    rates as tensors, skipped steps, clipping. A skipped step computes everything and changes
    nothing.

    DTensors whose matrices are whole on their ranks (experts sharded by expert, replicas) are
    updated without communication. If each rank holds some rows of a matrix (FSDP2), the ranks take
    turns: one rank gathers the matrix in bf16, makes it orthogonal and sends the rows back. So no
    rank has more than one whole matrix at a time, and the numbers are those of one process.
    Replicas (HSDP) all do the same work.

    Args:
        params: parameters, all by Muon, or groups.
        lr, weight_decay: learning rate and decoupled decay of all groups.
        betas, eps: as in ``AdamW``, for groups by AdamW.
        momentum, nesterov, ns_coefficients, ns_steps: as in ``torch.optim.Muon``.
        ns_eps: ``eps`` of ``torch.optim.Muon``.
        adjust_lr_fn: "original" (default, also None) multiplies the learning rate by
            ``sqrt(max(1, out / in))``; "match_rms_adamw" multiplies it by
            ``0.2 sqrt(max(out, in))``, and then one learning rate and decay suit all groups.
        muon, split: defaults for groups that do not have these options.
        maximize: whether the update goes along the gradient instead of against it, in all groups.

    Raises:
        ValueError: ``AdamW`` refuses an argument; a group by Muon has parameters that are not
            matrices, or matrices whose ranks hold other parts than rows (tensor parallelism);
            ``split`` is not the size of ``out``; ``momentum`` is not from 0 to below 1, or another
            number cannot be computed with.
    """

    starts_from_zeros = True
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
        muon: bool = True,
        split: Sequence[int] = (),
        maximize: bool = False,
    ) -> None:
        values = (
            momentum, nesterov, ns_coefficients, ns_steps, ns_eps, adjust_lr_fn, muon, tuple(split)
        )  # fmt: skip
        self._of_muon = dict(zip(_OPTIONS, values, strict=True))
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
        self.defaults |= self._of_muon

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(self._of_muon | param_group)
        group = self.param_groups[-1]
        try:
            if group["muon"]:
                _check(group, len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not all("muon" in group for group in state.get("param_groups", ())):
            raise ValueError(
                "state: it is of another optimizer: moe_graphs.optim.Muon has not saved it"
            )
        # The method of torch's AdamW would look for a step counter in every state.
        torch.optim.Optimizer.__setstate__(self, state)
        self._of_muon = {name: self.defaults[name] for name in _OPTIONS}

    def _rows(self, group: dict[str, Any], numbered: Iterable[tuple[int, Tensor]]) -> list[Any]:
        if not group["muon"]:
            return super()._rows(group, numbered)
        rows = []
        for _, parameter in numbered:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            complete_momentum(state, parameter)
            own = (parameter, parameter.grad, state["momentum_buffer"])
            if len({getattr(tensor, "placements", None) for tensor in own}) > 1:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient or a momentum "
                    f"that is divided among ranks in another way: redistribute it"
                )
            of_rank = rows_of(parameter)
            assert of_rank is not None  # ``_check`` has refused such parameters
            row = _Row(local_part(own[0]), local_part(own[1]), local_part(own[2]), of_rank)
            if row.momentum.shape != row.parameter.shape:
                raise ValueError(
                    f"a parameter of shape {tuple(row.parameter.shape)} has a momentum of shape "
                    f"{tuple(row.momentum.shape)}: load the state of this model"
                )
            rows.append(row)
        return rows

    def _update(self, group: dict[str, Any], rows: Sequence[Any]) -> None:
        if not group["muon"]:
            super()._update(group, rows)
            return
        for together in in_turn(rows, lambda row: row.rows):
            device = together[0].parameter.device
            given = (
                getattr(self, name, None) for name in ("grad_scale", "grad_factor", "found_inf")
            )
            flags = [None if x is None else x.to(device) for x in given]
            updates = [_moved_momentum(row, group, *flags) for row in together]
            compute = functools.partial(_orthogonal, group=group)
            found = on_owners(updates, [row.rows for row in together], compute)
            for row, orthogonal in zip(together, found, strict=True):
                _move(row, orthogonal, group, flags[-1])


def complete_momentum(state: dict[str, Any], parameter: Tensor) -> None:
    """Make the momentum, all zeros, before the first step by Muon."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


def _moved_momentum(
    row: _Row,
    group: dict[str, Any],
    grad_scale: Tensor | None,
    grad_factor: Tensor | None,
    found_inf: Tensor | None,
) -> Tensor:
    """Update the momentum, and return the matrix in bf16 that is to become orthogonal.

    A skipped step takes the momentum for the gradient, which leaves the momentum as it is.
    """
    _, gradient, momentum, _ = row
    if grad_scale is not None:
        gradient.div_(grad_scale)
    if grad_factor is not None:
        gradient = gradient * grad_factor
    if group["maximize"]:
        gradient = -gradient
    gradient = gradient.to(momentum.dtype)
    if found_inf is not None:
        gradient = torch.where(found_inf == 1, momentum, gradient)
    momentum.lerp_(gradient, 1 - group["momentum"])
    update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    return update.bfloat16()


def _orthogonal(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Make whole matrices orthogonal, each of the weights in ``split`` by itself."""
    out = _out(matrices)
    options = group["ns_coefficients"], group["ns_steps"], group["ns_eps"]
    parts = matrices.split(group["split"] or (matrices.shape[out],), out)
    return torch.cat([orthogonalize(part, *options) for part in parts], out)


def _move(row: _Row, orthogonal: Tensor, group: dict[str, Any], found_inf: Tensor | None) -> None:
    """Move this rank's rows of a parameter; the learning rate of a skipped step is 0."""
    parameter, _, _, rows = row
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device != parameter.device:
        lr = float(lr)
    if found_inf is not None:
        lr = lr * (found_inf != 1)
    parameter.mul_(1 - lr * group["weight_decay"])
    out = _out(parameter)
    split = group["split"] or (rows.shape[out],)
    own = rows.own if rows.ranks > 1 else range(rows.shape[out])
    ends = list(itertools.accumulate(split, initial=0))
    # The number of rows of each part that this rank holds.
    here = [max(0, min(b, own.stop) - max(a, own.start)) for a, b in itertools.pairwise(ends)]
    pairs = zip(parameter.split(here, out), orthogonal.split(here, out), strict=True)
    for size, (part, of_part) in zip(split, pairs, strict=True):
        rate = lr * _ratio(group["adjust_lr_fn"], size, rows.shape[-3 - out])
        if isinstance(rate, Tensor):
            part.addcmul_(of_part, rate, value=-1)
        else:
            part.add_(of_part, alpha=-rate)


def orthogonalize(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Move the singular values of each matrix to between 0.5 and 1.5.

    Args:
        matrices: ``[X, Y]`` or ``[E, X, Y]``, floating point.
        coefficients: factors of x, x^3 and x^5 in the polynomial.
        steps: how often the polynomial is applied.
        eps: the least norm by which a matrix is divided at first.

    Returns:
        The matrices in bf16, in the shape of ``matrices``.
    """
    a, b, c = coefficients
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    # Afterwards all singular values are at most 1.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = _in_bf16(torch.matmul, x, x.mT)
        polynomial = _in_bf16(add_product, gram, gram, gram, beta=b, alpha=c)
        x = _in_bf16(add_product, x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _in_bf16(product: Callable[..., Tensor], *operands: Tensor, **factors: float) -> Tensor:
    """Product of bf16 matrices, added up in fp32 and rounded to bf16.

    On a CPU without bf16 instructions, torch's product of bf16 matrices takes 3 to 20 times as
    long as the product in fp32.
    """
    if operands[0].is_cpu:
        return product(*(x.float() for x in operands), **factors).bfloat16()
    return product(*operands, **factors)


def _out(parameter: Tensor) -> int:
    """The dimension ``out`` of a parameter, counted from the last one."""
    return -2 if parameter.ndim == 2 else -1


def _ratio(name: str | None, rows: int, columns: int) -> float:
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _check(group: dict[str, Any], number: int) -> None:
    if group["adjust_lr_fn"] not in _RATIOS:
        raise ValueError(f"adjust_lr_fn: {group['adjust_lr_fn']!r} is not one of {_RATIOS}")
    _check_numbers(group)
    for index, parameter in enumerate(group["params"]):
        name, shape = f"parameter {index} of group {number}", tuple(parameter.shape)
        if len(shape) not in (2, 3) or not parameter.is_floating_point():
            raise ValueError(
                f"{name}, {parameter.dtype} {shape}, is neither a matrix nor a matrix for each "
                f'expert: put it into a group with "muon": False'
            )
        split = group["split"]
        if split and sum(split) != shape[_out(parameter)]:
            raise ValueError(f"split: {split} is not the {shape[_out(parameter)]} of {name}")
        rows = rows_of(parameter)
        if rows is None or (rows.ranks > 1 and len(local_part(parameter)) != len(rows.own)):
            raise ValueError(
                f"{name}, {shape}, is {parameter.placements} over ranks: Muon needs whole "
                f"matrices or some rows of them on each rank, as FSDP2 divides them; keep the "
                f"parameter whole, or update it by AdamW"
            )


def _check_numbers(group: dict[str, Any]) -> None:
    """Check the numbers of a group by Muon.

    Raises:
        ValueError: Muon cannot compute with one of them.
    """
    momentum, steps, eps = group["momentum"], group["ns_steps"], group["ns_eps"]
    if isinstance(momentum, Tensor) or not 0 <= momentum < 1:
        raise ValueError(f"momentum: {momentum!r} must be a number from 0 to below 1")
    if not isinstance(steps, int) or not 1 <= steps < 100:  # the limit of torch
        raise ValueError(f"ns_steps: {steps!r} must be a whole number from 1 to 99")
    if not eps > 0:
        raise ValueError(f"ns_eps: {eps!r} must be above 0")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients: {group['ns_coefficients']} must be three numbers")
    for name in ("lr", "weight_decay"):
        if not isinstance(group[name], Tensor) and not 0 <= group[name] < math.inf:
            raise ValueError(f"{name}: {group[name]!r} must be at least 0 and finite")
