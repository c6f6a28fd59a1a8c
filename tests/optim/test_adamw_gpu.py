"""Our AdamW on a CUDA GPU: as accurate as torch's fused one, in graphs, and reproducible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from captured_updates import captured_update
from many_tensors import alone, together
from moe_graphs.kernels.adamw import triton_kernels as adamw_triton
from moe_graphs.optim import AdamW, adamw
from moe_graphs.training.capturable import tensor_hyperparameters
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler
from updates_on_gpus import everything, set_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

# Experts, a size that 16 does not divide, and two parameters that torch updates.
SHAPES = [(8, 128, 96), (70_001,), (300,), (7, 9)]
FUSED = {"fused": True, "capturable": True}
OPTIONS = [
    {"lr": 1e-2, "weight_decay": 0.0},
    {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.99), "eps": 1e-3},
    {"lr": 1e-2, "maximize": True},
    {"lr": 1e-2, "betas": (0.0, 0.0)},
]


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in SHAPES]
    made[0] = made[0].transpose(1, 2).contiguous().transpose(1, 2)
    return [nn.Parameter(x.to(dtype)) for x in made]


def train(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, steps: int, **options: Any
) -> list[Tensor]:
    held = parameters(dtype)
    optimizer = make(held, **options)
    for step in range(steps):
        set_gradients(held, step)
        optimizer.step()
    return everything(optimizer)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS)
def test_as_right_as_torchs_and_the_same_every_time(options, dtype):
    """The error against fp64 is at most twice that of torch's fused AdamW."""
    ours, again = (train(AdamW, dtype, 20, **options) for _ in range(2))
    assert same(ours, again)
    torchs = train(torch.optim.AdamW, dtype, 20, **options, **FUSED)
    exact = train(torch.optim.AdamW, torch.float64, 20, **options, foreach=False)
    for a, b, x in zip(ours, torchs, exact, strict=True):
        found, theirs = ((y.double() - x).norm() / x.norm().clamp_min(1e-30) for y in (a, b))
        assert found <= 2 * theirs + 2e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipping_is_as_right_as_torchs(dtype):
    """Torch rounds clipped gradients once more than we do."""

    def clipped(make, **options) -> list[Tensor]:
        held = parameters(dtype)
        step = DeviceStep(make(held, lr=1e-2, **options), clip_norm=0.37)
        for number in range(10):
            set_gradients(held, number)
            step()
        return everything(step.optimizer)

    ours, again = (clipped(AdamW) for _ in range(2))
    assert same(ours, again)
    torchs = clipped(torch.optim.AdamW, **FUSED)
    held = parameters(torch.float64)
    optimizer = torch.optim.AdamW(held, lr=1e-2)
    for number in range(10):
        set_gradients(held, number)
        torch.nn.utils.clip_grad_norm_(held, 0.37)
        optimizer.step()
    for a, b, x in zip(ours, torchs, everything(optimizer), strict=True):
        found, theirs = ((y.double() - x).norm() / x.norm().clamp_min(1e-30) for y in (a, b))
        assert found <= 2 * theirs + 2e-7


def test_a_thousand_steps_are_as_right_as_torchs():
    """Rounding errors in fp32 do not add up."""
    ours, torchs = (
        train(make, torch.float32, 1000, lr=1e-3, **options)
        for make, options in ((AdamW, {}), (torch.optim.AdamW, FUSED))
    )
    exact = train(torch.optim.AdamW, torch.float64, 1000, lr=1e-3, foreach=False)
    for a, b, x in zip(ours, torchs, exact, strict=True):
        found, theirs = ((y.double() - x).norm() / x.norm().clamp_min(1e-30) for y in (a, b))
        assert found <= 2 * theirs + 2e-7
        assert found <= 1e-5


def test_large_parameters_are_our_kernels_and_small_ones_torchs(monkeypatch):
    calls, torchs, ours = [], adamw.adamw, adamw_triton.adamw_update
    monkeypatch.setattr(
        adamw, "adamw", lambda p, *r, **k: calls.append(("torch", len(p))) or torchs(p, *r, **k)
    )
    monkeypatch.setattr(
        adamw_triton, "adamw_update", lambda p, *r: calls.append(("ours", len(p))) or ours(p, *r)
    )
    train(AdamW, torch.bfloat16, 1)
    assert calls == [("ours", 2), ("torch", 2)]
    calls.clear()
    train(AdamW, torch.float64, 1)
    assert calls == [("torch", 4)]


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has one dtype for both")
def test_a_gradient_of_another_dtype():
    """A bf16 gradient of fp32 parameters is used as it is; an fp32 one of bf16 is not rounded."""
    narrow, wide = parameters(torch.float32), parameters(torch.float32)
    for p, q in zip(narrow, wide, strict=True):
        p.grad_dtype = None
        p.grad = torch.randn_like(p).bfloat16()
        q.grad = p.grad.float()
    optimizers = [AdamW(held, lr=1e-2) for held in (narrow, wide)]
    for optimizer in optimizers:
        optimizer.step()
    # Torch updates the small parameters whose gradients have their dtype.
    for p, q in zip(narrow, wide, strict=True):
        assert torch.equal(p, q) if p.numel() >= adamw.LARGE else torch.allclose(p, q)
    found, rounded = parameters(), parameters()
    exact = [nn.Parameter(p.detach().double()) for p in found]
    for p, q, x in zip(found, rounded, exact, strict=True):
        p.grad_dtype = None
        x.grad = torch.randn_like(x)
        p.grad, q.grad = x.grad.float(), x.grad.to(q.dtype)
    options = {"lr": 1.0, "eps": 1.0}
    for held, make in ((found, AdamW), (rounded, AdamW), (exact, torch.optim.AdamW)):
        make(held, **options).step()
    pairs = list(zip(found, rounded, exact, strict=True))
    assert sum((p - x).square().sum() for p, _, x in pairs) < sum(
        (q - x).square().sum() for _, q, x in pairs
    )


