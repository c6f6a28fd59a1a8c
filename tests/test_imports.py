"""Every module can be the first one imported, and everything imported is declared."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from test_house_rules import FILES, PACKAGE, imports_of

ROOT = PACKAGE.parent
# Contenders in `moe-graphs bench gemm` where they are installed.
WHERE_INSTALLED = {"grouped_gemm", "transformer_engine"}
# Come with lightning, torch and megablocks.
WITH_ANOTHER = {"pytorch_lightning", "cuda", "stk"}
# Run by make or by a test, or imported by transformers' Trainer (accelerate), by nobody else.
RUN_ONLY = {"accelerate", "hatchling", "mkdocs-material", "mkdocstrings", "mypy", "pytest-xdist"}
RUN_ONLY |= {"playwright", "ruff"}
# A child of its own for each, after what takes long to import and is not ours.
EACH_ALONE = """
import contextlib, importlib, json, os, sys
import torch, triton
import torch._dynamo, torch.distributed.tensor
with contextlib.suppress(ImportError):
    import lightning.pytorch
with contextlib.suppress(ImportError):
    from transformers import AutoModelForCausalLM, Trainer
failed = {}
for modules in json.loads(sys.argv[1]):
    assert not any(name.startswith("moe_graphs") for name in sys.modules)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            for module in modules:
                importlib.import_module(module)
        except BaseException as problem:
            os.write(write, f"{module}: {type(problem).__name__}: {problem}"[:900].encode())
        os._exit(0)
    os.close(write)
    with open(read) as message:
        said = message.read()
    os.wait()
    if said:
        failed[modules[0]] = said
print(json.dumps(failed))
"""


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_with(module: str, file: Path, known: set[str]) -> set[str]:
    """Our modules whose code runs when this one's does: those it names, and packages above it."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(file.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)
    above = {name[: dot.start()] for name in {module, *found} for dot in re.finditer(r"\.", name)}
    return (found | above) & known


def reached_from(module: str, edges: dict[str, set[str]]) -> set[str]:
    reached, pending = set(), list(edges[module])
    while pending:
        if (one := pending.pop()) not in reached:
            reached.add(one)
            pending += edges[one]
    return reached


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def distributions(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def imported_by(files: list[Path]) -> set[str]:
    names = {name.split(".")[0] for file in files for name in imports_of(file)}
    return names - set(sys.stdlib_module_names) - {"moe_graphs", "__future__"}


@pytest.mark.long
def test_every_module_can_be_imported_first():
    """`python -c "import X"`, in an interpreter of its own for each module that a cycle contains.

    Where there is no cycle, what a module needs is complete before its own code goes on, whatever
    was imported first. Of a package that a cycle contains, Python imports the package first, and so
    its modules come behind it in one interpreter.
    """
    files = {module_name(file): file for file in FILES}
    edges = {name: imported_with(name, file, set(files)) for name, file in files.items()}
    circular = [name for name in files if name in reached_from(name, edges)]
    groups = [
        [name, *(below for below in circular if below.startswith(f"{name}."))]
        for name in circular
        if not any(name.startswith(f"{above}.") for above in circular)
    ]
    command = [sys.executable, "-W", "ignore", "-c", EACH_ALONE, json.dumps(groups)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert json.loads(done.stdout) == {}


@pytest.mark.parametrize("module", [module_name(file) for file in FILES])
def test_every_module_can_be_imported(module):
    if module.startswith("moe_graphs.integrations.lightning"):
        pytest.importorskip("lightning")
    importlib.import_module(module)


def test_dependencies_are_what_is_imported():
    """No package that no module needs, and none that is needed and not declared."""
    extras = project()["optional-dependencies"]
    needed = distributions(project()["dependencies"])
    optional = distributions(
        [each for name in ("lightning", "plot", "hf", "megablocks") for each in extras[name]]
    )
    assert imported_by(FILES) - WHERE_INSTALLED - WITH_ANOTHER == needed | (optional - RUN_ONLY)


def test_every_extra_has_code():
    scripts = [f for name in ("benchmarks", "examples") for f in (ROOT / name).rglob("*.py")]
    everything = imported_by([*FILES, *scripts, *(ROOT / "tests").rglob("*.py")])
    for extra, requirements in project()["optional-dependencies"].items():
        for name in distributions(requirements) - RUN_ONLY:
            assert {name, name.replace("-", "_")} & everything, (extra, name)
