"""Rules that keep the package readable, held by a test instead of by memory."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_graphs

PACKAGE = Path(moe_graphs.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted(Path(__file__).parent.rglob("*.py"))
# Code that tests share, and programs that try to break the package's promise.
OF_TESTS_ALONE = {"support", "programs"}
# For each part of the package, the parts that it may import. `staged` has the marker and the
# interrupt: the one piece of the engine that layers and dispatchers see.
ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "portable_launches": set(),
    "weight_codes": set(),
    "registry": set(),
    "layout": {"option_tree", "registry"},
    "option_tree": {"terminal"},
    "report_tables": {"engine.reasons"},
    "staged": {"errors"},
    "kernels": {"kernels", "portable_launches", "weight_codes"},
    "optim": {"optim", "kernels"},
    "dispatch": {"dispatch", "kernels", "registry", "staged"},
    "layers": {
        "layers",
        "checkpoints",
        "dispatch",
        "kernels",
        "registry",
        "staged",
        "weight_codes",
    },
    "routing": {"engine", "errors", "layers", "staged"},
    "checkpoints": {"checkpoints", "layers.model_config", "layers.rope_scaling", "registry"},
    "parallel": {"parallel", "checkpoints", "layers", "layout", "dispatch", "kernels", "registry"},
    "pipelines": {"pipelines", "engine.callables.order", "errors"},
    "planning": {
        "planning",
        "parallel",
        "registry",
        "pipelines",
        "layers",
        "dispatch",
        "kernels",
        "report_tables",
    },
    "profiling": {"profiling", "engine", "errors"},
    "engine": {
        "engine",
        "staged",
        "config",
        "errors",
        "portable_launches",
        "report_tables",
        "weight_codes",
    },
}

# A docstring whose first words are among these begins with a fragment, or points to a noun that is
# not there. A first line is a sentence, or a noun phrase that stands by itself.
FRAGMENTS = re.compile(
    r"(About|After|Also|And|Args:|As|At|Attributes:|Because|Before|Behind|Beside|Between|But|By"
    r"|Example:|For|From|Here|How|If|In|It|Its|Likewise|Neither|None|Nor|Not|Of|On|Once|Only|Or"
    r"|Raises:|Returns:|Same|Since|So|Such|That|The same|Their|Them|There|These|They|This|Those"
    r"|Though|To|Under|Unless|Until|What|When|Where|Which|While|Who|Whom|Whose|Why|With|Within"
    r"|Without|Yet)(?![\w-])"
)
# A comment may begin with most of these, but not with these.
FRAGMENTS_OF_COMMENTS = re.compile(
    r"# (Of|Those|Likewise|Whose|Which|To that|So that|By that|None of|Also of|Neither of|As of)\b"
)


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(PACKAGE)) for f in FILES])
def test_dependencies_point_one_way(file):
    part = file.relative_to(PACKAGE).with_suffix("").parts[0]
    if part not in ALLOWED:
        return
    for module in imports_of(file):
        if module.startswith("moe_graphs."):
            target = module.removeprefix("moe_graphs.")
            assert any(target == a or target.startswith(f"{a}.") for a in ALLOWED[part]), module


def test_the_library_imports_neither_the_train_application_nor_the_planner():
    """The registry alone knows where an optimizer of the command is, and by its name."""
    beside = ("moe_graphs.lm", "moe_graphs.planning")
    for file in FILES:
        part = file.relative_to(PACKAGE).with_suffix("").parts[0]
        if part not in ("lm", "planning", "cli"):
            found = {module for module in imports_of(file) if module.startswith(beside)}
            assert not found, file


def test_the_engine_needs_torch_and_nothing_else():
    for file in (PACKAGE / "engine").rglob("*.py"):
        outside = {name.split(".")[0] for name in imports_of(file)} - set(sys.stdlib_module_names)
        assert outside <= {"torch", "moe_graphs", "cuda"}, file


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(PACKAGE)) for f in FILES])
def test_files_and_functions_stay_short(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 1000
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            documentation = (ast.get_docstring(node) or "").splitlines()
            lines = node.end_lineno - node.lineno - len(documentation)
            assert lines < 60 or node.name == "train", node.name


def test_files_of_tests_stay_short():
    lengths = {file.name: len(file.read_text().splitlines()) for file in TESTS}
    assert not {name: length for name, length in lengths.items() if length > 1000}


def test_tests_lie_in_folders_of_the_package():
    """Files about the package as a whole, and about its own files, lie in `tests` itself."""
    folders = {file.relative_to(PACKAGE).parent for file in FILES}
    for file in TESTS:
        folder = file.relative_to(Path(__file__).parent).parent
        assert folder in folders or str(folder) in OF_TESTS_ALONE, file
        assert file.name.startswith(("test_", "conftest")) or str(folder) in OF_TESTS_ALONE, file


def test_importing_the_package_imports_no_optional_one():
    code = (
        "import sys, moe_graphs\n"
        "for name in ('transformer_engine', 'megablocks', 'transformers', 'lightning', 'triton',"
        " 'matplotlib', 'rich', 'typer'):\n"
        "    assert name not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_the_package_imports_late_is_what_type_checkers_see():
    (block,) = [node for node in ast.parse(FILES[0].read_text()).body if isinstance(node, ast.If)]
    seen = {
        node.module.removeprefix("moe_graphs."): tuple(name.name for name in node.names)
        for node in block.body
    }
    assert seen == moe_graphs._HOMES
    assert sorted(name for names in seen.values() for name in names) == moe_graphs.__all__
    for name in moe_graphs.__all__:
        assert getattr(moe_graphs, name).__name__ == name
        assert name in dir(moe_graphs)
    with pytest.raises(AttributeError, match="no attribute 'grap'"):
        _ = moe_graphs.grap


def test_no_file_names_a_package_registry():
    root = PACKAGE.parent
    hosts = ("py" + "pi.", "files.pythonhosted" + ".", "download.pytorch" + ".", "npm" + "js")
    for file in [*root.glob("*.*"), *root.glob("Makefile"), *PACKAGE.rglob("*.py")]:
        if file.is_file():
            assert not any(host in file.read_text(errors="ignore") for host in hosts), file


def test_no_import_circle():
    """Imports for type checkers count; an import from a package is one of the module in it."""
    modules = {module_name(file): file for file in FILES}
    needs = {name: needed_by(file, modules) - {name} for name, file in modules.items()}
    left = set(needs)
    while free := {name for name in left if not needs[name] & left}:
        left -= free
    # A module that nobody in the rest needs is in no circle, although it needs one.
    while outer := {name for name in left if not any(name in needs[each] for each in left)}:
        left -= outer
    assert not left


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def needed_by(file: Path, modules: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{name.name}" for name in node.names}
            found |= inside & modules.keys() or {node.module} & modules.keys()
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names} & modules.keys()
    return found


def test_docstrings_and_comments_begin_with_a_phrase_that_stands_by_itself():
    root = PACKAGE.parent
    folders = ("benchmarks", "docs", "examples", "moe_graphs", "tests")
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    assert not [line for file in files for line in fragments_of(file)]


def fragments_of(file: Path) -> list[str]:
    text = file.read_text()
    found = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), 1)
        if FRAGMENTS_OF_COMMENTS.match(line.strip())
    ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str) and FRAGMENTS.match(value.strip()):
                found.append((node.lineno, value.strip().splitlines()[0]))
    return [f"{file.relative_to(PACKAGE.parent)}:{number}: {line}" for number, line in found]
