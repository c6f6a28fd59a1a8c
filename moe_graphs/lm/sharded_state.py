"""All that a run goes on from, as tensors by name: each rank's share, seen as part of the whole.

The names are those on one GPU, whatever the layout. Shapes: E experts, e experts of this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moe_graphs.layers import MoELayer
from moe_graphs.lm.checkpoint import model_tensors
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers

MODEL, OPTIMIZER, HISTORY, RNG = "model", "optimizer", "history", "rng"


class GlobalView:
    """Makes of this rank's share of a tensor, by its name, a DTensor of the shape that it has on
    one GPU, on the same memory. What is whole, or sharded by FSDP2 alone, stays as it is."""

    def __init__(self, trainer: Trainer) -> None:
        self._whole = _whole_views(trainer)
        self._trainer = trainer

    def model(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        tensors = model_tensors(self._trainer.model)
        return {f"{MODEL}.{name}": self._whole(name, value) for name, value in tensors.items()}

    def optimizer(self) -> dict[str, Tensor]:
        """By the names of parameters. States that no step has made yet are made, of zeros."""
        trainer, state = self._trainer, {}
        make_optimizer_state(trainer.optimizer)
        for name, parameter in trainer.model.named_parameters():
            for kind, value in trainer.optimizer.state.get(parameter, {}).items():
                seen = self._whole(name, value) if value.ndim else value
                state[f"{OPTIMIZER}.{name}.{kind}"] = seen
        return state

    def history(self, steps: int) -> dict[str, Tensor]:
        history = self._trainer.history
        names = [field.name for field in dataclasses.fields(history)]
        return {f"{HISTORY}.{name}": getattr(history, name)[:steps] for name in names}

    def random(self) -> dict[str, Tensor]:
        """Of this rank, copies."""
        workers = self._trainer.workers
        rank = 0 if workers is None else workers.rank
        state = random_state(self._trainer.device)
        return {f"{RNG}.{rank}.{kind}": value for kind, value in state.items()}


def random_state(device: torch.device) -> dict[str, Tensor]:
    """uint8 each, on the CPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@torch.no_grad()
def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """AdamW's, of parameters that have none yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _whole_views(trainer: Trainer) -> Callable[[str, Tensor], Tensor]:
    """What makes a DTensor of all E experts from this rank's share of its e; others stay."""
    workers = trainer.workers
    if workers is None or workers.layout.ep == 1:
        return lambda name, value: value
    experts = {
        f"{prefix}.experts.": module.config.num_experts
        for prefix, module in trainer.model.named_modules()
        if isinstance(module, MoELayer)
    }
    meshes = _ExpertMeshes(workers)

    def whole(name: str, value: Tensor) -> Tensor:
        of = [number for prefix, number in experts.items() if name.startswith(prefix)]
        return meshes.whole(value, of[0]) if of else value

    return whole


class _ExpertMeshes:
    """Meshes with ``ep`` outside of what shards a rank's experts further.

    Experts are cut into blocks first, and each block by FSDP2: so the rows of a rank lie together,
    and DTensor's nested shards have to be in that order, which is not that of the run's mesh.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        layout, ranks = workers.layout, workers.mesh.mesh.flatten()
        blocks = ranks.view(layout.dp_replicate, layout.dp_shard // layout.ep, layout.ep)
        self._ranks = blocks.permute(2, 0, 1).contiguous()
        self._made: dict[int, DeviceMesh] = {}

    def whole(self, value: Tensor, experts: int) -> DTensor:
        """``value``: ``[e, ...]``, plain or sharded by FSDP2 over the ranks with the same block."""
        local: Tensor = value
        placements: list[Placement] = [Replicate()]
        if isinstance(value, DTensor):
            local, placements = value.to_local(), list(value.placements)
        mesh = self._mesh(len(placements))
        shape = torch.Size((experts, *value.shape[1:]))
        every: list[Placement] = [Shard(0), *placements]
        return DTensor.from_local(
            local, mesh, every, run_check=False, shape=shape, stride=_strides(shape)
        )

    def _mesh(self, dimensions: int) -> DeviceMesh:
        """With so many dimensions inside of ``ep``. No process groups: nothing is sent on it."""
        if dimensions not in self._made:
            ep = self._workers.layout.ep
            shape = {1: (ep, -1), 2: self._ranks.shape}[dimensions]
            self._made[dimensions] = DeviceMesh(
                self._workers.mesh.device_type, self._ranks.reshape(shape), _init_backend=False
            )
        return self._made[dimensions]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
