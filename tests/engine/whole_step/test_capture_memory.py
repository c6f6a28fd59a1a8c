"""Memory that a capture of a whole step takes besides the step itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_graphs import FullIteration
from moe_graphs.engine.snapshot import Snapshot, copies_on_host


def some_tensors(device: str) -> list[torch.Tensor]:
    made = [
        torch.randn(37, 5),
        torch.randn(6, 4, 3).permute(2, 0, 1),
        torch.randn(9, 8)[::2, 1:7],
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.empty(0, 4),
        torch.arange(11),
        torch.randn(3, 3).bfloat16(),
    ]
    return [each.to(device) for each in made]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_come_back_from_the_host(device):
    class Owner: ...

    tensors = some_tensors(device)
    for owner in (Owner(), Owner()):  # the first block is given back
        for copy, tensor in zip(copies_on_host(tensors, owner), tensors, strict=True):
            assert copy.device.type == "cpu"
            assert copy.dtype == tensor.dtype
            assert torch.equal(copy, tensor.cpu())
    before = [tensor.clone() for tensor in tensors]
    values = Snapshot(values=tensors, on_host=True)
    for tensor in tensors:
        tensor.zero_()
    values.put_back()
    for tensor, value in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.gpu
def test_a_capture_holds_no_second_copy_of_the_state():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    iteration = FullIteration(step, model=model, optimizer=optimizer, warmup_steps=3)
    batch = torch.randn(64, 2048, device="cuda")
    iteration(batch)
    peaks = []
    for calls in (1, 2):  # eager; and the last eager one with the one that captures
        torch.cuda.reset_peak_memory_stats()
        for _ in range(calls):
            iteration(batch)
        peaks.append(torch.cuda.max_memory_allocated())
    assert iteration.report().state == "captured"
    weights = sum(p.nbytes for p in model.parameters())
    assert peaks[1] - peaks[0] < weights  # cuBLAS workspaces; weights and states are three times
    iteration.release()
