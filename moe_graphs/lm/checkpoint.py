"""Checkpoints: a directory with the model as safetensors and everything else a step depends on.

A run that is resumed is, bit by bit, the run that was not interrupted. Graphs leave no trace in
a checkpoint: its keys are the same with and without them, and either kind resumes the other.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_graphs.lm.settings import TrainSettings
from moe_graphs.lm.trainer import Trainer
from moe_graphs.training.capturable import load_optimizer_state

MODEL, STATE, SETTINGS = "model.safetensors", "training.pt", "settings.json"


def save_checkpoint(run_directory: Path, trainer: Trainer, *, keep: int = 2) -> Path:
    """Writes ``run_directory/checkpoints/step_N``, complete or not at all; keeps the last few.

    Waits for the device.
    """
    folder = run_directory / "checkpoints"
    path, partial = folder / f"step_{trainer.step:06d}", folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(_tensors(trainer.model), partial / MODEL)
    torch.save(_training_state(trainer), partial / STATE)
    settings = dataclasses.asdict(trainer.settings)
    (partial / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    for old in _checkpoints(run_directory)[:-keep]:
        shutil.rmtree(old)
    return path


def find_checkpoint(path: Path) -> Path:
    """``path`` itself if it is a checkpoint, or the latest one of the run directory ``path``.

    Raises:
        ValueError: if there is none.
    """
    if (path / MODEL).exists():
        return path
    found = _checkpoints(path)
    if not found:
        raise ValueError(
            f"resume: no checkpoint at {path}: give a run's directory or one of its "
            f"checkpoints/step_N directories"
        )
    return found[-1]


def load_checkpoint(path: Path, trainer: Trainer) -> list[str]:
    """Puts the trainer where it was when ``path`` was saved. Parameters keep their addresses.

    Returns:
        One line per setting that differs from the checkpoint's: allowed, but not the same run.

    Raises:
        ValueError: if the checkpoint is of another model, or beyond this run's last step.
    """
    tensors = load_file(path / MODEL)
    _check_same_model(path, tensors, trainer.model)
    state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    if state["step"] > trainer.settings.steps:
        raise ValueError(
            f"resume: {path} is at step {state['step']}, beyond the {trainer.settings.steps} "
            f"steps asked for: raise --steps"
        )
    trainer.model.load_state_dict(tensors)
    load_optimizer_state(trainer.optimizer, state["optimizer"])
    trainer.step = trainer.first_unlogged_step = state["step"]
    for name, values in state["history"].items():
        getattr(trainer.history, name)[: len(values)] = values.to(trainer.device)
    torch.set_rng_state(state["rng"]["cpu"])
    if trainer.device.type == "cuda" and "cuda" in state["rng"]:
        torch.cuda.set_rng_state(state["rng"]["cuda"], trainer.device)
    return _differences(path, trainer.settings)


def _checkpoints(run_directory: Path) -> list[Path]:
    found = (run_directory / "checkpoints").glob("step_*")
    return sorted(found, key=lambda path: int(re.sub(r"\D", "", path.name)))


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().contiguous() for name, value in model.state_dict().items()}


def _training_state(trainer: Trainer) -> dict:
    rng = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(trainer.device)
    history = {
        field.name: getattr(trainer.history, field.name)[: trainer.step].cpu()
        for field in dataclasses.fields(trainer.history)
    }
    return {
        "step": trainer.step,
        "optimizer": trainer.optimizer.state_dict(),
        "rng": rng,
        "history": history,
    }


def _check_same_model(path: Path, tensors: dict[str, torch.Tensor], model: nn.Module) -> None:
    saved = {name: tuple(value.shape) for name, value in tensors.items()}
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    names = sorted(saved.keys() | wanted.keys())
    wrong = [name for name in names if saved.get(name) != wanted.get(name)]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"resume: {path} holds another model: {len(wrong)} of {len(names)} tensors differ, "
            f"first {name!r}: saved {saved.get(name)}, this model {wanted.get(name)}: resume with "
            f"the preset and the sizes it was trained with"
        )


def _differences(path: Path, settings: TrainSettings) -> list[str]:
    saved = json.loads((path / SETTINGS).read_text())
    now = dataclasses.asdict(settings)
    return [
        f"{name}: {saved.get(name)} in the checkpoint, {now[name]} now"
        for name in now
        if saved.get(name) != now[name]
    ]
