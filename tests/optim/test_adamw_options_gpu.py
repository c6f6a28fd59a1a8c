"""Options of our AdamW on a CUDA GPU: states (also 8-bit), stochastic rounding, averages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from moe_graphs.kernels.adamw import triton_kernels as adamw_triton
from moe_graphs.kernels.adamw.reference import adamw_update_reference
from moe_graphs.kernels.adamw.state_codes import NEAREST, decode, encode
from moe_graphs.optim import AdamW
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler
from updates_on_gpus import everything, set_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

BF16, FP32, UINT8 = torch.bfloat16, torch.float32, torch.uint8
SHAPES = [(8, 96, 128), (70_001,), (300,), (7, 9)]  # only the first can have codes
ALL = {"state_dtype": BF16, "stochastic_rounding": True, "ema_decay": 0.9}


def parameters(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in SHAPES]
    return [nn.Parameter(x.to(dtype)) for x in made]


def train(optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    """Train some steps; return parameters, then states by parameter and name."""
    held = optimizer.param_groups[0]["params"]
    for step in range(steps):
        set_gradients(held, step)
        optimizer.step()
    return everything(optimizer)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("options", [{"state_dtype": FP32}, {"ema_decay": 0.9}])
def test_as_right_as_torchs(options, dtype):
    """The error against fp64 is at most twice that of torch's fused AdamW, also if small."""
    ours = AdamW(parameters(dtype), lr=1e-2, **options)
    torchs = torch.optim.AdamW(parameters(dtype), lr=1e-2, fused=True, capturable=True)
    exact = torch.optim.AdamW(parameters(torch.float64), lr=1e-2, foreach=False)
    for optimizer in (ours, torchs, exact):
        train(optimizer, 20)
    rows = (optimizer.param_groups[0]["params"] for optimizer in (ours, torchs, exact))
    for p, q, x in zip(*rows, strict=True):
        pairs = [(p, q, x)]
        for name in ("exp_avg", "exp_avg_sq"):
            pairs.append((ours.state[p][name], torchs.state[q][name], exact.state[x][name]))
        for found, theirs, right in pairs:
            a, b = ((y.double() - right).norm() / right.norm() for y in (found, theirs))
            assert a <= 2 * b + 2e-7
        if options == {"state_dtype": FP32}:
            v = exact.state[x]["exp_avg_sq"]
            assert (ours.state[p]["exp_avg_sq"] - v).norm() <= 1e-5 * v.norm()


