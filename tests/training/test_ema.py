"""The moving average against torch's own, and around training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from moe_graphs.training.ema import ExponentialMovingAverage
from training_runs import DEVICES


def change(module: nn.Module, index: int) -> None:
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_torchs_average(device):
    module = nn.Linear(3, 4, device=device)
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(module)  # its first update only copies
    ours = ExponentialMovingAverage(module.parameters(), 0.9)
    for index in range(5):
        change(module, index)
        theirs.update_parameters(module)
        ours.update()
    torch.testing.assert_close(ours.averages, [p.detach() for p in theirs.parameters()])


@pytest.mark.parametrize("device", DEVICES)
def test_averages_of_bf16_parameters_are_fp32_and_move_by_little(device):
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16, device=device))
    average = ExponentialMovingAverage([parameter], 0.999)
    with torch.no_grad():
        parameter.fill_(1.0)
    for _ in range(1000):
        average.update()
    expected = torch.full((5,), 1 - 0.999**1000, device=device)
    torch.testing.assert_close(average.averages[0], expected, rtol=1e-4, atol=0)
    with average.swapped_in():
        assert parameter.dtype == torch.bfloat16
        torch.testing.assert_close(parameter.float(), expected, rtol=1e-2, atol=0)
    assert parameter.eq(1.0).all()


def test_parameters_keep_their_addresses_and_come_back_after_an_error():
    module = nn.Linear(3, 4)
    average = ExponentialMovingAverage(module.parameters())
    started = [a.clone() for a in average.averages]
    change(module, 1)
    trained = [p.detach().clone() for p in module.parameters()]
    addresses = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(ArithmeticError), average.swapped_in():
        torch.testing.assert_close([p.detach() for p in module.parameters()], started)
        raise ArithmeticError
    assert addresses == [p.data_ptr() for p in module.parameters()]
    torch.testing.assert_close([p.detach() for p in module.parameters()], trained, rtol=0, atol=0)


def test_what_does_not_fit_is_refused():
    module = nn.Linear(3, 4)
    for decay in (-0.1, 1.0):
        with pytest.raises(ValueError, match="decay: .* must be at least 0 and below 1"):
            ExponentialMovingAverage(module.parameters(), decay)
    with pytest.raises(ValueError, match=r"got a module .Linear.: pass its parameters\(\)"):
        ExponentialMovingAverage(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="parameters: none were given"):
        ExponentialMovingAverage([])
    other = ExponentialMovingAverage(nn.Linear(4, 3).parameters())
    with pytest.raises(ValueError, match="2 tensors that do not match the 2 parameters"):
        other.load_state_dict(ExponentialMovingAverage(module.parameters()).state_dict())
