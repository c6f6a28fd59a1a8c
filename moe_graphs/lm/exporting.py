"""The command ``moe-graphs export``."""

from __future__ import annotations

import contextlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_graphs.checkpoints.flushing import rename_whole
from moe_graphs.lm.checkpoint import read_model
from moe_graphs.lm.run_directory import find_checkpoint
from moe_graphs.terminal import errors_in_a_line, make_console


def export_model(run: Path, out: Path) -> None:
    """Runs the command with the options of the command line, under their names there."""
    with errors_in_a_line():
        if out.exists():
            raise ValueError(f"out: {out} exists: give another --out")
        try:
            path = find_checkpoint(run)
        except ValueError as error:  # which names train's option
            raise ValueError(f"RUN: {str(error).removeprefix('resume: ')}") from error
        tensors = read_model(path)
        _write(tensors, out)
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        make_console(stderr=False).print(
            f"{out}: {len(tensors)} tensors, {size:.1f} MB, of {path}", markup=False
        )


def _write(tensors: dict[str, Tensor], out: Path) -> None:
    """Writes a file, complete or not at all.

    Raises:
        OSError: if it could not be written.
    """
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()  # its error has a name, that of safetensors has none
        save_file(tensors, partial, metadata={"format": "pt"})
        rename_whole(partial, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or f"is the disk full? {error}"
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(f"out: {out} could not be written: {reason}: give another --out") from error
