"""Hooks of mkdocs: pages that are no files of ``docs``, and links into the repository.

``mkdocs.yml`` names this file. What is missing or wrong is a warning of mkdocs, and ``--strict``
makes an error of it.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import api_pages
import everything_page
import messages_page
import questions_page
import repository
import support_page

log = logging.getLogger("mkdocs.hooks.moe_graphs")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation of the API, which follows from the modules."""
    pages = [{title: uri} for uri, (title, _) in api_pages.pages().items()]
    config.nav = [{"API": pages} if "API" in entry else entry for entry in config.nav or ()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages whose text is elsewhere, and every file that a page links to."""
    texts = {uri: (repository.ROOT / path).read_text() for path, uri in repository.PAGES.items()}
    texts |= {uri: text for uri, (_, text) in api_pages.pages().items()}
    for page in (support_page, messages_page, questions_page):
        texts[page.PLACE] = page.text()
    texts[everything_page.PLACE] = everything_page.text(config.nav or [])
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    for file in list(files.documentation_pages()):
        written_in = repository.origin(file.src_uri)
        for link in repository.links(file.content_string):
            path = repository.target(link.partition("#")[0], written_in)
            if path is not None and (repository.ROOT / path).exists():
                _publish(path, files, config)
    return files


def _place(path: str) -> str:
    """The file of the site's sources that a link leads to; public code has a page of the API."""
    return api_pages.page_of(path) or repository.place(path)


def _publish(path: str, files: Files, config: MkDocsConfig) -> None:
    uri, there = _place(path), repository.ROOT / path
    if files.get_file_from_path(uri) is not None:
        return
    shown = uri.endswith(".md")
    has: Any = (
        dict(content=repository.shown(path)) if shown else dict(abs_src_path=os.fspath(there))
    )
    inclusion = InclusionLevel.NOT_IN_NAV if shown else InclusionLevel.INCLUDED
    files.append(File.generated(config, uri, inclusion=inclusion, **has))


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Make the targets of links those of the site, and lists what they are on GitHub."""
    uri = page.file.src_uri
    if uri.startswith("files/"):
        return markdown
    markdown = repository.with_units(repository.with_lists(markdown))
    if uri == "guide.md":  # a page of its own has the questions, which search finds there
        markdown = re.sub(r"^## Questions$", r"\g<0> { data-search-exclude }", markdown, flags=re.M)

    def on_the_site(link: str) -> str:
        there, mark, anchor = link.partition("#")
        path = repository.target(there, repository.origin(uri))
        if path is None:
            return link
        found = _place(path)
        if files.get_file_from_path(found) is None:
            log.warning(f"{uri}: the link {link} leads to no page and to no file of the repository")
        return posixpath.relpath(found, posixpath.dirname(uri) or ".") + mark + anchor

    return repository.with_links(markdown, on_the_site)
