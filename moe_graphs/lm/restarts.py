"""Directories of runs, and the checkpoint from which restarted workers of torchrun go on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moe_graphs.lm.run_directory import LOG, find_checkpoint

_LAUNCH = "launch.txt"


def directories(
    out: Path | None, resume: Path | None, name: str, agents: Sequence[str]
) -> tuple[Path, Path | None]:
    """The run's directory, and the checkpoint that it goes on from, or None.

    Workers that torchrun has started again go on from the latest checkpoint that they have written.

    Args:
        agents: ``agent()`` of all ranks.

    Raises:
        ValueError: if there is no such checkpoint, or if torchrun may start the workers again and
            they would not find their checkpoints.
    """
    found = find_checkpoint(resume) if resume else None
    restarts = _allowed_restarts()
    if out is None:
        if restarts:
            raise ValueError(
                f"out: torchrun may start the workers anew (--max-restarts {restarts}), and they "
                f"have to find their checkpoints: give --out"
            )
        return _free_directory(Path("runs"), name), found
    if _is_restarted(out, agents):
        if any((out / "checkpoints").glob("step_*")):
            return out, find_checkpoint(out)
        (out / LOG).unlink(missing_ok=True)  # of steps that are done again
    return out, found


def mark_launch(out: Path, agents: Sequence[str]) -> None:
    """Notes who writes to ``out``, for workers that are started again."""
    if _allowed_restarts():
        (out / _LAUNCH).write_text("\n".join(sorted(set(agents))) + "\n")


def _is_restarted(out: Path, agents: Sequence[str]) -> bool:
    """Whether an agent that has started workers before has started these.

    torchrun's count of restarts does not say so. If a run was refused, ``out`` is still another
    run's at the second start. And the count does not include restarts after a host has come or
    gone.
    """
    mark = out / _LAUNCH
    return mark.exists() and not set(agents).isdisjoint(mark.read_text().split("\n"))


def _allowed_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def _free_directory(parent: Path, name: str) -> Path:
    """The directory ``parent/name``, or ``name-2`` and so on: a run never writes over another."""
    candidates = (name if n == 1 else f"{name}-{n}" for n in range(1, 10_000))
    return next(parent / c for c in candidates if not (parent / c).exists())
