"""Our AdamW against torch's: torch's own update on the CPU, and our kernel in the interpreter."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from grids import by_turns
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.optim import AdamW, adamw
from moe_graphs.training.capturable import check_capturable_optimizer, tensor_hyperparameters
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler

SHAPES = [(40, 7), (3,), (130,)]
FUSED = {"fused": True, "capturable": True}


@pytest.fixture
def kernel(interpreted, monkeypatch):
    """Let our kernel, interpreted, update parameters with ten elements and more."""
    from moe_graphs.kernels.adamw import triton_kernels as adamw_triton

    launches = []
    update = adamw_triton.adamw_update
    monkeypatch.setattr(
        adamw_triton, "adamw_update", lambda p, *rest: launches.append(len(p)) or update(p, *rest)
    )
    monkeypatch.setattr(adamw_triton, "BLOCK", 256)
    monkeypatch.setattr(adamw, "LARGE", 10)
    monkeypatch.setattr(adamw, "has_kernel", lambda x: x.dtype != torch.float64)
    return launches


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(parameters: Sequence[Tensor], seed: int, factor: float = 1.0) -> None:
    """Set gradients that bf16 holds exactly, the same for any dtype; some are 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).relu().bfloat16() - 0.25
        parameter.grad = factor * gradient.to(parameter.dtype)


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[Tensor]:
    """Train some steps, each with its own gradients; return parameters and their states."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        set_gradients(held, step)
        optimizer.step()
    return [*held, *(v for p in held for _, v in sorted(optimizer.state[p].items()))]


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs]


OPTIONS = [
    {"lr": 1e-2, "weight_decay": 0.0},
    {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.99), "eps": 1e-3},
    {"lr": torch.tensor(1e-2), "maximize": True},
    {"lr": 1e-2, "betas": (0.0, 0.0)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_without_a_kernel_it_is_torchs(options):
    ours = train(AdamW(parameters(), **options), 6)
    theirs = train(torch.optim.AdamW(parameters(), **options, **FUSED), 6)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# Triton's interpreter rounds to bf16 by cutting bits off.
@pytest.mark.parametrize(("options", "dtype"), by_turns(OPTIONS, [torch.float32, torch.float16]))
def test_the_kernel_is_as_right_as_torchs(kernel, options, dtype):
    """The error against fp64 is at most twice that of torch's fused update on the CPU."""
    ours = train(AdamW(parameters(dtype), **options), 12)
    assert kernel == [2] * 12  # the parameter of three numbers is torch's
    theirs = train(torch.optim.AdamW(parameters(dtype), **options, **FUSED), 12)
    wide = [nn.Parameter(p.detach().double()) for p in parameters(dtype)]
    exact = train(torch.optim.AdamW(wide, **options, foreach=False, fused=False), 12)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    for found, torchs in zip(errors(ours, exact), errors(theirs, exact), strict=True):
        assert found <= 2 * torchs + 2e-7