@pytest.mark.parametrize(("dtype", "states"), [(BF16, FP32), (BF16, BF16), (FP32, BF16)])
def test_the_kernel_has_the_bits_of_the_plain_path(dtype, states):
    """Numbers differ only if a fused multiply-add has another last bit."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.rand(70_001, generator=generator, device="cuda") for _ in range(5)]
    kinds = (dtype, dtype, states, states, FP32)
    step = [torch.full((), 3.0, device="cuda")]
    options: tuple[Any, ...] = (1e-2, None, 0.9, 0.999, 1e-8, 0.1, False, None, None, None)
    found = []
    for update in (adamw_triton.adamw_update, adamw_update_reference):
        p, g, m, v, e = ([x.to(kind, copy=True)] for x, kind in zip(made, kinds, strict=True))
        keys = [1 << 62 | 12345 << 20 | 1]
        update(p, g, m, v, step, *options, e, 0.9, keys, [], [], True)
        found.append([*p, *m, *v, *e])
    for ours, plain in zip(*found, strict=True):
        if ours.dtype == BF16:
            assert (ours != plain).double().mean() < 1e-3
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2)
    assert not torch.equal(found[0][0].float(), made[0])


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.9, 0.999)])
def test_codes_are_those_of_the_plain_path(dtype, betas):
    """Codes are equal with betas for which fused multiply-adds make no difference."""
    generator = torch.Generator("cuda").manual_seed(0)
    n = 64 * 1111  # the last program is not full
    p, g, m, v = (torch.randn(n, generator=generator, device="cuda") for _ in range(4))
    g, m, v = (x * torch.exp2(-20 * torch.rand_like(x)) for x in (g, m, v.square()))
    step = [torch.full((), 3.0, device="cuda")]
    options: tuple[Any, ...] = (1e-2, None, *betas, 1e-8, 0.1, False, None, None, None, [], 0.0)
    found = []
    for update in (adamw_triton.adamw_update, adamw_update_reference):
        own = [p.to(dtype, copy=True), g.to(dtype)]
        own += [*encode(m, NEAREST, signed=True), *encode(v, NEAREST, signed=False)]
        q, h, codes, scales, sq_codes, sq_scales = own
        rest = ([1 << 62 | 12345 << 20 | 1], [scales], [sq_scales], True)
        update([q], [h], [codes], [sq_codes], step, *options, *rest)
        found.append([q, codes, scales, sq_codes, sq_scales])
    for ours, plain in list(zip(*found, strict=True))[1:]:
        assert (ours != plain).double().mean() <= (0 if betas == (0.0, 0.0) else 1e-3)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-2, atol=1e-2)
    assert not torch.equal(found[0][0].float(), p)


def test_states_of_8_bits_stay_near_those_of_fp64():
    ours = AdamW(parameters(FP32), lr=1e-2, state_dtype=UINT8)
    exact = torch.optim.AdamW(parameters(torch.float64), lr=1e-2, foreach=False)
    train(ours, 50), train(exact, 50)
    (p, *_), (x, *_) = ours.param_groups[0]["params"], exact.param_groups[0]["params"]
    off = (p - x) / 1e-2
    assert off.std() < 2
    assert off.mean().abs() < 0.05
    for name, width in (("exp_avg", 0.2), ("exp_avg_sq", 0.15)):
        state, right = ours.state[p], exact.state[x][name]
        found = decode(state[f"{name}_code"], state[f"{name}_scale"], signed=name == "exp_avg")
        assert (found - right).norm() < width * right.norm()


def test_rounding_is_right_on_the_average_and_the_same_every_time():
    """The mean of 200 updates far below the last bit of bf16 is right, with the same bits again."""
    ends = []
    for _ in range(2):
        p = nn.Parameter(torch.ones(1 << 20, device="cuda", dtype=BF16))
        optimizer = AdamW([p], lr=1e-4, weight_decay=0.0, stochastic_rounding=True)
        for _ in range(200):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)
    # The final value of one element has a standard deviation of about sqrt(200 * 1e-4 / 256), the
    # mean over all elements a thousandth of it.
    assert ends[0].double().mean().item() == pytest.approx(1 - 200 * 1e-4, abs=5e-5)


def test_what_is_no_number_stays_so_however_it_is_rounded():
    """Random bits that are added to the bits of this NaN would make a zero."""
    p = nn.Parameter(torch.ones(1 << 16, device="cuda", dtype=BF16))
    optimizer = AdamW([p], state_dtype=BF16, stochastic_rounding=True)
    p.grad = torch.ones_like(p)
    p.grad[1::2] = torch.nan
    for _ in range(3):
        optimizer.step()
    for x in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
        assert x[1::2].isnan().all()
        assert x[::2].isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        ALL,
        {"state_dtype": FP32, "ema_decay": 0.99},
        {"state_dtype": UINT8, "stochastic_rounding": True, "ema_decay": 0.9},
    ],
)
def test_a_captured_step_is_an_eager_step_with_new_bits_each(options):
    """Steps have a scaler and clipping, one is skipped, and averages are swapped in and out."""
    steps = []
    for held in (parameters(), parameters()):
        scaler = GradScaler("cuda", init_scale=64.0, growth_interval=2)
        step = DeviceStep(AdamW(held, lr=1e-2, **options), scaler=scaler, clip_norm=1.0)
        set_gradients(held, 0, 64.0)
        step()
        steps.append(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps[1]()
    for number in range(1, 6):
        for step in steps:
            held = step.optimizer.param_groups[0]["params"]
            set_gradients(held, number, 64.0)
            if number == 2:
                held[0].grad[0, 0, 0] = torch.inf
        steps[0]()
        graph.replay()
        eager, graphed = (everything(step.optimizer) for step in steps)
        assert same(eager, graphed)
        assert all(x.isfinite().all() for x in eager)
        with steps[1].optimizer.averaged():
            assert not same(everything(steps[1].optimizer)[:1], graphed[:1])
        assert same(everything(steps[1].optimizer), graphed)


def test_an_update_and_its_averages_wait_for_nothing():
    optimizer = AdamW(parameters(), lr=1e-2, **ALL)
    train(optimizer, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        with optimizer.averaged():
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
