"""AdamW's kernel on many tensors at once: what each would get alone, in a launch for each kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from compiled import check, launch_compiler
from many_tensors import alone, together
from moe_graphs.kernels.adamw import triton_kernels as adamw_triton
from moe_graphs.optim import AdamW, adamw

OPTIONS: tuple[Any, ...] = (1e-2, None, 0.9, 0.999, 1e-8, 0.1, False, None, None, None)


@pytest.mark.parametrize("coded", [pytest.param(False, marks=pytest.mark.long), True])
def test_each_tensor_gets_what_it_gets_alone(interpreted, monkeypatch, coded):
    """Tensors of odd sizes, empty, unaligned, of several dtypes; more than a launch carries."""
    monkeypatch.setattr(adamw_triton, "BLOCK", 128)
    for a, b in zip(together("cpu", coded), alone("cpu", coded), strict=True):
        assert torch.equal(a, b)


def test_nothing_but_empty_tensors(interpreted):
    empty, step = [torch.empty(0)], [torch.ones(())]
    adamw_triton.adamw_update(*[empty] * 4, step, *OPTIONS, [], 0.0, [], [], [], False)


def test_gradients_that_lie_elsewhere_at_every_step(interpreted, monkeypatch):
    """The table is right also where memory of an earlier table holds other numbers now."""
    monkeypatch.setattr(adamw, "LARGE", 10)
    monkeypatch.setattr(adamw, "has_kernel", lambda x: True)
    held, others = ([nn.Parameter(torch.ones(n, 3)) for n in (40, 7)] for _ in range(2))
    ours, plain = AdamW(held, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, foreach=False)
    stale: list[Tensor] = []
    for _ in range(3):
        for p, q in zip(held, others, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
            stale.append(p.grad)
        ours.step(), plain.step()
        for gradient in stale:
            gradient.fill_(torch.nan)
    torch.testing.assert_close(held, others, rtol=1e-5, atol=1e-7)


def test_a_launch_for_each_kind(monkeypatch):
    """Memory that is not aligned, or numbers that are no multiple of 16, move one by one."""
    compiled = launch_compiler(monkeypatch)
    row = [torch.empty(1 << 16, dtype=torch.bfloat16) for _ in range(4)]
    odd = [torch.empty(1 << 16, dtype=torch.bfloat16)[1:] for _ in range(4)]
    wide = [torch.empty(1 << 16) for _ in range(4)]
    columns = list(zip(*[row, odd, wide, row, odd, wide], strict=True))

    def launches():
        steps = [torch.ones(())] * 6
        columns_and_steps = (*map(list, columns), steps)
        adamw_triton.adamw_update(*columns_and_steps, *OPTIONS, [], 0.0, [], [], [], False)

    _, _, *updates = compiled(launches)
    assert [kernel.ptx.count("ld.global.v4.b32") for kernel in updates] == [4, 0, 8]
    for kernel in updates:
        check(kernel, wgmma=False)
