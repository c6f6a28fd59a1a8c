"""Links of pages into the repository, made links of the site.

Pages are written for a reader of the repository: their links are relative paths of files. A page of
``docs`` keeps its place on the site. A file elsewhere that a page links to is published under
``files/``: pictures and data as they are, code as a page, a folder as a list of its files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Files that are pages of the site and lie elsewhere than in `docs`.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "CHANGELOG.md": "development/changelog.md",
    "benchmarks/README.md": "development/benchmarks.md",
}
# Suffix of a file that is shown as a page -> its language. All others are published as they are.
SHOWN = {".py": "python", ".sh": "bash", ".toml": "toml", ".txt": "text", "": "text"}
# Code is matched first, so that the target of a link in it is not.
_CODE_OR_LINK = re.compile(r"^(```+).*?^\1`*$|(`+)(?!`).*?\2|\]\(([^)\s]+)\)", re.DOTALL | re.M)


def links(markdown: str) -> Iterator[str]:
    """Targets of the page's links, as they are written."""
    return (match[3] for match in _CODE_OR_LINK.finditer(markdown) if match[3])


def with_links(markdown: str, changed: Callable[[str], str]) -> str:
    """The page with other targets of its links."""

    def replaced(match: re.Match[str]) -> str:
        return f"]({changed(match[3])})" if match[3] else match[0]

    return _CODE_OR_LINK.sub(replaced, markdown)


def with_lists(markdown: str) -> str:
    """The page with an empty line before a list that follows a paragraph, as Python-Markdown wants.

    On GitHub such a list needs none.
    """
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [
        re.sub(r"^(?!- |\s)(.+\n)(?=- )", r"\1\n", part, flags=re.M) for part in parts[::2]
    ]
    return "".join(parts)


def with_units(markdown: str) -> str:
    """The page with tables in which no line ends between a number and its unit."""
    row = re.compile(r"^\|.*$", re.M)
    unit = re.compile(r"(?<=\d) (?=(?:[mu]?s|[KMG]iB|TB/s|TFLOP/s|[kM]|%)(?!\w))")
    return row.sub(lambda match: unit.sub("\u00a0", match[0]), markdown)


def target(link: str, written_in: str) -> str | None:
    """The file or folder that a link names, relative to the repository; None for an address.

    Args:
        link: the link without its anchor.
        written_in: the page's file, relative to the repository.
    """
    if not link or re.match(r"[a-z]+:", link):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(written_in), link))


def place(path: str) -> str:
    """The file of the site's sources that has a file or folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith((".md", ".png")):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    return f"files/{path}.md" if Path(path).suffix in SHOWN else f"files/{path}"


def origin(uri: str) -> str:
    """The file of the repository that a page was written in; pages from code count as in docs."""
    found = {page: path for path, page in PAGES.items()}
    return found.get(uri, f"docs/{uri}")


def shown(path: str) -> str:
    """The page of a file with code, or of a folder."""
    there = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if there.is_dir():
        names = sorted(each.name for each in there.iterdir() if each.name != "__pycache__")
        return head + "".join(f"- `{name}`\n" for name in names)
    return f"{head}````` {SHOWN[there.suffix]}\n{there.read_text()}\n`````\n"
