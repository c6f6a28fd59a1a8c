"""The documentation site: built strictly, its links lead somewhere, and it is whole by itself."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import html
import http.server
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import moe_graphs
from moe_graphs.engine.reasons import COPIED_GRADIENTS, EAGER_CALLS
from moe_graphs.kernels.gpu_architectures import TABLE
from moe_graphs.registry import FAMILIES
from test_public_names import documented_names, public_modules

pytest.importorskip("mkdocs", reason="needs the extra docs")
pytest.importorskip("material", reason="needs the extra docs")
pytest.importorskip("mkdocstrings", reason="needs the extra docs")
from mkdocs.structure.files import Files

import api_pages
import hooks
import messages_page
import repository
from docstrings import google_style

ROOT = repository.ROOT
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Elements that a browser loads by itself, and the attributes with their addresses. A link of a
# page to another page (`a`) is loaded by a click.
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}


class Page(HTMLParser):
    """Addresses and anchors of a page, and the text of its paragraphs without code."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.paragraphs: list[str] = []
        self._open: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loads.append(values[LOADED[tag]])
        if tag in ("p", "code"):
            self._open.add(tag)
        if tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open.discard(tag)

    def handle_data(self, data: str) -> None:
        if self._open == {"p"}:
            self.paragraphs[-1] += data


@functools.cache
def pages_of(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def broken_links(site: Path) -> list[str]:
    """Links and loaded addresses of the pages that lead to no file, or to no anchor in it."""
    pages, found = pages_of(site), []
    for file, page in pages.items():
        for link in {*page.links, *page.loads}:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = urllib.parse.unquote(parts.path)
            there = (file.parent / path).resolve() if path else file
            there = there / "index.html" if there.is_dir() else there
            anchor = urllib.parse.unquote(parts.fragment)
            is_page = there in pages
            if not there.is_file() or (is_page and anchor and anchor not in pages[there].anchors):
                found.append(f"{file.relative_to(site)}: {link}")
    return found


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The site, built once for all processes of the run."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    built, complete = folder / "site", folder / "site.complete"
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", built]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            complete.touch()
    return built


# ---- the built site


def test_links_and_anchors_lead_somewhere(site):
    assert len(pages_of(site)) > 30
    # The page for addresses that do not exist has links from the root of a server.
    assert [each for each in broken_links(site) if not each.startswith("404.html")] == []


def test_pages_load_nothing_from_elsewhere(site):
    for file, page in pages_of(site).items():
        outside = [each for each in page.loads if re.match(r"(\w+:)?//", each)]
        assert not outside, file
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style.read_text()), style


def test_search_finds_what_people_look_for(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {
        word: {entry["location"].partition("#")[0] for entry in entries
               if word in f"{entry['title']} {entry['text']}"}
        for word in ("GraphCallback", "slots_full", "dropless", "sm_120", "CaptureError")
    }  # fmt: skip
    assert "guide.html" in found["GraphCallback"]
    assert "api/integrations_transformers.html" in found["GraphCallback"]
    assert "messages.html" in found["slots_full"]
    assert "glossary.html" in found["dropless"]
    assert "support.html" in found["sm_120"]
    assert "api/moe_graphs.html" in found["CaptureError"]
    assert not any(entry["location"].startswith(("files/", "everything")) for entry in entries)


def test_everything_in_one_page_has_every_how_to(site):
    page = (site / "everything.html").read_text()
    titles = [file.read_text().partition("\n")[0] for file in (ROOT / "docs/how_to").glob("*.md")]
    assert len(titles) > 10
    assert [each for each in titles if html.escape(each[2:], quote=False) not in page] == []


@pytest.mark.parametrize("module", public_modules())
def test_every_public_name_has_its_entry(site, module):
    anchors = set().union(*(page.anchors for page in pages_of(site / "api").values()))
    texts = "".join(file.read_text() for file in (site / "api").glob("*.html"))
    modules = re.findall(r'id="([\w.]+)"[^>]*>\s*<code class="[^"]*doc-symbol-module', texts)
    names = [*documented_names(module), *getattr(importlib.import_module(module), "__all__", ())]
    homes = {name: "moe_graphs" if name in moe_graphs.__all__ else module for name in names}
    assert {f"{home}.{name}" for name, home in homes.items()} <= anchors - {*modules}


def test_pages_from_code_have_what_the_code_has(site):
    support, messages = ((site / name).read_text() for name in ("support.html", "messages.html"))
    assert [row.name for row in TABLE.values() if f"<td>{row.name}</td>" not in support] == []
    assert [name for name in FAMILIES if f"<code>{name}</code>" not in support] == []
    assert [
        word for word in EAGER_CALLS if f'<code id="{word}">{word}</code>' not in messages
    ] == []
    assert [word for word in COPIED_GRADIENTS if f"<code>{word}</code>" not in messages] == []
    assert "audit_every={value}: accepted are" in messages
    questions = (site / "faq.html").read_text()
    assert "Will it help on my GPU?" in questions
    assert 'href="messages.html#slots_full"' in questions


def test_no_list_became_a_paragraph_and_no_docstring_stayed_raw(site):
    for file, page in pages_of(site).items():
        if not file.is_relative_to(site / "files"):
            for text in page.paragraphs:
                assert not re.search(r"^(- |\| )", text, re.MULTILINE), (file, text)
                assert not re.search(r"::$|``|\*\*\w", text, re.MULTILINE), (file, text)


# ---- what makes it


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">right</a><a href="b.html#there">1</a><a href="c.html">2</a>'
        '<img src="d.png"><a href="#nowhere">4</a><a href="https://example.org">outside</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    found = {each.removeprefix("a.html: ") for each in broken_links(tmp_path)}
    assert found == {"b.html#there", "c.html", "d.png", "#nowhere"}


def test_a_link_that_leads_nowhere_is_a_warning(caplog):
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="guide.md"))
    text = "[a](../tests/nothing.py) `[b](no_link.md)` [c](https://example.org)"
    assert "](files/tests/nothing.py.md)" in hooks.on_page_markdown(
        text, page=page, files=Files([])
    )
    (record,) = caplog.records
    assert "the link ../tests/nothing.py leads to no page" in record.getMessage()


