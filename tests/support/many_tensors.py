"""Many tensors for AdamW's kernel, updated by one call or by one for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_graphs.kernels.adamw import triton_kernels as adamw_triton
from moe_graphs.kernels.adamw.state_codes import NEAREST, encode

BF16, FP32 = torch.bfloat16, torch.float32
COUNT = 37


def together(device: str, coded: bool) -> list[Tensor]:
    """All written tensors after one call for all."""
    rows = _rows(device, coded)
    _update(rows, range(COUNT), coded)
    return [x for row in rows for x in row]


def alone(device: str, coded: bool) -> list[Tensor]:
    """All written tensors after a call for each tensor that is not empty, in aligned memory."""
    rows = _rows(device, coded)
    copies = [[x.clone() for x in row] for row in rows]
    for number, row in enumerate(copies):
        if row[0].numel():
            _update([row], [number], coded)
    return [x for row in copies for x in row]


def _rows(device: str, coded: bool) -> list[list[Tensor]]:
    """Parameter, gradient, states, step, average, scales."""
    generator, rows = torch.Generator(device).manual_seed(0), []
    for number in range(COUNT):
        n = 64 * (number % 5) if coded else (number * 37) % 300
        n += 128 * 16 * (number == 3)  # more than a span
        p, g, m, v, ema = torch.randn(5, n, generator=generator, device=device).unbind()
        row = [p.to(BF16 if number % 3 else FP32), g.to(BF16), m, v.square()]
        if number % 4 == 1:
            row[:2] = [torch.cat([x.new_zeros(3), x])[3:] for x in row[:2]]
        scales: list[Tensor] = []
        if coded:
            (row[2], of_m), (row[3], of_v) = (
                encode(x, NEAREST, signed=signed) for x, signed in ((m, True), (v.square(), False))
            )
            scales = [of_m, of_v]
        rows.append([*row, torch.tensor(number + 1.0, device=device), ema.clone(), *scales])
    return rows


def _update(rows: list[list[Tensor]], numbers: Any, coded: bool) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)]
    keys = [1 << 62 | number << 20 | 1 for number in numbers]
    options = (1e-2, None, 0.9, 0.999, 1e-8, 0.1, False, None, None, None)
    scales = columns[6:] if coded else ([], [])
    adamw_triton.adamw_update(*columns[:5], *options, columns[5], 0.9, keys, *scales, True)
