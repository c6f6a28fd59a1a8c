"""The options of a run in its checkpoints, and which of them ``--resume`` keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_graphs.lm.options import TrainOptions
from moe_graphs.lm.run_directory import OPTIONS, SETTINGS, find_checkpoint, load_settings, read_part
from moe_graphs.option_tree import as_toml, flat, options_of, with_values
from moe_graphs.terminal import option_name, option_words

_OPTIONS = options_of(TrainOptions)
_PATHS = {name for name, each in _OPTIONS.items() if Path in each.kinds}
_WAY = {n for n, each in _OPTIONS.items() if each.section == "graphs" and each.of == "run"}
_LAYOUT = {name for name, each in _OPTIONS.items() if each.of == "layout"}
# Options that are right for one number of ranks only.
_OF_RANKS = _LAYOUT | {name for name, each in _OPTIONS.items() if each.of == "ranks"}
CONFIG = "config.toml"  # the file in a run's directory
_RANKS = "ranks"  # the key beside the options


@dataclass(frozen=True)
class Kept:
    """A command's options together with those of the run that it goes on with.

    Attributes:
        said: one line that says which options were kept and which were changed.
        text: identity of the run's documents, as in ``Documents.identity``; None if the run is to
            go on with another text, or if the identity is not known.
    """

    options: TrainOptions
    said: str
    text: str | None


def recorded(options: TrainOptions, ranks: int) -> dict[str, Any]:
    """Makes JSON values of the options that belong to a run."""
    found: dict[str, Any] = {_RANKS: ranks}
    for name, value in flat(options).items():
        if _OPTIONS[name].of != "start":
            found[name] = str(value.resolve()) if isinstance(value, Path) else value
    return found


def write_config(record: Mapping[str, Any], path: Path) -> None:
    """Writes what ``recorded`` has found as a file for ``--config``."""
    path.write_text(f"# {record[_RANKS]} rank(s)\n\n{as_toml(TrainOptions, record)}")


def keep(options: TrainOptions, given: Collection[str], ranks: int) -> Kept:
    """Takes options that the command line does not give from the checkpoint of ``resume``.

    Args:
        given: names of the options that the command line or its file gives.

    Raises:
        ValueError: if there is no such checkpoint, or its settings cannot be read.
    """
    assert options.output.resume is not None
    path = find_checkpoint(options.output.resume)
    saved = read_part(path / SETTINGS, load_settings)
    record = saved.get(OPTIONS)
    if record is None:
        raise ValueError(f"resume: {path} is of no run of this command: take another checkpoint")
    dropped = _dropped(record, given, ranks)
    kept = {
        name: Path(value) if name in _PATHS and value is not None else value
        for name, value in record.items()
        if name in _OPTIONS and name not in dropped and name not in given
    }
    unusual = {name: value for name, value in kept.items() if value != _OPTIONS[name].usual}
    words = " ".join(filter(None, (option_words(name, value) for name, value in unusual.items())))
    changed = ", ".join(
        _changes(options, {**record, _RANKS: record.get(_RANKS, ranks)}, ranks, {*dropped, *given})
    )
    text = None if "data" in given else saved.get("text")
    said = f"resume: {path}: kept: {words or 'nothing'}; changed: {changed or 'nothing'}"
    return Kept(with_values(options, kept), said, text)


def _dropped(record: Mapping[str, Any], given: Collection[str], ranks: int) -> set[str]:
    """Names of the run's options that newly given options make meaningless."""
    dropped: set[str] = set()
    if "preset" in given:
        dropped |= {"init", "tokenizer"}
    if "init" in given:
        dropped |= {"preset"}
    if _WAY & set(given):
        dropped |= _WAY
    if ranks != record.get(_RANKS, ranks) or _LAYOUT & set(given):
        dropped |= _OF_RANKS
    return dropped - set(given)


def _changes(
    options: TrainOptions, record: Mapping[str, Any], ranks: int, names: Collection[str]
) -> list[str]:
    now = recorded(options, ranks)
    changed = [name for name in (*sorted(names), _RANKS) if name in record and name in now]
    return [
        f"{option_words(name, now[name]) or f'{option_name(name)} by default'} (was {record[name]})"
        for name in changed
        if now[name] != record[name]
    ]


def check_text(kept: Kept | None, found: str, source: str) -> None:
    """Checks that the run goes on with its own text, or with another one that was asked for.

    Raises:
        ValueError: if it would go on with another text and ``--data`` does not ask for that.
    """
    if kept is not None and kept.text is not None and kept.text != found:
        raise ValueError(
            f"data: the run was trained on another text than {source} has now ({kept.text}; now "
            f"{found}): bring that text back, or give --data by name to go on with another one"
        )
