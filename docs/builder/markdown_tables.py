"""Tables of Markdown from values of the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with these columns; what a cell holds is made text by ``cell``."""
    lines = [head, ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"


def cell(value: Any) -> str:
    """Text of a value: yes and no for facts, names one after the other, a dash for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, tuple | list):
        value = ", ".join(map(str, value))
    return str(value).replace("|", "\\|").replace("\n", " ") if value not in (None, "") else "-"


def code(text: str) -> str:
    """Text as code in a cell, which may have backticks."""
    fence = "``" if "`" in text else "`"
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"
