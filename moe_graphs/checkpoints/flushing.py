"""Flushes that bring files to the disk before their names say that they are whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's contents, or a directory's list of names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.is_dir():
            with contextlib.suppress(OSError):  # some file systems have no fsync of directories
                os.fsync(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_whole(partial: Path, path: Path) -> None:
    """Rename a file, or a directory of files, once its contents are on the disk.

    A power failure then leaves either no ``path`` or a whole one.
    """
    if partial.is_dir():
        for file in partial.iterdir():
            flush(file)
    flush(partial)
    partial.rename(path)
    flush(path.parent)
