"""Muon on matrices that ranks divide by rows computes the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from distributed import run_distributed
from moe_graphs.optim import Muon
from moe_graphs.optim.whole_matrices import Rows
from moe_graphs.training.capturable import tensor_hyperparameters

# Rows that the ranks do not divide evenly, fewer rows than ranks, experts, and a vector whose
# length is a multiple of the vector registers.
SHAPES = ((7, 5), (12, 6), (6, 12), (1, 9), (10, 4), (3, 4, 6), (64,))
STEPS = 4
# Sizes of the mesh ("replicate", "shard"), by the number of ranks.
LAYOUTS = {2: [(1, 2), (2, 1)], 4: [(1, 4), (2, 2)]}


def first(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + sum(shape)))


def muon(parameters: list[nn.Parameter]) -> Muon:
    *matrices, fused, experts, vector = parameters
    groups = [
        {"params": [*matrices, experts]},
        {"params": [fused], "split": (3, 6, 1)},
        {"params": [vector], "muon": False},
    ]
    optimizer = Muon(groups, lr=0.05, adjust_lr_fn="match_rms_adamw")
    tensor_hyperparameters(optimizer)
    return optimizer


def train(parameters: list[nn.Parameter], mesh: Any, device: str) -> dict[str, Tensor]:
    """Run some steps with clipping, one of them skipped, and return parameters and states."""
    optimizer: Any = muon(parameters)
    optimizer.grad_factor = torch.tensor(0.3, device=device)
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros((), device=device)
    for step in range(STEPS):
        for parameter in parameters:
            whole = gradient(tuple(parameter.shape), step).to(device)
            parameter.grad = whole if mesh is None else placed(whole, mesh)
        optimizer.found_inf.fill_(step == 2)
        optimizer.step()
    found = {}
    for number, parameter in enumerate(parameters):
        states = optimizer.state[parameter]
        for name, value in {"": parameter, **states}.items():
            value = value.detach()
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{number} {name}"] = whole
    return found


def placed(whole: Tensor, mesh: Any) -> DTensor:
    return distribute_tensor(whole, mesh, [Replicate(), Shard(0)])


def on_ranks(rank: int, world_size: int, device: str = "cpu") -> list[list[str]]:
    """Names of the tensors that differ from one process, for each layout."""
    alone = [nn.Parameter(first(shape).to(device)) for shape in SHAPES]
    expected = train(alone, None, device)
    different = []
    for sizes in LAYOUTS[world_size]:
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))
        shared = [nn.Parameter(placed(first(shape).to(device), mesh)) for shape in SHAPES]
        found = train(shared, mesh, device)
        assert found.keys() == expected.keys()
        furthest = {name: (found[name] - expected[name]).abs().max() for name in found}
        # A GPU may add up products in another order for another number of experts.
        most = 0 if device == "cpu" else 2e-3
        different.append([name for name in furthest if not furthest[name] <= most])
    return different


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_compute_what_one_process_does(ranks):
    assert run_distributed(on_ranks, ranks) == [[[], []]] * ranks


@pytest.mark.multigpu
def test_gpus_compute_what_one_does():
    assert run_distributed(on_ranks, 2, "nccl", arguments=("cuda",)) == [[[], []]] * 2


def test_rows_are_those_of_chunks():
    for rows in (1, 5, 8):
        shared = [Rows((rows, 2), 4, rank).own for rank in range(4)]
        chunks = torch.arange(rows).chunk(4)
        expected = [chunk.tolist() for chunk in chunks] + [[]] * (4 - len(chunks))
        assert list(map(list, shared)) == expected
