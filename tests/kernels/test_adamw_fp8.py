"""AdamW's update that writes codes in FP8: the bits of the update, and of codes made behind it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from compiled import check, launch_compiler
from moe_graphs.kernels.adamw import fp8_codes as adamw_fp8
from moe_graphs.kernels.adamw import triton_kernels as adamw_triton
from moe_graphs.kernels.fp8 import triton_kernels as fp8_triton
from training_runs import DEVICES

CODE, FP32, BYTE = torch.float8_e4m3fn, torch.float32, torch.uint8
SHAPES = [(2, 128, 256), (1, 256, 128), (3, 128, 128)]


def rows_of(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, states: torch.dtype, averaged: bool
) -> dict[str, Any]:
    """The tensors of one weight, by the names of the op's arguments."""
    torch.manual_seed(sum(shape))
    p, g, m, v = (torch.randn(shape, device=device) for _ in range(4))
    p[0, 5, :70] = 0
    of = {"params": p.to(dtype), "grads": g.bfloat16(), "exp_avgs": m.to(states)}
    of["exp_avg_sqs"] = v.square().to(states)
    if averaged:
        of["emas"] = p.clone()
    return of


def empty_codes(device: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    E, M, N = shape
    sides = {"device": device}
    return (
        torch.zeros((E, M, N), device=device).to(CODE), torch.zeros(E, M // 128, N // 128, **sides),
        torch.zeros((E, N, M), device=device).to(CODE), torch.zeros(E, N // 128, M // 128, **sides),
    )  # fmt: skip


def updated(
    device: str,
    dtype: torch.dtype,
    states: torch.dtype,
    *,
    by_blocks: bool,
    found: float | None = None,
    averaged: bool = False,
    powers: bool = False,
    rounded: bool = False,
) -> list[Tensor]:
    """All tensors of some weights after an update; codes last."""
    rows = [rows_of(device, shape, dtype, states, averaged) for shape in SHAPES]
    tensors: dict[str, list[Tensor]] = {
        name: [row[name] for row in rows if name in row]
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "emas")
    }
    scalar = [None if x is None else torch.tensor(x, device=device) for x in (2.0, found, 0.5)]
    four = [tensors[name] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")]
    keys = [11, 12, 13] if rounded else []
    given = (
        *four, [torch.tensor(3.0, device=device) for _ in rows], 1e-1, None, 0.9, 0.99, 1e-8, 0.1,
        False, *scalar, tensors["emas"], 0.9, keys,
    )  # fmt: skip
    if by_blocks:
        codes = list(zip(*(empty_codes(device, shape) for shape in SHAPES), strict=True))
        adamw_fp8.adamw_update_fp8(*given, rounded, *map(list, codes), powers)
    else:
        adamw_triton.adamw_update(*given, [], [], rounded)
        made = [fp8_triton.fp8_weights(p, True, True, powers) for p in tensors["params"]]
        codes = list(zip(*made, strict=True))
    return [*itertools.chain(*tensors.values()), *itertools.chain(*codes)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert torch.equal(got.view(BYTE), want.view(BYTE))


CASES = [
    (torch.bfloat16, torch.bfloat16, {}),
    (torch.bfloat16, torch.bfloat16, {"powers": True, "rounded": True}),
    (FP32, FP32, {"averaged": True}),
    (torch.bfloat16, FP32, {"found": 1.0}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "states", "options"), CASES)
def test_bits_of_an_update_with_codes_made_behind_it(request, device, dtype, states, options):
    if device == "cpu":
        request.getfixturevalue("interpreted")
    found, expected = (
        updated(device, dtype, states, by_blocks=by_blocks, **options)
        for by_blocks in (True, False)
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("states", [torch.bfloat16, FP32])
def test_it_compiles_without_spills(monkeypatch, states):
    compiled = launch_compiler(monkeypatch)
    *_, kernel = compiled(lambda: updated("cpu", torch.bfloat16, states, by_blocks=True))
    check(kernel, wgmma=False)
