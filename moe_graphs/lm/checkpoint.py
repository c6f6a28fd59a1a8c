"""Checkpoints: a directory with the model as safetensors and everything else a step depends on.

A resumed run is, bit by bit, the run that was not interrupted. Graphs leave no trace in a
checkpoint: its keys are the same with and without graphs, and a run of either kind resumes from the
other's checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from moe_graphs.checkpoints.flushing import rename_whole
from moe_graphs.integrations.transformer_engine import fp8_state, load_fp8_state
from moe_graphs.lm.trainer import Trainer
from moe_graphs.optim import AdamW
from moe_graphs.training.capturable import load_optimizer_state

MODEL, STATE, SETTINGS = PARTS = "model.safetensors", "training.pt", "settings.json"
LOG = "log.jsonl"
MANIFEST = "manifest.json"  # of a sharded checkpoint, which has its settings beside it
RUN = "run"  # the key in the settings that says which run wrote them
OPTIONS = "options"  # the key for the options of the command, which --resume keeps
_NAME = re.compile(r"step_(\d+)")


def prepare_run_directory(out: Path, resumed: Path | None) -> None:
    """Makes ``out`` for a new run, or for one that goes on from the checkpoint ``resumed``.

    Raises:
        ValueError: if the directory cannot be made, or if another run is there. Later checkpoints
            of the same run count as another run, because nobody could tell them from those to come.
    """
    checkpoints, log = _checkpoints(out), out / LOG
    resumed = resumed and resumed.resolve()
    own = resumed is not None and resumed.parent == (out / "checkpoints").resolve()
    if own and checkpoints and _step(checkpoints[-1]) > _step(resumed):
        raise ValueError(
            f"out: {out} holds {checkpoints[-1].name}, later than the {resumed.name} to go on "
            f"from: give another --out, or resume from the latest"
        )
    traces = [*([log] if log.exists() and log.stat().st_size else []), *checkpoints]
    if traces and not own:
        raise ValueError(
            f"out: {out} holds another run ({traces[-1].relative_to(out)}): give another --out, or "
            f"go on with that run by --resume {out} --out {out}"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: {out} cannot be made a directory: {error.strerror}") from error


@contextlib.contextmanager
def open_log(out: Path) -> Iterator[TextIO]:
    """Opens the run's log to append to it.

    The file is locked, because two runs may have found ``out`` empty.

    Raises:
        ValueError: if another run has it open.
    """
    with (out / LOG).open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"out: another run writes to {out} at this moment: give another --out"
            ) from error
        except OSError:
            pass  # a file system without locks: then checkpoints are refused by their run's id
        yield log


def save_checkpoint(run_directory: Path, trainer: Trainer, *, keep: int = 2) -> Path:
    """Writes ``run_directory/checkpoints/step_N``, complete or not at all; keeps the last few.

    Waits for the device.

    Raises:
        ValueError: if checkpoints of another run are there. Nothing is written or deleted then.
        OSError: if it could not be written.
    """
    partial = make_partial(run_directory, trainer.run_id)
    try:
        save_file(model_tensors(trainer.model), partial / MODEL)
        torch.save(_training_state(trainer), partial / STATE)
        (partial / SETTINGS).write_text(json.dumps(settings_of(trainer), indent=1) + "\n")
    except (OSError, RuntimeError, SafetensorError) as error:  # of both libraries: a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise not_written(run_directory, trainer.step, error) from error
    return publish(partial, trainer.run_id, trainer.step, keep)


def make_partial(run_directory: Path, run_id: str) -> Path:
    """Makes an empty directory for a checkpoint that is being written.

    Raises:
        ValueError: if checkpoints of another run are there. Nothing is written or deleted then.
    """
    for other in _checkpoints(run_directory):
        if _run_id(other) not in (run_id, None):
            raise ValueError(f"checkpoint: {other} is of another run: save in another directory")
    partial = run_directory / "checkpoints" / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, run_id: str, step: int, keep: int) -> Path:
    """Gives ``partial``, which is complete, the name of its step; deletes all but the last few."""
    path = partial.with_name(name_of(step))
    shutil.rmtree(path, ignore_errors=True)
    rename_whole(partial, path)
    own = [c for c in _checkpoints(partial.parents[1]) if _run_id(c) == run_id]
    for old in [c for c in own if _step(c) <= step][:-keep]:
        shutil.rmtree(old)
    return path


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def not_written(run_directory: Path, step: int, error: BaseException) -> OSError:
    reason = getattr(error, "strerror", None) or f"is the disk full? {error}"
    path = run_directory / "checkpoints" / name_of(step)
    return OSError(f"checkpoint: {path} could not be written: {reason}")


def find_checkpoint(path: Path) -> Path:
    """``path`` itself if it is a checkpoint, or the latest one of the run directory ``path``.

    Raises:
        ValueError: if there is none, or those of several runs.
    """
    if any((path / part).exists() for part in (*PARTS, MANIFEST)):
        return path
    found = _checkpoints(path)
    if not found:
        raise ValueError(
            f"resume: no checkpoint at {path}: give a run's directory or one of its "
            f"checkpoints/step_N directories"
        )
    if len({_run_id(each) for each in found} - {None}) > 1:
        names = ", ".join(each.name for each in found)
        raise ValueError(f"resume: {path} holds checkpoints of several runs: give one of {names}")
    return found[-1]


def load_checkpoint(path: Path, trainer: Trainer) -> list[str]:
    """Puts the trainer where it was when ``path`` was saved. Parameters keep their addresses.

    Returns:
        One line per setting that differs from the checkpoint's, also for the text and the
        dispatcher. Such a run is allowed, but it is not the same run.

    Raises:
        ValueError: if the checkpoint is of another model, beyond this run's last step, or not to be
            read. The trainer is as it was then.
    """
    tensors, state, saved = read_whole(path)
    check_same_model(path, described(tensors), described(model_tensors(trainer.model)))
    check_step(path, state["step"], trainer)
    of_8_bits = any("exp_avg_code" in values for values in state["optimizer"]["state"].values())
    if of_8_bits and not isinstance(trainer.optimizer, AdamW):
        raise ValueError(
            f"optimizer: {trainer.settings.optimizer} cannot read the states of 8 bits in {path}: "
            f"use adamw, which reads them into any --optimizer-state"
        )
    load_optimizer_state(trainer.optimizer, state["optimizer"])
    trainer.model.load_state_dict(tensors)
    load_fp8_state(trainer.model, state.get("fp8", {}), trainer.fp8_autocast)
    trainer.step = trainer.first_unlogged_step = state["step"]
    trainer.run_id = saved.get(RUN, "")
    for name, values in state["history"].items():
        getattr(trainer.history, name)[: len(values)] = values.to(trainer.device)
    torch.set_rng_state(state["rng"]["cpu"])
    if trainer.device.type == "cuda" and "cuda" in state["rng"]:
        torch.cuda.set_rng_state(state["rng"]["cuda"], trainer.device)
    return differences_of(saved, settings_of(trainer))


class WholeCheckpoint(NamedTuple):
    """Contents of the three files of a checkpoint."""

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    settings: dict[str, Any]


def read_whole(path: Path, *, mapped: bool = False) -> WholeCheckpoint:
    """Reads a checkpoint of one process, on the CPU.

    With ``mapped`` the tensors lie in the files, and only the parts that are used are read. Nothing
    may keep them.

    Raises:
        ValueError: if a file is missing or not to be read.
    """
    return WholeCheckpoint(
        read_part(path / MODEL, load_file),
        read_part(path / STATE, functools.partial(load_state, mapped=mapped)),
        read_part(path / SETTINGS, load_settings),
    )


def check_step(path: Path, step: int, trainer: Trainer) -> None:
    if step > trainer.settings.steps:
        raise ValueError(
            f"resume: {path} is at step {step}, beyond the {trainer.settings.steps} steps asked "
            f"for: raise --steps"
        )


def _checkpoints(run_directory: Path) -> list[Path]:
    """Checkpoints in the order of their steps; only ``save_checkpoint`` writes such names."""
    folders = (run_directory / "checkpoints").glob("step_*")
    return sorted((f for f in folders if _NAME.fullmatch(f.name) and f.is_dir()), key=_step)


def _step(checkpoint: Path) -> int:
    """The step in the checkpoint's name; -1 for one that was renamed."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def _run_id(checkpoint: Path) -> str | None:
    """Identity of the run that wrote a checkpoint.

    None if it cannot be read, "" if the checkpoint is older than these identities.
    """
    try:
        return load_settings(checkpoint / SETTINGS).get(RUN, "")
    except (OSError, ValueError):
        return None


