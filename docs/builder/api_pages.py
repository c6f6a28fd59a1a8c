"""Pages of the API: public names of public modules, for mkdocstrings to fill.

What is public is read from the sources, so that no optional package has to be there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import moe_graphs
from repository import ROOT

# A page each. Modules of these folders are imported by their own names, and of the others not.
FOLDERS = ("moe_graphs.training", "moe_graphs.pipelines")
PACKAGES = (
    *("moe_graphs.integrations.transformers", "moe_graphs.integrations.lightning"),
    *("moe_graphs.integrations.megablocks", "moe_graphs.routing", "moe_graphs.optim"),
    *("moe_graphs.layers", "moe_graphs.dispatch", "moe_graphs.kernels", "moe_graphs.parallel"),
    "moe_graphs.planning",
)
HEAD = """# API

`import moe_graphs` has the names that a training loop needs. All others are imported from their
modules.

| page | what it has |
|---|---|
"""
OTHERS = "Records, reports and profiles: what the names of `moe_graphs` return, raise and measure."


def pages() -> dict[str, tuple[str, str]]:
    """Title and text of each page, by its place, in the order of the navigation."""
    found = {"api/moe_graphs.md": ("moe_graphs", _module("moe_graphs", moe_graphs.__all__))}
    for package in (*FOLDERS, *PACKAGES):
        title = package.removeprefix("moe_graphs.")
        found[f"api/{title.replace('.', '_')}.md"] = title, _package(package)
    found["api/others.md"] = "records and reports", _others()
    rows = [
        f"| [{title}]({Path(uri).name}) | {_said(text)} |" for uri, (title, text) in found.items()
    ]
    return {"api/index.md": ("all modules", HEAD + "\n".join(rows) + "\n"), **found}


def page_of(path: str) -> str | None:
    """Place of the page that documents a file of the package; None if it is not public."""
    for package in ("moe_graphs", *FOLDERS, *PACKAGES):
        modules = [package, *(modules_of(package) if package in FOLDERS else ())]
        if any(_source(module) == ROOT / path for module in modules):
            return f"api/{package.removeprefix('moe_graphs.').replace('.', '_')}.md"
    others = (_source(f"moe_graphs.{module}") for module in moe_graphs._MOVED)
    return "api/others.md" if ROOT / path in others else None


def modules_of(folder: str) -> list[str]:
    """Modules of a folder whose modules are imported by their own names."""
    files = sorted(_source(folder).parent.glob("[!_]*.py"))
    return [f"{folder}.{file.stem}" for file in files]


def public_names(module: str) -> list[str]:
    """Names of ``__all__``, or of the functions and classes that the module defines."""
    body = ast.parse(_source(module).read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    made = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in made if not name.startswith("_")]


def _package(package: str) -> str:
    if package not in FOLDERS:
        return _module(package, public_names(package))
    rest = (_module(name, public_names(name), level=2) for name in modules_of(package))
    return f"# {package}\n\n{_docstring(package)}\n\n" + "".join(rest)


def _others() -> str:
    """Names that users meet and do not import, which ``moe_graphs`` knows the modules of."""
    homes = {f"moe_graphs.{name}": names for name, names in moe_graphs._MOVED.items()}
    rest = (_module(name, homes[name], level=2) for name in homes if not _has_a_page(name))
    return f"# Records, reports and profiles\n\n{OTHERS}\n\n" + "".join(rest)


def _has_a_page(module: str) -> bool:
    return module in PACKAGES or module.startswith(tuple(f"{folder}." for folder in FOLDERS))


def _module(module: str, names: Iterable[str], level: int = 1) -> str:
    """The module's docstring and its names; one that the top has, too, is a link to it."""
    text = f"{'#' * level} {module}\n\n"
    text += f"::: {module}\n    options: {{members: false, show_root_heading: false}}\n\n"
    for name in names:
        if module != "moe_graphs" and name in moe_graphs.__all__:
            text += f"`{name}`: see [moe_graphs](moe_graphs.md#moe_graphs.{name}).\n\n"
        else:
            text += _entry(module, name, level + 1)
    return text


def _entry(module: str, name: str, level: int) -> str:
    """A name's entry; where a module has the same name, that of the name in this module."""
    path, mark = f"{module}.{name}", ""
    if _source(path).exists():
        path, mark = f"{path}.{name}", f'<a id="{path}"></a>\n\n'
    return f"{mark}::: {path}\n    options: {{heading_level: {level}}}\n\n"


def _said(text: str) -> str:
    """First line of the docstring of the module that a page is about."""
    title = text.partition("\n")[0].removeprefix("# ")
    return _docstring(title).partition("\n")[0] if title.startswith("moe_graphs") else OTHERS


def _docstring(module: str) -> str:
    return ast.get_docstring(ast.parse(_source(module).read_text())) or ""


def _source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
