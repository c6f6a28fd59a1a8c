"""The page of questions: the guide's answers, and what surprises people about graphs."""

from __future__ import annotations

import ast
import re

from moe_graphs.engine.reasons import EAGER_CALLS
from repository import ROOT

PLACE = "faq.md"
GUIDE = ROOT / "docs" / "guide.md"
FOOTGUNS = "tests/engine/partial/test_footguns.py"
SURPRISES = f"""## What surprises people about graphs

Each row is a test ([test_footguns.py](../{FOOTGUNS})). "right" means that the result is bitwise
that of an eager model. "eager" means that this call runs eagerly, with a right result, and is
counted under the given reason, which [has a remedy](messages.md#reasons-for-eager-calls). "error"
means that an error is raised before anything is launched; it names the scope and what is wrong.

"""


def text() -> str:
    """Text of the page: a heading for each question, and the table of the tests."""
    answers = re.split(r"^## Questions\n", GUIDE.read_text(), flags=re.MULTILINE)[1]
    answers = re.split(r"^## ", answers, flags=re.MULTILINE)[0]
    answers = answers.replace("](#", "](guide.md#")
    questions = re.sub(r"^\*\*(.+?\?)( .+?)?\*\*\s+", _heading, answers, flags=re.MULTILINE)
    return f"# Questions\n\n{questions}\n{SURPRISES}{_table()}"


def _heading(match: re.Match[str]) -> str:
    question, rest = match[1].replace("\n", " "), match[2] or ""
    return f"## {question}\n\n{rest.strip()}{' ' if rest else ''}"


def _table() -> str:
    documentation = ast.get_docstring(ast.parse((ROOT / FOOTGUNS).read_text())) or ""
    rows = [line for line in documentation.splitlines() if line.startswith("|")]
    word = re.compile(rf"(?<=[ ,])({'|'.join(EAGER_CALLS)})(?=[ ,|;])")
    return "\n".join(_linked(row, word) for row in rows) + "\n"


def _linked(row: str, word: re.Pattern[str]) -> str:
    """The row with reasons behind "eager:" as links to their remedies."""
    before, eager, after = row.partition("eager: ")
    return before + eager + word.sub(r"[`\1`](messages.md#\1)", " " + after)[1:] if eager else row
