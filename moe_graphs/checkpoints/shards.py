"""Headers of the safetensors files in a directory, read without the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; ``dtype`` is a name of safetensors: F32, BF16, F8_E4M3, ..."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(directory: Path) -> dict[str, Stored]:
    """Read names, shapes and dtypes of all tensors of the checkpoint, and no weights.

    Raises:
        ValueError: files are missing, truncated, or differ from the index; the message names them.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.exists() and index.exists():
        raise ValueError(
            f"{directory} holds both {SINGLE} and {INDEX}, which are two checkpoints: remove one"
        )
    if single.exists():
        return _headers_of(single)
    if not index.exists():
        raise ValueError(f"{directory} holds neither {SINGLE} nor {INDEX}: is it complete?")
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index} has no weight_map: download it again")
    found: dict[str, Stored] = {}
    for name in sorted(set(placed.values())):
        stored = _headers_of(directory / name)
        listed = {tensor for tensor, file in placed.items() if file == name}
        if missing := listed - stored.keys():
            raise ValueError(
                f"{directory / name} lacks {some(missing)}, which {INDEX} says it holds: was it "
                f"renamed, or is it of another checkpoint?"
            )
        if extra := stored.keys() - listed:
            raise ValueError(f"{directory / name} holds {some(extra)}, which {INDEX} does not list")
        found |= stored
    return found


def open_shard(file: Path) -> AbstractContextManager[Any]:
    """Open a file by ``safe_open``, with errors that name the file.

    Raises:
        ValueError: the file is missing or not whole.
    """
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing: download it again") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read, it may be truncated: download it again ({error})"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a file with one JSON object.

    Raises:
        ValueError: the file is missing or holds no JSON object.
    """
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing: is {file.parent} a checkpoint?") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: download it again ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is no JSON object: download it again")
    return found


def some(names: Iterable[str]) -> str:
    """The first few names of many, and how many there are."""
    names = sorted(names)
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest


def _headers_of(file: Path) -> dict[str, Stored]:
    with open_shard(file) as shard:
        slices = ((name, shard.get_slice(name)) for name in shard.keys())  # noqa: SIM118
        return {
            name: Stored(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices
        }
