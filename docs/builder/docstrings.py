"""An extension of griffe, which reads docstrings for the API.

Docstrings are written to be read in the sources. Two of their habits are not Google's style: code
is announced by ``::``, and parameters with the same meaning share an entry. Fields that are options
of the command have their documentation in the call that makes them.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe


class HouseStyle(griffe.Extension):
    """Docstrings as Google's style has them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = google_style(obj.docstring.value)

    def on_attribute_instance(self, *, node: ast.AST, attr: griffe.Attribute, **_: Any) -> None:
        """Give a field that is an option its default, and its words as the docstring."""
        made = getattr(node, "value", None)
        if isinstance(made, ast.Call) and ast.unparse(made.func) in ("option", "_degree"):
            match made.args:
                case [*default, ast.Constant(value=str(words))] if words:
                    attr.value = ast.unparse(default[0]) if default else "1"
                    attr.docstring = griffe.Docstring(words, parent=attr)


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
