"""An extension of griffe, which reads docstrings for the API.

Docstrings are written to be read in the sources. Two of their habits are not Google's style: code
is announced by ``::``, and parameters with the same meaning share an entry.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class HouseStyle(griffe.Extension):
    """Docstrings as Google's style has them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = google_style(obj.docstring.value)


def google_style(docstring: str) -> str:
    """The docstring with one colon before code, and an entry for each parameter."""
    lines: list[str] = []
    names: list[str] = []
    entry: list[str] = []
    for line in [*re.sub(r"::$", ":", docstring, flags=re.MULTILINE).splitlines(), ""]:
        shared = re.match(r"    (\w+(?:, \w+)+): ", line)
        if names and (shared or len(line) - len(line.lstrip()) < 8):
            lines += [f"    {name}{each}" if not number else each
                      for name in names for number, each in enumerate(entry)]  # fmt: skip
            names = []
        if shared:
            names, entry = shared[1].split(", "), [line[4 + len(shared[1]) :]]
        elif names:
            entry.append(line)
        else:
            lines.append(line)
    return "\n".join(lines[:-1])
