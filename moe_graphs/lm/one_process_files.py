"""A checkpoint of one process as ranks read it.

Tensors have the names of sharded checkpoints, and they stay in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from moe_graphs.layers import LanguageModel
from moe_graphs.lm.checkpoint import (
    check_same_model,
    check_step,
    described,
    model_tensors,
    read_whole,
)
from moe_graphs.lm.settings import parameter_groups
from moe_graphs.lm.sharded_state import HISTORY, MODEL, OPTIMIZER
from moe_graphs.lm.trainer import Trainer


class SavedByName(NamedTuple):
    """A checkpoint's tensors by name, its step and its settings.

    The names are the keys of ``model_state``, ``optimizer_state`` and ``history_state``. The
    tensors lie in the files, so a rank reads only the parts that it copies.
    """

    tensors: dict[str, Tensor]
    step: int
    settings: dict[str, Any]


def read_by_name(path: Path, trainer: Trainer) -> SavedByName:
    """Reads all of ``path``.

    Raises:
        ValueError: if a file is missing or not to be read, or if the checkpoint is of another
            model, of an optimizer with other groups, or beyond this run's last step.
    """
    tensors, state, settings = read_whole(path, mapped=True)
    check_step(path, state["step"], trainer)
    dtype = next(trainer.model.parameters()).dtype
    whole = LanguageModel(trainer.model.config, device="meta", dtype=dtype)
    check_same_model(path, described(tensors), described(model_tensors(whole)))
    found = {f"{MODEL}.{name}": value for name, value in tensors.items()}
    groups = parameter_groups(whole, trainer.settings)
    saved = state["optimizer"]
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved["param_groups"]]:
        raise ValueError(
            f"resume: {path} has another optimizer's groups of parameters: resume with the model "
            f"and the --optimizer it was trained with"
        )
    names = {parameter: name for name, parameter in whole.named_parameters()}
    ordered = (names[parameter] for group in groups for parameter in group["params"])
    for number, name in enumerate(ordered):
        for kind, value in saved["state"].get(number, {}).items():
            found[f"{OPTIMIZER}.{name}.{kind}"] = value
    found |= {f"{HISTORY}.{name}": value for name, value in state["history"].items()}
    return SavedByName(found, state["step"], settings)


def check_shapes(path: Path, wanted: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Checks the shapes of all tensors, before any of them is loaded.

    Raises:
        ValueError: if a tensor has another shape; the message names the first one.
    """
    for key, value in wanted.items():
        if saved[key].shape != value.shape:
            raise ValueError(
                f"resume: {path} has {key!r} of shape {list(saved[key].shape)}, this run of "
                f"{list(value.shape)}: take another checkpoint"
            )
