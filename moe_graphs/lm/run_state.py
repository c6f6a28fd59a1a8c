"""The state from which a run goes on, as tensors by name, in the run's own memory.

The names are those on one GPU, whatever the layout. A sharded tensor is a DTensor with the shape
that it has on one GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.integrations.transformer_engine import fp8_state, load_fp8_state
from moe_graphs.lm.optimizers import make_optimizer_state
from moe_graphs.lm.trainer import Trainer
from moe_graphs.optim import AdamW, UpdateOptions
from moe_graphs.optim.update_options import STATES, code_names
from moe_graphs.parallel.tensor_parallel import fused_rows, global_fqn

MODEL, OPTIMIZER, HISTORY, RNG, FP8 = "model", "optimizer", "history", "rng", "fp8"


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the model, without those that Transformer Engine pickles: ``fp8_memory``."""
    found = model.state_dict().items()
    return {name: value.detach() for name, value in found if not name.endswith("._extra_state")}


def described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Descriptions of tensors, which tell one model from another."""
    return {name: f"{list(value.shape)} {value.dtype}" for name, value in tensors.items()}


def model_state(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    tensors = model_tensors(trainer.model)
    return {f"{MODEL}.{global_fqn(name)}": value for name, value in tensors.items()}


def optimizer_state(
    trainer: Trainer, as_saved: Mapping[nn.Parameter, dict[str, Tensor]] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Optimizer states by the names of parameters; missing states are made, of zeros.

    Args:
        as_saved: what ``states_as_saved`` has returned, which takes the place of the run's states.
    """
    make_optimizer_state(trainer.optimizer, trainer.settings)
    found: dict[str, Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        values = trainer.optimizer.state.get(parameter, {})
        if parameter in as_saved:
            others = {kind: values[kind] for kind in values.keys() & {"step", "ema"}}
            values = {**others, **as_saved[parameter]}
        key = f"{OPTIMIZER}.{global_fqn(name)}"
        found |= {f"{key}.{kind}": value for kind, value in values.items()}
    return found


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


def states_as_saved(
    trainer: Trainer, saved: Collection[str]
) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Memory for states that the checkpoint has as codes and this run as averages, or vice versa.

    ``take_states`` turns them into this run's form.
    """
    make_optimizer_state(trainer.optimizer, trainer.settings)
    found, (code, _) = {}, code_names(STATES[0])
    for name, parameter in trainer.model.named_parameters():
        key, own = f"{OPTIMIZER}.{global_fqn(name)}", trainer.optimizer.state.get(parameter, {})
        coded = f"{key}.{code}" in saved
        if f"{key}.step" in saved and coded != (code in own):
            values: dict[str, Tensor] = {}
            UpdateOptions(torch.uint8 if coded else torch.float32).complete(values, parameter)
            del values["step"]
            found[parameter] = values
    return found


@torch.no_grad()
def take_states(trainer: Trainer, as_saved: Mapping[nn.Parameter, dict[str, Tensor]]) -> None:
    """Fills the states of our AdamW, at their addresses, with what ``states_as_saved`` has read."""
    for parameter, values in as_saved.items():
        assert isinstance(trainer.optimizer, AdamW)
        own: dict[str, Tensor] = {}
        trainer.optimizer.options.take(own, values, parameter)
        for kind, value in own.items():
            trainer.optimizer.state[parameter][kind].copy_(value)


def fp8_memory(trainer: Trainer) -> dict[str, Tensor]:
    """The memory of Transformer Engine's modules, by the names of ``fp8_state``."""
    return {
        f"{FP8}.{module}.{name}": torch.as_tensor(value)
        for module, values in fp8_state(trainer.model).items()
        for name, value in values.items()
    }


def set_fp8_memory(trainer: Trainer, memory: Mapping[str, Tensor]) -> None:
    """Puts back what ``fp8_memory`` returned."""
    found: dict[str, dict[str, Any]] = {}
    for key in (key for key in memory if key.endswith(".num_gemms")):
        start = key.removesuffix("num_gemms")
        values = {k.removeprefix(start): v for k, v in memory.items() if k.startswith(start)}
        module = start[len(FP8) + 1 : -1]
        found[module] = {**values, "num_gemms": int(values["num_gemms"])}
    load_fp8_state(trainer.model, found, trainer.fp8_autocast)


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
