"""The state from which a run goes on, as tensors by name, in the run's own memory.

The names are those on one GPU, whatever the layout. A sharded tensor is a DTensor with the shape
that it has on one GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from moe_graphs.lm.checkpoint import model_tensors
from moe_graphs.lm.settings import make_optimizer_state
from moe_graphs.lm.trainer import Trainer
from moe_graphs.optim.update_options import STATES, code_names
from moe_graphs.parallel import fused_rows, global_fqn

MODEL, OPTIMIZER, HISTORY, RNG = "model", "optimizer", "history", "rng"


def model_state(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    tensors = model_tensors(trainer.model)
    return {f"{MODEL}.{global_fqn(name)}": value for name, value in tensors.items()}


def optimizer_state(trainer: Trainer) -> dict[str, Tensor]:
    """Optimizer states by the names of parameters; missing states are made, of zeros."""
    make_optimizer_state(trainer.optimizer)
    return {
        f"{OPTIMIZER}.{global_fqn(name)}.{kind}": value
        for name, parameter in trainer.model.named_parameters()
        for kind, value in trainer.optimizer.state.get(parameter, {}).items()
    }


def without_new_averages(
    trainer: Trainer, state: dict[str, Tensor], saved: Collection[str]
) -> dict[str, Tensor]:
    """``state`` without the averages that were not saved.

    They are forgotten, and new averages begin with the parameters of the next step.
    """
    new = {key for key in state.keys() - set(saved) if key.startswith(OPTIMIZER)}
    new = {key for key in new if key.endswith(".ema")}
    if new:
        for values in trainer.optimizer.state.values():
            values.pop("ema", None)
    return {key: value for key, value in state.items() if key not in new}


def history_state(trainer: Trainer, steps: int) -> dict[str, Tensor]:
    names = [field.name for field in dataclasses.fields(trainer.history)]
    return {f"{HISTORY}.{name}": getattr(trainer.history, name)[:steps] for name in names}


def random_state(trainer: Trainer) -> dict[str, Tensor]:
    """Random states of this rank: copies, uint8 on the CPU."""
    rank = 0 if trainer.workers is None else trainer.workers.rank
    state = {f"{RNG}.{rank}.cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        state[f"{RNG}.{rank}.cuda"] = torch.cuda.get_rng_state(trainer.device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets random states that ``random_state`` has returned."""
    for key, value in state.items():
        if key.endswith(".cpu"):
            torch.set_rng_state(value)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(value, device)


def fused_parts(trainer: Trainer) -> dict[str, tuple[int, ...]]:
    """Parts of tensors whose rows tensor-parallel ranks have in another order.

    The keys are those of ``model_state`` and ``optimizer_state``.
    """
    found = {}
    for name, parts in fused_rows(trainer.model).items():
        kinds = ("ema", *STATES, *(each for state in STATES for each in code_names(state)))
        states = (f"{OPTIMIZER}.{name}.{kind}" for kind in kinds)
        found.update(dict.fromkeys((f"{MODEL}.{name}", *states), parts))
    return found