def test_links_of_a_page_are_those_outside_of_code():
    text = (
        "[a](one.md#x) `[b](two.md)` ``[c](three.md) ` ``\n```\n[d](four.md)\n```\n![e](five.png)"
    )
    assert [*repository.links(text)] == ["one.md#x", "five.png"]


def test_a_list_behind_a_paragraph_is_a_list():
    text = "a\n- b\n  c\n- d\n\n```\ne\n- f\n```\n"
    assert repository.with_lists(text) == text.replace("a\n", "a\n\n")


def test_a_number_in_a_table_stays_beside_its_unit():
    text = "| a 2.5 ms step | 16 % |\nof 2.5 ms | 3 metres |\n"
    kept = "| a 2.5\u00a0ms step | 16\u00a0% |\nof 2.5 ms | 3 metres |\n"
    assert repository.with_units(text) == kept


def test_public_code_has_its_page_of_the_api():
    pages = {
        "moe_graphs/__init__.py": "api/moe_graphs.md",
        "moe_graphs/training/ema.py": "api/training.md",
        "moe_graphs/integrations/lightning/__init__.py": "api/integrations_lightning.md",
        "moe_graphs/errors.py": "api/others.md",
        "moe_graphs/engine/audit.py": None,
    }
    assert {path: api_pages.page_of(path) for path in pages} == pages


def test_docstrings_become_googles():
    text = "A sentence::\n\n    code\n\nArgs:\n    a, b: one\n        two\n    c: three\n"
    parts = "a: one\n        two\n    b: one\n        two\n    c: three"
    assert google_style(text) == f"A sentence:\n\n    code\n\nArgs:\n    {parts}"


def test_messages_of_a_file_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(messages_page, "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(
        "def text(x):\n    'A docstring that is no message: it is left out.'\n"
        "    return f'made of {x}, which nobody can take: mend it' or 'short: text'\n"
        "def run(x):\n    warnings.warn('a' 'b', GraphWarning, stacklevel=2)\n"
        "    raise ValueError(f'{x + 1:,} is much')\n"
        "def other(x):\n    raise GraphError(text(x)) from None\n    raise AssertionError('no')\n"
    )
    assert {(each.kind, each.text) for each in messages_page.messages_of(file)} == {
        ("GraphWarning", "ab"),
        ("ValueError", "{...} is much"),
        (messages_page.PART, "made of {x}, which nobody can take: mend it"),
    }


# ---- in a browser


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """Address of the site on a server of this process."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Say nothing."""

    handler = functools.partial(Handler, directory=os.fspath(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def browser() -> Iterator[Any]:
    """A browser of the machine without a window, or playwright's own if there is one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    own = next(filter(None, map(shutil.which, BROWSERS)), None)
    with playwright.sync_playwright() as running:
        try:
            started = running.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"needs a browser: {str(error).splitlines()[0]}")
        yield started
        started.close()


def test_a_browser_shows_every_page_without_an_error(site, browser):
    """No error is in the console, and no page is wider than a desktop or a phone."""
    with served(site) as address:
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda m: said.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith((address, "data:", "blob:"))
                else said.append(r.url))  # fmt: skip
        for file in pages_of(site):
            if file.name != "404.html":
                page.set_viewport_size({"width": 1280, "height": 800})
                page.goto(f"{address}/{file.relative_to(site)}")
                wide = page.evaluate("document.documentElement.scrollWidth")
                page.set_viewport_size({"width": 390, "height": 800})
                narrow = page.evaluate("document.documentElement.scrollWidth")
                assert (said, wide, narrow) == ([], 1280, 390), file


def test_search_works_in_a_browser(site, browser):
    with served(site) as address:
        page = browser.new_page()
        page.goto(f"{address}/index.html")
        page.locator("[data-md-component=search-query]").fill("slots_full")
        page.locator(".md-search-result__link").first.wait_for()
        links = page.locator(".md-search-result__link").all()
        assert any("messages.html" in (link.get_attribute("href") or "") for link in links)
