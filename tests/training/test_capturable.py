"""Optimizers that a graph can hold, learning rates as tensors, and torch's schedulers on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from moe_graphs import FullIteration
from moe_graphs.engine.tracing import Trace
from moe_graphs.training.capturable import (
    check_capturable_optimizer,
    check_capturable_scheduler,
    load_optimizer_state,
    tensor_hyperparameters,
)
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler
from training_runs import DEVICES, device_backend

SCHEDULERS: dict[str, Callable] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.95**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 7]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 12, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-1, 4, cycle_momentum=False),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-1, 14, cycle_momentum=False),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.CosineAnnealingLR(o, 8)], [4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 3), schedulers.ExponentialLR(o, 0.9)]
    ),
}


def two_groups(rate: float | torch.Tensor, device: str = "cpu") -> optim.Optimizer:
    groups = [
        {"params": [nn.Parameter(torch.ones(2, device=device))]},
        {"params": [nn.Parameter(torch.ones(2, device=device))]},
    ]
    optimizer = optim.AdamW(groups, lr=rate, fused=True, capturable=device == "cuda")
    optimizer._opt_called = True  # keeps schedulers from warning that nobody stepped it
    return optimizer


def rates(optimizer: optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("before", [True, False], ids=["tensors first", "scheduler first"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_move_the_tensors_in_place_and_do_not_wait(name, before, device):
    floats, tensors = (two_groups(0.02, device) for _ in range(2))
    expected = SCHEDULERS[name](floats)
    if before:
        tensor_hyperparameters(tensors)
    found = SCHEDULERS[name](tensors)
    tensor_hyperparameters(tensors)
    check_capturable_scheduler(found)
    addresses = [group["lr"].data_ptr() for group in tensors.param_groups]
    seen = set()
    for _ in range(13):
        seen.update(rates(floats))
        torch.testing.assert_close(rates(tensors), rates(floats), rtol=1e-5, atol=1e-8)
        expected.step()
        sync_error = torch.cuda.set_sync_debug_mode if device == "cuda" else lambda mode: None
        sync_error("error")
        with Trace(torch.device(device), strict=False):
            found.step()
        sync_error("default")
    assert addresses == [group["lr"].data_ptr() for group in tensors.param_groups]
    assert len(seen) > 1


def test_reduce_on_plateau_moves_the_tensor_but_reads_it():
    """The scheduler decides on the host, once an epoch."""
    floats, tensors = two_groups(0.02), two_groups(0.02)
    tensor_hyperparameters(tensors)
    pairs = [(o, schedulers.ReduceLROnPlateau(o, patience=1)) for o in (floats, tensors)]
    rate = tensors.param_groups[0]["lr"]
    for loss in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        for _, scheduler in pairs:
            scheduler.step(loss)
        torch.testing.assert_close(rates(tensors), rates(floats))
    assert rate is tensors.param_groups[0]["lr"]
    assert rate < 0.01


def test_schedulers_that_cycle_the_momentum_are_refused():
    optimizer = two_groups(0.02)
    one_cycle = schedulers.OneCycleLR(optimizer, 1e-1, 10)
    with pytest.raises(ValueError, match="OneCycleLR changes the momentum.*cycle_momentum=False"):
        check_capturable_scheduler(one_cycle)
    chained = schedulers.ChainedScheduler([one_cycle])
    with pytest.raises(ValueError, match="OneCycleLR"):
        check_capturable_scheduler(chained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_group_gets_a_rate_of_its_own(dtype):
    optimizer = two_groups(torch.tensor(0.5, dtype=dtype))
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    tensor_hyperparameters(optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert rates(optimizer) == [0.25, 0.5]
    assert {group["lr"].dtype for group in optimizer.param_groups} == {torch.float32}


def test_weight_decay_that_is_not_decoupled_is_refused():
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.1, fused=True)
    with pytest.raises(ValueError, match="SGD adds it to the gradient.*use torch.optim.AdamW"):
        tensor_hyperparameters(optimizer, weight_decay=True)
    adamw = two_groups(0.1)
    tensor_hyperparameters(adamw, weight_decay=True)
    first = adamw.param_groups[0]["tensor_weight_decay"]
    tensor_hyperparameters(adamw, weight_decay=True)
    assert adamw.param_groups[0]["tensor_weight_decay"] is first
    assert first == 0.01


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.AdamW(p), "AdamW cannot be captured.*pass fused=True, capturable=True"),
        (lambda p: optim.Adam(p, foreach=True), "Adam cannot.*fused=True, capturable=True"),
        (lambda p: optim.SGD(p, torch.tensor(0.1)), "SGD cannot be captured.*pass fused=True"),
        (lambda p: optim.Adagrad(p), "Adagrad cannot be captured.*pass fused=True"),
        (lambda p: optim.RMSprop(p), "RMSprop .*: on a CPU it reads.*use torch.optim.AdamW"),
        (lambda p: optim.LBFGS(p), "LBFGS cannot.*use torch.optim.AdamW"),
        (lambda p: optim.SparseAdam(p), "SparseAdam cannot.*outside of the graph"),
        (lambda p: optim.Adafactor(p), "Adafactor cannot.*use torch.optim.AdamW"),
    ],
)
def test_optimizers_that_cannot_be_captured_are_refused_by_name(make, message):
    optimizer = make([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match=message):
        check_capturable_optimizer(optimizer)
    with pytest.raises(ValueError, match=message):
        DeviceStep(optimizer)


def test_plain_sgd_can_be_captured_until_its_rate_is_a_tensor():
    plain = optim.SGD([nn.Parameter(torch.ones(2))], momentum=0.9)
    check_capturable_optimizer(plain)
    DeviceStep(plain)
    tensor_hyperparameters(plain)
    with pytest.raises(ValueError, match="SGD cannot be captured.*a tensor lr.*pass fused=True"):
        check_capturable_optimizer(plain)


def test_optimizers_that_cannot_skip_a_step_are_refused():
    parameters = [nn.Parameter(torch.ones(2))]
    scaler = GradScaler("cpu")
    dampened = optim.SGD(parameters, momentum=0.9, dampening=0.5, fused=True)
    with pytest.raises(ValueError, match="dampening: SGD.*pass dampening=0"):
        DeviceStep(dampened, scaler=scaler)
    DeviceStep(dampened)


@pytest.mark.gpu
def test_what_only_a_gpu_needs_of_an_optimizer():
    parameters = [nn.Parameter(torch.ones(2, device="cuda"))]
    with pytest.raises(ValueError, match="AdamW cannot be captured.*capturable=True"):
        check_capturable_optimizer(optim.AdamW(parameters, fused=True))
    with pytest.raises(ValueError, match="RMSprop would move its momentum.*pass fused=True"):
        DeviceStep(optim.RMSprop(parameters, capturable=True), scaler=GradScaler("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["Adadelta", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"],
)
def test_capturable_optimizers_with_tensor_rates_replay_as_they_step(name):
    runs = []
    for recorded in (False, True):
        generator = torch.Generator().manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(size, generator=generator).cuda()) for size in (3, 40)
        ]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = getattr(optim, name)(parameters, lr=0.1, capturable=True)
        tensor_hyperparameters(optimizer)
        step = DeviceStep(optimizer, clip_norm=1.0)
        replay = step
        for index in range(8):
            for parameter in parameters:
                parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
            optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + index))
            if recorded and index == 3:
                backend = device_backend("cuda")
                with backend.record(backend.new_pool()) as graphs:
                    step()
                replay = graphs[0].replay
            replay()
        runs.append([p.detach().clone() for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_loading_state_keeps_every_address_and_takes_floats(device):
    optimizer = two_groups(0.5, device)
    tensor_hyperparameters(optimizer)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(2, device=device)
    optimizer.step()
    tensors = [group["lr"] for group in optimizer.param_groups]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    other = two_groups(0.125, device)
    for group in other.param_groups:
        group["params"][0].grad = torch.full((2,), 2.0, device=device)
    other.step()
    load_optimizer_state(optimizer, other.state_dict())
    now = [group["lr"] for group in optimizer.param_groups]
    now += [value for state in optimizer.state.values() for value in state.values()]
    assert all(a is b for a, b in zip(tensors, now, strict=True))
    assert rates(optimizer) == [0.125, 0.125]
    theirs = [value for state in other.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(now[2:], theirs, strict=True))


def steps_of_decay(device: str) -> tuple[optim.Optimizer, FullIteration]:
    """Capture a whole step with decays as tensors, under a scheduler that keeps a first rate."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, device=device)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=device == "cuda")
    tensor_hyperparameters(optimizer, weight_decay=True)
    scheduler = schedulers.ExponentialLR(optimizer, 0.9)
    device_step = DeviceStep(optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        device_step()
        return loss

    whole = FullIteration(step, model=model, optimizer=optimizer, state=[device_step])
    for _ in range(5):
        whole(torch.ones(2, 4, device=device))
        scheduler.step()
    return optimizer, whole


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_step_goes_on_after_its_optimizers_state_was_loaded(device):
    """The decay's tensor and the scheduler's first rate are loaded, too (promise B8)."""
    optimizer, whole = steps_of_decay(device)
    (group,) = optimizer.param_groups
    tensors = {name: value for name, value in group.items() if isinstance(value, torch.Tensor)}
    assert tensors.keys() == {"lr", "initial_lr", "tensor_weight_decay"}
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["tensor_weight_decay"].fill_(0.5)
    load_optimizer_state(optimizer, saved)
    assert all(optimizer.param_groups[0][name] is value for name, value in tensors.items())
    assert tensors["tensor_weight_decay"] == 0.5
    whole(torch.ones(2, 4, device=device))
    assert (whole.report().captures, whole.report().matched) == (1, 3)
    whole.release()


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_decay_that_is_a_tensor_applies_in_a_plain_step(with_closure):
    """The result is that of torch's AdamW with the same number as its decay, up to rounding."""
    found = []
    for as_tensor in (False, True):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 8))
        unused = torch.nn.Parameter(torch.ones(2))
        options = {"lr": 0.1, "weight_decay": 0.5, "fused": True, "capturable": True}
        optimizer = optim.AdamW([parameter, unused], **options)
        tensor_hyperparameters(optimizer, weight_decay=as_tensor)
        tensor_hyperparameters(optimizer, weight_decay=as_tensor)  # again: no change

        def closure(parameter=parameter, optimizer=optimizer):
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            if with_closure:
                assert optimizer.step(closure) > 0
            else:
                closure()
                optimizer.step()
        assert torch.equal(unused, torch.ones(2))  # without a gradient AdamW leaves it alone
        found.append(parameter.detach())
    torch.testing.assert_close(*found)


