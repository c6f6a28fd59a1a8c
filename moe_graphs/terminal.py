"""Common parts of the commands: a console, errors in a line, JSON. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console

from moe_graphs.errors import GraphError


def make_console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = 160  # A file has no width of its own; at 160 no table cell is folded.
    return console


@contextlib.contextmanager
def errors_in_a_line(*others: type[Exception]) -> Iterator[None]:
    """Context in which errors that the user can mend end the command without a traceback."""
    expected: tuple[type[Exception], ...] = (ValueError, OSError, MemoryError, GraphError, *others)
    try:
        yield
    except BrokenPipeError:
        raise  # A closed pipe (`| head`) is no error; typer ends the command silently.
    except expected as error:
        line = " ".join(str(error).split())
        make_console(stderr=True).print(f"error: {line}", style="red", markup=False)
        raise typer.Exit(1) from error


def print_json(document: Any) -> None:
    """Print ``document`` as one line of JSON.

    JSON has no NaN and no infinity: they become the strings "nan" and "inf".
    """
    typer.echo(json.dumps(json_values(document), allow_nan=False))


def json_values(document: Any) -> Any:
    """Turn a tree of dicts, lists, tuples, strings and numbers into values that JSON has."""
    if isinstance(document, dict):
        return {str(key): json_values(value) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [json_values(value) for value in document]
    if isinstance(document, float) and not math.isfinite(document):
        return str(document)
    return document
