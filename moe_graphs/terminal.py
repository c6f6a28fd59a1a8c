"""Common parts of the commands: a console, errors in a line, JSON. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console

from moe_graphs.errors import GraphError

_apps: list[Callable[[], typer.Typer]] = []


def options_are_of(build_app: Callable[[], typer.Typer]) -> None:
    """Set the command whose options have their names of the shell in errors."""
    _apps.append(build_app)


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
        line = error_line(error)
        make_console(stderr=True).print(f"error: {line}", style="red", markup=False)
        raise typer.Exit(1) from error


def error_line(error: BaseException) -> str:
    """Return the message in one line. Options in front of a colon have their names of the shell."""
    line = " ".join(str(error).split())
    known = {name: option.opts[0] for name, option in _options().items()}
    known |= {each[2:]: each for option in _options().values() for each in option.secondary_opts}

    def named(match: re.Match[str]) -> str:
        names = match[2].split(", ")
        if not all(name in known for name in names):
            return match[0]
        return f"{match[1]}{', '.join(known[name] for name in names)}: "

    return re.sub(r"(^|[:;] )([a-z0-9_-]+(?:, [a-z0-9_-]+)*): ", named, line)


def option_name(name: str) -> str:
    """Return the shell's name of an option: ``--ema`` for ``ema_decay``."""
    return _options()[name].opts[0] if name in _options() else name


def option_words(name: str, value: Any) -> str:
    """Return an option as it is typed, or nothing where ``value`` is what it has by default."""
    option = _options().get(name)
    default = None if option is None else option.default
    if value is None or (type(value) is type(default) and value == default):
        return ""
    if isinstance(value, bool) and option is not None:
        return (option.opts if value else option.secondary_opts or [f"not {option.opts[0]}"])[0]
    return f"{option_name(name)} {value}"


@functools.cache
def _options() -> dict[str, Any]:
    """All options of ``moe-graphs``, of several commands' same name that of ``train``."""
    if not _apps:
        return {}
    group: Any = typer.main.get_command(_apps[-1]())
    commands = sorted(group.commands.items(), key=lambda item: item[0] == "train")
    return {
        parameter.name: parameter
        for _, command in commands
        for parameter in command.params
        if parameter.opts[0].startswith("--")
    }


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
