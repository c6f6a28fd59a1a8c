"""The command ``moe-graphs export``."""

from __future__ import annotations

import contextlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_graphs.checkpoints.flushing import rename_whole
from moe_graphs.config import check_option
from moe_graphs.lm.byte_tokenizer import write_byte_tokenizer
from moe_graphs.lm.checkpoint import model_of, read_model
from moe_graphs.lm.continued import MODEL_DIRECTORY
from moe_graphs.lm.run_directory import (
    OPTIONS,
    SETTINGS,
    find_checkpoint,
    load_settings,
    read_part,
)
from moe_graphs.registry import PRESETS
from moe_graphs.terminal import errors_in_a_line, make_console

FORMATS = ("safetensors", "transformers")


def export_model(run: Path, out: Path, format: str = "safetensors") -> None:
    """Runs the command with the options of the command line, under their names there."""
    with errors_in_a_line():
        check_option("format", format, FORMATS)
        if out.exists():
            raise ValueError(f"out: {out} exists: give another --out")
        try:
            path = find_checkpoint(run)
        except ValueError as error:  # which names train's option
            raise ValueError(f"RUN: {str(error).removeprefix('resume: ')}") from error
        if format == "transformers":
            _write_directory(path, out)
            make_console(stderr=False).print(f"{out}: for transformers, of {path}", markup=False)
            return
        tensors = read_model(path)
        _write(tensors, out)
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        make_console(stderr=False).print(
            f"{out}: {len(tensors)} tensors, {size:.1f} MB, of {path}", markup=False
        )


def _write_directory(checkpoint: Path, out: Path) -> None:
    """Writes ``config.json``, the weights and the tokenizer of bytes.

    Raises:
        ValueError: if the run went on from a checkpoint, its preset is not the one that it was
            trained with, or transformers has no such model.
    """
    options = read_part(checkpoint / SETTINGS, load_settings)[OPTIONS]
    if options.get("init") is not None:
        raise ValueError(
            f"RUN: it went on from {options['init']}, and its directory has {MODEL_DIRECTORY}/, "
            f"which is what transformers loads"
        )
    name = options["preset"]
    try:
        model = model_of(checkpoint, PRESETS[name]().model, None)
    except RuntimeError as error:
        raise ValueError(f"RUN: its weights are not those of preset {name!r}: {error}") from error
    model.save_pretrained(out)
    write_byte_tokenizer(out)


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