@pytest.mark.parametrize("tensor_rate", [False, True])
def test_a_captured_step_is_an_eager_step_and_waits_for_nothing(tensor_rate):
    eager, graphed = (AdamW(parameters(), lr=1e-2) for _ in range(2))
    for optimizer in (eager, graphed):
        if tensor_rate:
            tensor_hyperparameters(optimizer)
        set_gradients(optimizer.param_groups[0]["params"], 0)
        optimizer.step()
    graph = captured_update(eager, graphed)
    for step in range(1, 6):
        for optimizer in (eager, graphed):
            set_gradients(optimizer.param_groups[0]["params"], step)
            if tensor_rate:
                optimizer.param_groups[0]["lr"].fill_(1e-2 / step)
        eager.step()
        graph.replay()
        assert same(everything(eager), everything(graphed))
    assert everything(eager)[-1].item() == 7.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_torchs_scaler_scales_and_skips(dtype):
    """The scaler works as with torch's fused AdamW: gradients are unscaled in place, too."""
    runs = []
    for make in (AdamW, lambda p, **options: torch.optim.AdamW(p, **options, **FUSED)):
        held = parameters(dtype)
        optimizer = make(held, lr=1e-2)
        scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2)
        for step in range(6):
            scaler.scale(torch.ones((), device="cuda"))
            set_gradients(held, step, scaler.get_scale())
            if step in (0, 3):
                held[step].grad[(0,) * held[step].ndim] = torch.inf
            before = everything(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step == 3:
                assert same(before, everything(optimizer))
        runs.append([*everything(optimizer), *(p.grad for p in held)])
        assert scaler.get_scale() == 64.0  # halved, doubled, halved, doubled
        assert {s["step"].item() for s in optimizer.state.values()} == {4.0}
    for ours, torchs in zip(*runs, strict=True):
        tolerance = 2e-3 if dtype == torch.float16 else 1e-6
        torch.testing.assert_close(ours, torchs, rtol=tolerance, atol=tolerance)


def test_a_device_step_in_a_graph_skips():
    eager, graphed = parameters(), parameters()
    steps = []
    for held in (eager, graphed):
        optimizer = AdamW(held, lr=1e-2)
        tensor_hyperparameters(optimizer, weight_decay=True)
        scaler = GradScaler("cuda", init_scale=64.0, growth_interval=2)
        steps.append(DeviceStep(optimizer, scaler=scaler, clip_norm=1.0))
        set_gradients(held, 0, 64.0)
        steps[-1]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps[1]()
    for step in range(1, 7):
        for held in (eager, graphed):
            set_gradients(held, step, 64.0)
            if step in (2, 3):
                held[step - 2].grad[(0,) * held[step - 2].ndim] = torch.inf
        steps[0]()
        graph.replay()
        assert same(everything(steps[0].optimizer), everything(steps[1].optimizer))
        assert all(x.isfinite().all() for x in everything(steps[1].optimizer))
    assert steps[1].optimizer.state[graphed[0]]["step"].item() == 5.0


@pytest.mark.parametrize("coded", [False, True])
def test_many_tensors_get_what_each_gets_alone(coded):
    """Tensors have odd sizes, are empty or unaligned, and have several dtypes."""
    assert same(together("cuda", coded), alone("cuda", coded))


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.uint8, "ema_decay": 0.9}])
def test_gradients_that_lie_elsewhere_at_every_step(options):
    """Steps are enqueued without waiting for the last one; a graph has its capture's addresses."""
    eager, graphed = (AdamW(parameters(), lr=1e-2, **options) for _ in range(2))
    for optimizer in (eager, graphed):
        set_gradients(optimizer.param_groups[0]["params"], 0)
    graph = captured_update(eager, graphed)
    held, kept = eager.param_groups[0]["params"], []
    for step in range(1, 6):
        kept += [p.grad for p in held]  # so that new gradients get other addresses
        eager.zero_grad(set_to_none=True)
        for optimizer in (eager, graphed):
            set_gradients(optimizer.param_groups[0]["params"], step)
        eager.step()
        graph.replay()
        for gradient in kept:
            gradient.fill_(torch.nan)
    assert same(everything(eager), everything(graphed))
    assert all(x.isfinite().all() for x in everything(eager))
