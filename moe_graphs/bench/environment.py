"""Stamp of every line of results: the machine and the versions that a benchmark ran with."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

UNKNOWN = "unknown"
ROOT = Path(__file__).resolve().parents[2]


def stamp(commit: str | None = None) -> dict[str, Any]:
    """GPU, driver, versions, commit and date, as JSON values; ``"unknown"`` if not available.

    Args:
        commit: written instead of the commit in ``.git``. A machine that got a copy of the tree has
            no ``.git``, or one of another commit.
    """
    return {
        "gpu": _gpu_name(),
        "gpu_memory_bytes": _gpu_memory(),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": _triton(),
        "cuda": torch.version.cuda or UNKNOWN,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count() or UNKNOWN,
        "commit": _commit(commit),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe(environment: dict[str, Any]) -> str:
    """Write a stamp in one line."""
    versions = ", ".join(f"{key} {environment[key]}" for key in ("torch", "triton", "cuda"))
    commit, *changes = environment["commit"].partition("+")
    return (
        f"{environment['gpu']}, driver {environment['driver']}, {versions}, Python "
        f"{environment['python']}, commit {commit[:12]}{''.join(changes)}, {environment['date']}"
    )


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _gpu_memory() -> int:
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _driver() -> str:
    if not torch.cuda.is_available():
        return "none"
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0].strip() if lines else UNKNOWN


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


def _commit(given: str | None) -> str:
    """Commit of the tree, with ``+changes`` if tracked files differ from it."""
    if given:
        return given
    top = _output("git", "-C", str(ROOT), "rev-parse", "--show-toplevel")
    if not top or Path(top) != ROOT:  # a copy of the tree may lie in another repository
        return UNKNOWN
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _output(*command: str) -> str:
    """Output of a command; empty if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints the environment stamp as JSON.")
    parser.add_argument("--commit", help="where there is no .git")
    print(json.dumps(stamp(parser.parse_args().commit), indent=2))