def fused_on_cuda(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> list[Tensor]:
    """Compute like torch's CUDA kernel with its defaults: in fp64 between roundings to fp32."""
    p, g, m, v = (x.double() for x in (p, g, m, v))
    p = (p - 1e-3 * 1e-2 * p).float()
    m = (0.9 * m + (1 - 0.9) * g).float()
    v = (0.999 * v + (1 - 0.999) * g * g).float()
    step_size, root = (torch.tensor(x) for x in (1e-3 / (1 - 0.9**step), (1 - 0.999**step) ** 0.5))
    denominator = ((v.sqrt() / root).double() + 1e-8).float()
    return [p - step_size * m / denominator, m, v]


def test_many_steps_are_torchs_to_a_few_last_bits(kernel):
    """A beta2 that is rounded to fp32 would change v by 5e-6, as in torch's update on the CPU."""
    held, steps = parameters()[2:], 70
    expected = held[0].detach().clone()
    m, v = torch.zeros(2, *expected.shape)
    for step in range(steps):
        set_gradients(held, step)
        expected, m, v = fused_on_cuda(expected, held[0].grad, m, v, step + 1)
    found = train(AdamW(held, lr=1e-3), steps)
    # p and m go through 0; near 0 the tolerance is the last bit of their addends.
    for ours, theirs, size in zip(found, (expected, m, v), (0.25, 0.25, 0.0), strict=False):
        assert ((ours - theirs).abs() <= 4 * 2**-23 * theirs.abs().clamp_min(size)).all()


def test_a_gradient_of_another_dtype(kernel):
    """The gradient is not rounded; small parameters are served, too, which torch would refuse."""
    steps, found = 3, parameters(torch.float16)
    optimizer = AdamW(found, lr=1e-2)
    for step in range(steps):
        wide = parameters()
        set_gradients(wide, step, 1 / 3)
        for parameter, other in zip(found, wide, strict=True):
            parameter.grad_dtype = None
            parameter.grad = other.grad
        optimizer.step()
    assert kernel == [3] * steps
    exact = [nn.Parameter(p.detach().double()) for p in parameters(torch.float16)]
    reference = torch.optim.AdamW(exact, lr=1e-2, foreach=False)
    for step in range(steps):
        set_gradients(exact, step, 1 / 3)
        reference.step()
    assert max(errors(found, exact)) < 5e-4


def test_memory_in_another_order(kernel):
    base, gradient = torch.randn(20, 30), torch.randn(20, 30)
    transposed, plain = nn.Parameter(base.clone().t()), nn.Parameter(base.clone())
    optimizer = AdamW([transposed, plain], lr=1e-2)
    transposed.grad, plain.grad = gradient.t(), gradient
    optimizer.step()
    assert kernel == [2]
    assert torch.equal(transposed.t(), plain)
    assert transposed.stride() == (1, 30) == optimizer.state[transposed]["exp_avg"].stride()


def test_memory_that_is_no_row_is_refused():
    """Torch's fused update on the CPU silently takes such memory for a row."""
    gaps = nn.Parameter(torch.randn(4, 6)[:, :3])
    other, last = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    for parameter in (gaps, other, last):
        parameter.grad = torch.ones(3, 4).t()
    optimizer = AdamW([{"params": [last]}, {"params": [gaps]}, {"params": [other]}])
    last.grad, before = torch.ones(4, 3), last.detach().clone()
    with pytest.raises(ValueError, match=r"shape \(4, 3\) and strides \(6, 1\)"):
        optimizer.step()
    gaps.grad = None
    with pytest.raises(ValueError, match=r"strides \(3, 1\) has a gradient with \(1, 4\)"):
        optimizer.step()
    assert torch.equal(last, before)
    # Dimensions of size one may have any stride.
    column = nn.Parameter(torch.ones(4, 1))
    column.grad = torch.ones(1, 4).t()
    AdamW([column], lr=0.5, weight_decay=0.0).step()
    assert torch.allclose(column, torch.full((4, 1), 0.5))


def test_a_state_of_another_shape_is_refused():
    """Our kernel would read past the end of a smaller state."""
    saver = AdamW([nn.Parameter(torch.randn(4, 3))])
    train(saver, 1)
    weight = nn.Parameter(torch.randn(8, 3))
    optimizer = AdamW([weight])
    optimizer.load_state_dict(saver.state_dict())
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=r"\(8, 3\) has states of shapes \(4, 3\)"):
        optimizer.step()