def test_a_scaler_of_torch_that_skips_a_step_skips_the_decay():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([parameter], lr=0.1, weight_decay=0.5, fused=True, capturable=True)
    tensor_hyperparameters(optimizer, weight_decay=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale((parameter * math.inf).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.ones(4))


def test_a_copy_of_a_step_decays_as_the_original():
    """``copy.deepcopy`` of an optimizer loses its hooks: ``DeviceStep`` decays without them."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([parameter], lr=0.1, weight_decay=0.5, fused=True, capturable=True)
    tensor_hyperparameters(optimizer, weight_decay=True)
    found = []
    for step in (DeviceStep(optimizer), copy.deepcopy(DeviceStep(optimizer))):
        (weights,) = step.optimizer.param_groups[0]["params"]
        weights.grad = torch.full_like(weights, 0.25)
        step()
        found.append(weights.detach())
    assert torch.equal(*found)


def test_a_decay_goes_where_the_optimizer_has_it():
    number, tensor = two_groups(0.1), two_groups(0.2)
    tensor_hyperparameters(tensor, weight_decay=True)
    decay = tensor.param_groups[0]["tensor_weight_decay"]
    number.param_groups[0]["weight_decay"] = 0.25
    load_optimizer_state(tensor, number.state_dict())
    assert tensor.param_groups[0]["tensor_weight_decay"] is decay
    assert [decay.item(), tensor.param_groups[0]["weight_decay"]] == [0.25, 0.0]
    decay.fill_(0.75)
    load_optimizer_state(number, tensor.state_dict())
    assert "tensor_weight_decay" not in number.param_groups[0]
    assert number.param_groups[0]["weight_decay"] == 0.75
    assert type(number.param_groups[0]["lr"]) is float


def test_a_state_that_would_take_tensors_away_is_refused_and_nothing_is_loaded():
    optimizer = two_groups(0.5)
    empty = copy.deepcopy(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(2)
    optimizer.step()
    empty["param_groups"][0]["lr"] = 0.25
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"'step' of parameter 0 has shape \[\], got none"):
        load_optimizer_state(optimizer, empty)
    wide = copy.deepcopy(before)
    wide["state"][1]["exp_avg"] = torch.ones(1)  # this shape would fit by broadcasting
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 1 has shape \[2\], got .*\[1\]"):
        load_optimizer_state(optimizer, wide)
    assert rates(optimizer) == [0.5, 0.5]
    after = optimizer.state_dict()
    assert all(
        after["state"][i][name] is v for i in (0, 1) for name, v in before["state"][i].items()
    )


def test_betas_that_are_tensors_keep_their_addresses():
    optimizer = two_groups(0.5)
    betas = tuple(torch.tensor(value) for value in (0.5, 0.25))
    optimizer.param_groups[0]["betas"] = betas
    load_optimizer_state(optimizer, two_groups(0.5).state_dict())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["betas"], betas, strict=True))
    torch.testing.assert_close([beta.item() for beta in betas], [0.9, 0.999])
