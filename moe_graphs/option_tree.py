"""Command lines, their help, their files and their records, derived from trees of dataclasses.

A tree is a dataclass whose fields are sections (``section``, ``changes``). A section is a dataclass
whose fields are options (``option``). Help does not wait for torch, which this module does not
import, and values of the library whose fields are options do not wait for typer.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

_KEY = "moe_graphs"  # of our entry in a field's metadata
_NAMED = ("COMMANDLINE", "DEFAULT_MAP")  # click's words for a value of the command line or a file


@dataclass(frozen=True)
class _Facts:
    help: str
    flags: str | None
    least: int | None
    of: str


@dataclass(frozen=True)
class _Branch:
    kind: type
    only: Sequence[str] | None
    changes: bool


@dataclass(frozen=True)
class Option:
    """One option of a tree.

    Attributes:
        default: its value if nobody names it; ``dataclasses.MISSING`` if it must be named.
        usual: the default of the dataclass. It differs from ``default`` in a section of changes.
        of: what the option belongs to, in words of the tree's owner.
    """

    name: str
    section: str
    type: Any
    default: Any
    usual: Any
    help: str
    flags: str | None
    least: int | None
    of: str

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of its value, without None."""
        union = isinstance(self.type, types.UnionType)
        kinds = typing.get_args(self.type) if union else (self.type,)
        return tuple(kind for kind in kinds if kind is not type(None))


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    flags: str | None = None,
    least: int | None = None,
    of: str = "run",
) -> Any:
    """Field of a section.

    Args:
        flags: names in the shell, if they are not the field's: ``--ema``, ``--on/--off``, or two
            with a space between them.
        least: the lowest value that is allowed.
        of: what the option belongs to; the owner of the tree gives the word its meaning.
    """
    return field(default=default, metadata={_KEY: _Facts(help, flags, least, of)})


def section(kind: type, only: Sequence[str] | None = None) -> Any:
    """Field of a tree: a section with its options, or with those in ``only``."""
    return field(default_factory=kind, metadata={_KEY: _Branch(kind, only, False)})


def changes(kind: type, only: Sequence[str] | None = None) -> Any:
    """Field of a tree: changes of a value of this dataclass, a dict of the named options alone."""
    return field(default_factory=dict, metadata={_KEY: _Branch(kind, only, True)})


@functools.cache
def options_of(tree: type) -> Mapping[str, Option]:
    """All options of a tree by name, in their order."""
    found: dict[str, Option] = {}
    for branch in dataclasses.fields(tree):
        of_branch: _Branch = branch.metadata[_KEY]
        for name, each in _options_of_section(branch.name, of_branch).items():
            assert name not in found, f"{name} is in two sections of {tree.__name__}"
            found[name] = each
    return types.MappingProxyType(found)


def _options_of_section(name: str, branch: _Branch) -> dict[str, Option]:
    found, hints = {}, typing.get_type_hints(branch.kind)
    for each in dataclasses.fields(branch.kind):
        facts = each.metadata.get(_KEY)
        if facts is None or (branch.only is not None and each.name not in branch.only):
            continue
        kind, default, words = hints[each.name], each.default, facts.help
        if branch.changes:
            kind, default = kind | None, None
            told = "(default: " in words or each.default in (None, False)
            if each.default is not MISSING and not told:
                words = f"{words} (default: {each.default})"
        by = dict(flags=facts.flags, least=facts.least, of=facts.of)
        found[each.name] = Option(each.name, name, kind, default, each.default, words, **by)
    return found


def flat(tree: Any) -> dict[str, Any]:
    """The values of all options of a tree by name."""
    found: dict[str, Any] = {}
    kind: Any = type(tree)
    for name, each in options_of(kind).items():
        branch = getattr(tree, each.section)
        found[name] = branch.get(name) if isinstance(branch, dict) else getattr(branch, name)
    return found


def tree_of(tree: type, values: Mapping[str, Any]) -> Any:
    """A tree with these values of options by name; the others have their defaults."""
    options, branches = options_of(tree), {}
    unknown = sorted(set(values) - set(options))
    assert not unknown, f"{unknown} are no options of {tree.__name__}"
    for branch in dataclasses.fields(tree):
        given = {k: v for k, v in values.items() if options[k].section == branch.name}
        if branch.metadata[_KEY].changes:
            branches[branch.name] = {k: v for k, v in given.items() if v is not None}
        else:
            branches[branch.name] = branch.metadata[_KEY].kind(**given)
    return tree(**branches)


