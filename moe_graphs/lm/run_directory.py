"""The directory of a run: its log, its checkpoints by name, and the settings in each of them.

A checkpoint is written to ``checkpoints/partial`` and renamed when it is whole. A kill at any
moment leaves the last whole checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from moe_graphs.checkpoints.flushing import rename_whole
from moe_graphs.lm.trainer import Trainer

LOG = "log.jsonl"
SETTINGS = "settings.json"
MANIFEST = "manifest.json"
METADATA = ".metadata"  # torch.distributed.checkpoint's
RUN = "run"  # the key in the settings that says which run wrote them
OPTIONS = "options"  # the key for the options of the command, which --resume keeps
AUDITS = "audits"  # the key for what the audits of the run's graphs have found so far
_NAME = re.compile(r"step_(\d+)")
_EARLIER = "training.pt"  # versions before 2026-11-25 wrote it, for runs of one process
_PARTIAL, _DELETED = "partial", "deleted"
T = TypeVar("T")


def prepare_run_directory(out: Path, resumed: Path | None) -> None:
    """Makes ``out`` for a new run, or for one that goes on from the checkpoint ``resumed``.

    Raises:
        ValueError: if the directory cannot be made, or if another run is there. Later checkpoints
            of the same run count as another run, because nobody could tell them from those to come.
    """
    checkpoints, log = _checkpoints(out), out / LOG
    before = None if resumed is None else resumed.resolve()
    if before is not None and before.parent != (out / "checkpoints").resolve():
        before = None
    if before is not None and checkpoints and _step(checkpoints[-1]) > _step(before):
        raise ValueError(
            f"out: {out} holds {checkpoints[-1].name}, later than the {before.name} to go on "
            f"from: give another --out, or resume from the latest"
        )
    traces = [*([log] if log.exists() and log.stat().st_size else []), *checkpoints]
    if traces and before is None:
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


def make_partial(run_directory: Path, run_id: str) -> Path:
    """Makes an empty directory for a checkpoint that is being written.

    Raises:
        ValueError: if checkpoints of another run are there. Nothing is written or deleted then.
    """
    for other in _checkpoints(run_directory):
        if _run_id(other) not in (run_id, None):
            raise ValueError(f"checkpoint: {other} is of another run: save in another directory")
    partial = run_directory / "checkpoints" / _PARTIAL
    for left in (partial, partial.with_name(_DELETED)):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, run_id: str, step: int, keep: int) -> Path:
    """Gives ``partial``, which is complete, the name of its step; deletes all but the last few."""
    path = partial.with_name(name_of(step))
    if path.exists():
        _delete(path)
    rename_whole(partial, path)
    own = [c for c in _checkpoints(partial.parents[1]) if _run_id(c) == run_id]
    for old in [c for c in own if _step(c) <= step][:-keep]:
        _delete(old)
    return path


def _delete(checkpoint: Path) -> None:
    """Deletes a checkpoint, under a name that no checkpoint has: a kill may leave a part of it."""
    doomed = checkpoint.with_name(_DELETED)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def not_written(run_directory: Path, step: int, error: BaseException) -> OSError:
    reason = getattr(error, "strerror", None) or f"is the disk full? {error}"
    path = run_directory / "checkpoints" / name_of(step)
    return OSError(f"checkpoint: {path} could not be written: {reason}")


def find_checkpoint(path: Path) -> Path:
    """``path`` itself if it is a checkpoint, or the latest one of the run directory ``path``.

    Raises:
        ValueError: if there is none, or those of several runs, or if an earlier version wrote it.
    """
    if any((path / part).exists() for part in (SETTINGS, MANIFEST, METADATA, _EARLIER)):
        return _of_this_format(path)
    found = _checkpoints(path)
    if not found:
        raise ValueError(
            f"resume: no checkpoint at {path}: give a run's directory or one of its "
            f"checkpoints/step_N directories"
        )
    if len({_run_id(each) for each in found} - {None}) > 1:
        names = ", ".join(each.name for each in found)
        raise ValueError(f"resume: {path} holds checkpoints of several runs: give one of {names}")
    return _of_this_format(found[-1])


def _of_this_format(checkpoint: Path) -> Path:
    if (checkpoint / _EARLIER).exists():
        raise ValueError(
            f"resume: {checkpoint} has the format that versions before 2026-11-25 wrote for one "
            f"process ({_EARLIER}), which this version does not read: go on with it in the version "
            f"that wrote it, or train anew; its weights are in model.safetensors"
        )
    return checkpoint


def check_step(path: Path, step: int, trainer: Trainer) -> None:
    if step > trainer.settings.steps:
        raise ValueError(
            f"resume: {path} is at step {step}, beyond the {trainer.settings.steps} steps asked "
            f"for: raise --steps"
        )


def _checkpoints(run_directory: Path) -> list[Path]:
    """Checkpoints in the order of their steps; only ``publish`` gives such names."""
    folders = (run_directory / "checkpoints").glob("step_*")
    return sorted((f for f in folders if _NAME.fullmatch(f.name) and f.is_dir()), key=_step)


def _step(checkpoint: Path) -> int:
    """The step in the checkpoint's name; -1 for one that was renamed."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def _run_id(checkpoint: Path) -> str | None:
    """Identity of the run that wrote a checkpoint; None if it cannot be read."""
    try:
        return load_settings(checkpoint / SETTINGS).get(RUN)
    except (OSError, ValueError):
        return None


def read_part(part: Path, reader: Callable[[Path], T]) -> T:
    """Reads a file; any error of the reader becomes a ``ValueError`` with what to do."""
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


def load_settings(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


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
    if audits := trainer.audits():
        found[AUDITS] = audits
    stack: list[tuple[str, Mapping[str, Any]]] = [
        ("", {**dataclasses.asdict(trainer.settings), **trainer.surroundings})
    ]
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
    names = [name for name in both if name not in (RUN, OPTIONS, AUDITS)]
    unknown = "nothing known"
    return [
        f"{name}: {saved.get(name, unknown)} in the checkpoint, {now.get(name, unknown)} now"
        for name in names
        if saved.get(name, unknown) != now.get(name, unknown)
    ]