def test_tensors_at_steps_of_their_own(kernel):
    """More tensors than a program of the small kernel takes, under another default dtype."""
    from moe_graphs.kernels.adamw import triton_kernels as adamw_triton

    torch.set_default_dtype(torch.float64)
    try:
        count, c = 35, torch.arange(1.0, 36.0, dtype=torch.float32)
        p, g, m, v = (list(torch.full((count, 2), x).float().unbind()) for x in (1, 2, 3, 4))
        given = (p, g, m, v, list(c.unbind()), 0.1, None, 0.9, 0.99, 1e-8, 0.5, False, *[None] * 3)
        adamw_triton.adamw_update(*given, [], 0.0, [], [], [], False)
    finally:
        torch.set_default_dtype(torch.float32)
    m, v = 0.9 * 3 + 0.1 * 2, 0.99 * 4 + 0.01 * 4
    for x, step in zip(p, range(1, count + 1), strict=True):
        update = 0.1 * m / (1 - 0.9**step) / (v / (1 - 0.99**step)) ** 0.5
        torch.testing.assert_close(x, torch.full_like(x, 0.95 - update))


def test_clipping_is_done_on_the_way(kernel):
    """Our kernel multiplies the first and the last gradient, torch the one that is too small."""
    held, exact = parameters(), parameters(torch.float64)
    step = DeviceStep(AdamW(held, lr=1e-2), clip_norm=0.5)
    torchs = torch.optim.AdamW(exact, lr=1e-2)
    for number, factor in enumerate((1.0, 1.0, 0.01, 1.0)):  # a factor of 1 does not clip
        set_gradients(held, number, factor)
        set_gradients(exact, number, factor)
        norm = torch.nn.utils.clip_grad_norm_(exact, 0.5)
        torch.testing.assert_close(step().grad_norm, norm.float())
        torchs.step()
    assert kernel == [2] * 4
    assert max(errors(held, exact)) < 1e-6


