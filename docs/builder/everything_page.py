"""The page of everything: the ideas, the guide and all how-to pages in one."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from repository import ROOT, with_links

PLACE = "everything.md"
HEAD = """---
search:
  exclude: true
---

# Everything in one page

The ideas, the guide and all how-to pages, one after the other. Their links lead to the pages that
they come from.

"""


def text(nav: list[Any]) -> str:
    """Text of the page, in the order of the navigation."""
    sections = {title: value for entry in nav for title, value in entry.items()}
    how_to = [page for entry in sections["How to"][1:] for page in entry.values()]
    return HEAD + "\n".join(map(_part, ["concepts.md", sections["Guide"], *how_to]))


def _part(page: str) -> str:
    """A page with headings one level lower, and links as of the folder of documents."""

    def moved(link: str) -> str:
        if link.startswith("#"):
            return page + link
        is_address = re.match(r"[a-z]+:", link)
        return link if is_address else posixpath.normpath(posixpath.join(folder, link))

    folder = posixpath.dirname(page)
    parts = re.split(r"(^```.*?^```$)", (ROOT / "docs" / page).read_text(), flags=re.S | re.M)
    parts[::2] = [re.sub(r"^#", "##", part, flags=re.M) for part in parts[::2]]
    return with_links("".join(parts), moved)
