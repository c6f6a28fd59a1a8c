"""Tensors that an update reads and writes for each parameter, and the checks of their memory."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_graphs.kernels.adamw.state_codes import NUMBERS
from moe_graphs.optim.update_options import STATES, code_names

_PLAIN = {Tensor, torch.nn.Parameter}
_CODES, _SCALES = zip(*map(code_names, STATES), strict=True)
_shape = operator.attrgetter("shape")


class Row(NamedTuple):
    """A parameter with all tensors of its update, in the order of torch's functions."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    ema: Tensor | None = None
    key: int | None = None  # key of stochastic rounding
    scales: tuple[Tensor, ...] = ()  # scales of exp_avg and exp_avg_sq, if these two are codes


def columns_of(rows: Sequence[Row]) -> tuple[list[Any], ...]:
    return tuple(map(list, zip(*rows, strict=True)))


def row_of(parameter: Tensor, gradient: Tensor, state: dict[str, Any], key: int | None) -> Row:
    names: tuple[str, ...] = STATES
    scales: tuple[Tensor, ...] = ()
    if "exp_avg_code" in state:
        names = _CODES
        scales = tuple(state[name] for name in _SCALES)
    m, v = names
    return Row(
        parameter, gradient, state[m], state[v], state["step"], state.get("ema"), key, scales
    )


def checked(rows: list[Row], *, may_be_default: bool) -> list[Row]:
    """Check the rows' memory, and replace DTensors by their local shards.

    Args:
        may_be_default: whether torch may update tensor subclasses, so that they are no error.

    Raises:
        ValueError: no update can work on a row's memory, or a row has a tensor subclass.
    """
    if not {type(row.parameter) for row in rows} <= _PLAIN:
        rows = list(map(_local, rows))
    if not _are_whole(rows):
        for row in rows:
            _check_memory(row, may_be_default=may_be_default)
    return rows


def is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN


def _are_whole(rows: Sequence[Row]) -> bool:
    """Whether all rows are plain and contiguous, so that `_check_memory` would find nothing."""
    if not rows:
        return True
    parameters, gradients, exp_avgs, exp_avg_sqs, _, emas, _, scales = columns_of(rows)
    averages = [ema for ema in emas if ema is not None]
    alike = [parameters, exp_avgs, exp_avg_sqs, *([averages] if averages else [])]
    shapes, *others = (list(map(_shape, of)) for of in alike)
    coded = [(*shape[:-1], shape[-1] // NUMBERS) for shape in itertools.compress(shapes, scales)]
    of_scales = zip(*filter(None, scales), strict=True)
    return (
        set(map(type, parameters)) <= _PLAIN
        and all(map(Tensor.is_contiguous, itertools.chain(gradients, *alike)))
        and all(of == shapes for of in others)
        and all(list(map(_shape, of)) == coded for of in of_scales)
    )


def _local(row: Row) -> Row:
    """Replace DTensors by their local shards, if all of them are sharded alike.

    Local shards are enough, because an update works element by element.
    """
    shared: list[Any] = [*row[:4], *row.scales, *([] if row.ema is None else [row.ema])]
    if not all(hasattr(tensor, "to_local") for tensor in shared):
        return row
    if len({(tensor.device_mesh, tensor.placements) for tensor in shared}) > 1:
        return row
    parameter, gradient, exp_avg, exp_avg_sq, *others = (tensor.to_local() for tensor in shared)
    ema = None if row.ema is None else others.pop()
    return Row(parameter, gradient, exp_avg, exp_avg_sq, row.step, ema, row.key, tuple(others))


def _check_memory(row: Row, *, may_be_default: bool) -> None:
    """Check that a row's tensors have the same shape and memory order.

    Torch's fused update works on flat memory, too. On CUDA it refuses unequal layouts; on the CPU
    it does not.

    Raises:
        ValueError: shapes or memory orders differ, or the parameter is a tensor subclass.
    """
    p, g, m, v = row[:4]
    shape, states = p.shape, [m, v, *([] if row.ema is None else [row.ema])]
    if not is_plain(p):
        if may_be_default:
            return
        raise ValueError(
            f"a parameter of shape {tuple(shape)} is a {type(p).__name__}, which torch alone can "
            f"update: pass none of state_dtype, stochastic_rounding, ema_decay; of a DTensor, load "
            f"its state in its layout"
        )
    of_scales = (*shape[:-1], shape[-1] // NUMBERS) if row.scales else ()
    if any(state.shape != shape for state in states) or any(
        scales.shape != of_scales for scales in row.scales
    ):
        raise ValueError(
            f"a parameter of shape {tuple(shape)} has states of shapes "
            f"{' and '.join(str(tuple(state.shape)) for state in states)}: load the state of this "
            f"model"
        )
    orders = [_order(tensor) for tensor in (p, g, *states)]
    if orders[0] is None or any(order != orders[0] for order in orders):
        raise ValueError(
            f"a parameter of shape {tuple(shape)} and strides {p.stride()} has a gradient with "
            f"{g.stride()} and states with {' and '.join(str(x.stride()) for x in states)}: make "
            f"all dense and alike, or use torch.optim.AdamW(foreach=True)"
        )


def _order(tensor: Tensor) -> list[int] | None:
    """Order of a tensor's dimensions in memory; None if there are gaps."""
    long = [d for d in range(tensor.ndim) if tensor.size(d) > 1]
    order = sorted(long, key=tensor.stride, reverse=True)
    ones = [d for d in range(tensor.ndim) if tensor.size(d) <= 1]
    return order if tensor.permute(*order, *ones).is_contiguous() else None