@pytest.mark.parametrize("by_kernel", [True, False])
def test_what_it_has_written_backward_may_not_use(kernel, monkeypatch, by_kernel):
    monkeypatch.setattr(adamw, "has_kernel", lambda x: by_kernel)
    weight = nn.Parameter(torch.ones(20))
    loss = weight.square().sum()
    weight.grad = torch.ones(20)
    AdamW([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_rate_is_read_at_every_step(kernel):
    numbers, tensors = parameters(), parameters()
    a, b = AdamW(numbers, lr=0.5), AdamW(tensors, lr=0.5)
    tensor_hyperparameters(b)
    for step, rate in enumerate((0.5, 0.25, 0.0)):
        a.param_groups[0]["lr"] = rate
        b.param_groups[0]["lr"].fill_(rate)
        before = [p.detach().clone() for p in tensors]
        for held, optimizer in ((numbers, a), (tensors, b)):
            set_gradients(held, step)
            optimizer.step()
        torch.testing.assert_close(numbers, tensors, rtol=0, atol=0)
    torch.testing.assert_close(before, tensors, rtol=0, atol=0, check_stride=False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: inf / inf
def test_found_inf_leaves_everything_as_it_was(kernel):
    held = parameters()
    optimizer = AdamW(held, lr=1e-2)
    before = copy.deepcopy(train(optimizer, 2))
    set_gradients(held, 2, math.inf)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.ones(())
    optimizer.step()
    after = [*held, *(v for p in held for _, v in sorted(optimizer.state[p].items()))]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert held[0].grad.isinf().any()
    # Scaled gradients take other instructions than unscaled ones, with the same result.
    expected = AdamW(copied := parameters(), lr=1e-2)
    expected = train(expected, 3)
    set_gradients(held, 2, 8.0)
    optimizer.found_inf.zero_()
    optimizer.step()
    torch.testing.assert_close(after, expected, rtol=0, atol=0)
    # Torch's fused update leaves the gradients unscaled, too.
    for parameter, other in zip(held, copied, strict=True):
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: inf / inf
@pytest.mark.parametrize("skipped", [pytest.param(False, marks=pytest.mark.long), True])
def test_whole_steps_hold_the_kernel(kernel, skipped):
    """Replays of a step with the update in it are eager steps; also if the first is skipped."""
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        step = DeviceStep(AdamW(model.parameters(), lr=1e-2), scaler=GradScaler("cpu"))

        def whole(batch: Tensor, model=model, step=step) -> Any:
            step.scale(model(batch).square().mean()).backward()
            return step()

        run: Any = whole
        if graphed:
            options = {"optimizer": step.optimizer, "state": [step], "warmup_steps": 1}
            run = FullIteration(whole, model=model, **options)
        results = []
        for index in range(5):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
            batch[0, 0] = math.inf if skipped and index in (0, 3) else 1.0
            results += [x.clone() for x in run(batch) if x is not None]
        found.append([*results, *model.parameters(), *step.optimizer.state[model.weight].values()])
        assert kernel
        assert not graphed or run.report().matched == 4
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("options", [FUSED, {"foreach": True}, {}])
@pytest.mark.parametrize("saved_by_ours", [True, False])
def test_states_are_torchs_both_ways(saved_by_ours, options):
    kinds = [lambda p: AdamW(p, lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2, **options)]
    saver, loader = kinds if saved_by_ours else reversed(kinds)
    first, second = parameters(), parameters()
    before = saver(first)
    train(before, 3)
    buffer = io.BytesIO()
    torch.save(before.state_dict(), buffer)
    buffer.seek(0)
    after = loader(second)
    after.load_state_dict(torch.load(buffer))
    with torch.no_grad():
        torch._foreach_copy_(second, first)
    torch.testing.assert_close(train(after, 3, 3), train(before, 3, 3), rtol=1e-5, atol=1e-7)
    for state in after.state.values():
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        assert (state["step"].shape, state["step"].dtype) == ((), torch.float32)
        assert state["step"] == 6
    assert sorted(after.param_groups[0]) == sorted(before.param_groups[0])
    check_capturable_optimizer(after if not saved_by_ours else before)


def test_a_copy_is_its_own(kernel):
    optimizer = AdamW(parameters(), lr=1e-2)
    train(optimizer, 2)
    copied = copy.deepcopy(optimizer)
    torch.testing.assert_close(train(copied, 2, 2), train(optimizer, 2, 2), rtol=0, atol=0)
    assert copied._step_supports_amp_scaling


def test_hooks_run_once_and_a_closure_has_gradients():
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # torch wraps the class's step
    (weight,) = held = [nn.Parameter(torch.ones(4))]
    optimizer, calls = AdamW(held), []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))

    def closure() -> Tensor:
        loss = (2 * weight).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 8
    assert calls == ["hook"]
    assert (weight < 1).all()


@pytest.mark.parametrize(
    "option",
    [
        {"amsgrad": True},
        {"foreach": True},
        {"differentiable": True},
        {"fused": False},
        {"capturable": False},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    ],
)
def test_what_it_has_not_is_refused_by_name(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"^{name}: "):
        AdamW(parameters(), **option)
    with pytest.raises(ValueError, match=f"^{name}: "):
        AdamW([{"params": parameters(), **option}])


def test_an_option_left_open_is_on():
    """The option is in each group as well, where DeviceStep reads it."""
    optimizer = AdamW([{"params": parameters(), "fused": None}], fused=None, foreach=False)
    check_capturable_optimizer(optimizer)
    DeviceStep(optimizer, scaler=GradScaler("cpu"))


def test_a_state_that_it_cannot_continue_is_refused():
    saver = torch.optim.AdamW(parameters(), amsgrad=True)
    train(saver, 1)
    optimizer = AdamW(parameters(), lr=0.5)
    with pytest.raises(ValueError, match="^amsgrad: "):
        optimizer.load_state_dict(saver.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_gradients_without_an_update_are_refused_before_the_first(kind):
    good, bad = parameters()[:2]
    if kind == "complex":
        bad = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = AdamW([{"params": [good]}, {"params": [bad]}])
    good.grad, bad.grad = torch.ones_like(good), torch.zeros_like(bad)
    bad.grad = bad.grad.to_sparse() if kind == "sparse" else bad.grad
    before = good.detach().clone()
    with pytest.raises(ValueError, match=f"parameter 0 of group 1 has a {kind} gradient"):
        optimizer.step()
    assert torch.equal(good, before)
    assert not optimizer.state