def read_part(part: Path, reader: Callable[[Path], Any]) -> Any:
    """Reads a file; any error of the reader becomes a ``ValueError`` with what to do.

    Both libraries have many errors for a file that is not whole.
    """
    try:
        return reader(part)
    except FileNotFoundError as error:
        raise ValueError(f"resume: {part} is missing: take another checkpoint") from error
    except Exception as error:
        reason, *_ = str(error).splitlines() or [""]
        raise ValueError(
            f"resume: {part} cannot be read, it may be truncated: take another checkpoint "
            f"({type(error).__name__}: {reason})"
        ) from error


def load_state(path: Path, *, mapped: bool) -> dict[str, Any]:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    missing = {"step", "optimizer", "rng", "history"} - state.keys()
    if missing:
        raise ValueError(f"no {', '.join(sorted(missing))} in it")
    return state


def load_settings(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of the model, without those that Transformer Engine pickles.

    The training state has the latter, as tensors.
    """
    return {
        name: value.detach().contiguous()
        for name, value in model.state_dict().items()
        if not name.endswith("._extra_state")
    }


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
        "fp8": fp8_state(trainer.model),
    }


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Descriptions of tensors, which ``check_same_model`` compares."""
    return {name: f"{list(value.shape)} {value.dtype}" for name, value in tensors.items()}


def check_same_model(path: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    names = sorted(saved.keys() | wanted.keys())
    wrong = [name for name in names if saved.get(name) != wanted.get(name)]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"resume: {path} holds another model: {len(wrong)} of {len(names)} tensors differ, "
            f"first {name!r}: saved {saved.get(name)}, this model {wanted.get(name)}: resume with "
            f"the preset and the sizes it was trained with"
        )


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """The settings as the file has them. Nested settings have names with dots."""
    found: dict[str, Any] = {RUN: trainer.run_id}
    if trainer.options:
        found[OPTIONS] = dict(trainer.options)
    stack = [("", {**dataclasses.asdict(trainer.settings), **trainer.surroundings})]
    while stack:
        prefix, values = stack.pop()
        for name, value in values.items():
            if isinstance(value, Mapping):
                stack.append((f"{prefix}{name}.", value))
            else:
                found[prefix + name] = value
    return json.loads(json.dumps(found))


def differences_of(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    both = (*now, *(saved.keys() - now.keys()))
    names = [name for name in both if name not in (RUN, OPTIONS)]
    unknown = "nothing known"
    return [
        f"{name}: {saved.get(name, unknown)} in the checkpoint, {now.get(name, unknown)} now"
        for name in names
        if saved.get(name, unknown) != now.get(name, unknown)
    ]
