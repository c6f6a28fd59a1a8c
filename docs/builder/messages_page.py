"""The page of messages: reasons for eager calls, and every error and warning of the package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from markdown_tables import cell, code, table
from moe_graphs.engine.reasons import COPIED_GRADIENTS, EAGER_CALLS, Reason
from repository import ROOT

PLACE = "messages.md"
HEAD = """# Messages

This page is written from the code when the site is built. Search it for the words of a message;
braces stand for values that the message names, such as `{name}`.

## Reasons for eager calls

A call that is not replayed runs eagerly, and the report counts it under one of these words.
`backward:` before a word means that the backward ran eagerly behind a replayed forward. "Warns at"
is the number of the call of a scope that warns ([why a call runs
eagerly](guide.md#why-a-call-runs-eagerly)).

"""
COPIES = """## Reasons for copied gradients

A gradient of a weight is copied to become `.grad`, which takes memory and little time.

"""
ERRORS = """## Errors and warnings

All messages that the package raises or warns with, by folder. "A part" is a text that a message or
a report is put together from, such as the cause of a refusal and its remedy.

"""
# Exceptions that no user sees, because the package catches them itself.
INSIDE = {"AssertionError", "CaptureInterrupt", "NotImplementedError", "StopIteration"}
PART = "a part"
# Files whose other texts are what commands print, or words of the reports.
OUTPUT = re.compile(
    r"bench/|(command|table|tables|picture|options|layout|trainer|run|reasons)\.py$"
)


@dataclass(frozen=True, order=True)
class Message:
    """A message of the sources, with the name of its class and its place."""

    text: str
    kind: str
    file: str
    line: int


def text() -> str:
    """Text of the page."""
    copies = [
        [code(word), each.explanation, each.remedy] for word, each in COPIED_GRADIENTS.items()
    ]
    found = [message for file in _sources() for message in messages_of(file)]
    return (
        HEAD
        + _reasons(EAGER_CALLS)
        + COPIES
        + table(["reason", "what has happened", "what to do"], copies)
        + ERRORS
        + _by_folder(found)
    )


def _reasons(reasons: Mapping[str, Reason]) -> str:
    head = ["reason", "what has happened", "what to do", "warns at"]
    rows = [
        [f"{code(word)}{{ #{word} }}", each.explanation, each.remedy, each.warns_at]
        for word, each in reasons.items()
    ]
    return table(head, rows)


def _sources() -> list[Path]:
    return sorted((ROOT / "moe_graphs").rglob("*.py"))


def _by_folder(found: list[Message]) -> str:
    folders = defaultdict(list)
    for message in found:
        folders[str(Path(message.file).parent)].append(message)
    text = ""
    for folder, messages in sorted(folders.items()):
        rows = [[code(cell(m.text)), m.kind, code(f"{Path(m.file).name}:{m.line}")]
                for m in sorted(messages)]  # fmt: skip
        text += f"### {folder}\n\n" + table(["message", "class", "where"], rows)
    return text


def messages_of(file: Path) -> Iterator[Message]:
    """Messages of a file's errors and warnings, and texts with a remedy behind a colon."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    kinds = {id(value): kind for kind, value in map(_said, nodes) if value is not None}
    for value in _texts(nodes):
        kind, text = kinds.get(id(value), PART), template(value)
        is_part = ": " in text and len(text.split()) > 6 and not OUTPUT.search(str(file))
        if kind not in INSIDE and (kind != PART or is_part):
            yield Message(text, kind, str(file.relative_to(ROOT)), value.lineno)


def _texts(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Texts of a file, but for docstrings and parts of other texts."""
    others = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    others |= {
        id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in others:
            yield node


def _said(node: ast.AST) -> tuple[str, ast.expr | None]:
    """Class and message of an error that is raised, or of a warning."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        return ast.unparse(node.exc.func), node.exc.args[0]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "warn":
        kinds = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "category")]
        return ast.unparse(kinds[0]) if kinds else "UserWarning", node.args[0]
    return "", None


def _name_of(value: ast.expr) -> str:
    """The last name of a variable or an attribute; dots for what is computed."""
    name = getattr(value, "id", None) or getattr(value, "attr", "...")
    return name.strip("_")


def template(value: ast.expr | None) -> str:
    """The text of a message with the names of its values in braces; empty if it is no text."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{_name_of(part.value)}}}"
            for part in value.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    return ""