def with_values(tree: Any, values: Mapping[str, Any]) -> Any:
    """The tree with other values of these options."""
    return tree_of(type(tree), {**flat(tree), **values})


def command(
    tree: type, run: Callable[[Any, set[str]], object], *, config: bool = False
) -> Callable[..., None]:
    """A function for ``typer`` that calls ``run`` with the tree and the names that were named.

    Its name and its help are those of ``run``.

    Args:
        config: whether ``--config`` reads values from a file. The command line goes before the
            file, and the file before defaults.
    """
    import typer

    def call(context: typer.Context, **values: Any) -> None:
        values.pop("config", None)
        sources = {name: context.get_parameter_source(name) for name in values}
        given = {name for name, source in sources.items() if source and source.name in _NAMED}
        run(tree_of(tree, values), given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("context", keyword, annotation=typer.Context)
    parameters = [context, *([_config_parameter(tree)] if config else [])]
    parameters += [_parameter(each) for each in options_of(tree).values()]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__name__, call.__doc__ = run.__name__, run.__doc__
    return call


def _parameter(each: Option) -> inspect.Parameter:
    import typer

    flags = each.flags.split() if each.flags else []
    if each.kinds == (bool,) and not flags and not each.default:
        flags = [f"--{each.name.replace('_', '-')}"]  # without it typer adds --no-...
    shell = typer.Option(
        *flags, help=each.help, min=each.least, rich_help_panel=each.section.capitalize()
    )
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=empty if each.default is MISSING else each.default,
        annotation=Annotated[each.type, shell],
    )


def _config_parameter(tree: type) -> inspect.Parameter:
    import typer

    from moe_graphs.terminal import errors_in_a_line

    # Typer evaluates these annotations in this module, which does not import it.
    def read(context: Any, path: Path | None) -> Path | None:
        if path is not None:
            with errors_in_a_line():
                context.default_map = read_config(tree, path)
        return path

    shell = typer.Option(
        help="A TOML file of options, in tables as the groups below; the command line goes first.",
        callback=read,
        is_eager=True,
    )
    kind = Annotated[Path | None, shell]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter("config", keyword, default=None, annotation=kind)


def read_config(tree: type, path: Path) -> dict[str, Any]:
    """Reads options by name from a TOML file that has a table for each section.

    Raises:
        ValueError: if the file is no TOML, has a table or an option that the tree does not have, or
            a value of another type.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"config: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {path} is no TOML: {error}") from error
    options, found = options_of(tree), {}
    sections = [branch.name for branch in dataclasses.fields(tree)]
    for table, content in document.items():
        if not isinstance(content, dict):
            raise ValueError(f"config: {path}: {_misplaced(table, '', options)}")
        if table not in sections:
            nearest = _nearest(table, sections)
            raise ValueError(f"config: {path} has a table [{table}]: {nearest}")
        for name, value in content.items():
            if name not in options or options[name].section != table:
                raise ValueError(f"config: {path}: {_misplaced(name, table, options)}")
            found[name] = _checked(options[name], value, path)
    return found


def _misplaced(name: str, table: str, options: Mapping[str, Option]) -> str:
    where = f"[{table}] has" if table else "it has, before any table,"
    if name in options:
        return f"{where} {name}, which belongs to [{options[name].section}]: move it there"
    return f"{where} {name}: {_nearest(name, options)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def _checked(each: Option, value: Any, path: Path) -> Any:
    """The value of a file, as the command line would give it. TOML's types are no strings."""
    taken = {float: (float, int), Path: (str,)}
    kinds = [kind for known in each.kinds for kind in taken.get(known, (known,))]
    if type(value) not in kinds:
        words = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            f"config: {path}: {each.name} = {value!r} is of type {type(value).__name__}: write "
            f"a value of type {words}"
        )
    return value


def as_toml(tree: type, values: Mapping[str, Any]) -> str:
    """The text of a file that ``read_config`` reads; options that are None are left out."""
    tables: dict[str, list[str]] = {}
    for name, each in options_of(tree).items():
        value = values.get(name)
        if value is not None:
            words = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
            tables.setdefault(each.section, []).append(f"{name} = {words}")
    return "\n".join(f"[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items())
