"""Size of the package, and number of its files that a call passes, measured alike for any commit.

    git worktree add /tmp/before 84279f8
    python tests/support/house.py --checkout /tmp/before    # appends a line to house.jsonl
    python tests/support/house.py                           # this checkout
    python tests/support/house.py --table                   # writes house.md from the lines

Sizes are read from the sources. Files and functions of a call are those of the package whose Python
frames run during the call (`sys.setprofile`), each counted once; bodies of modules do not count.
The graphs are those of the CPU recorder.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
LINES = ROOT / "docs" / "development" / "house.jsonl"
TABLE = LINES.with_suffix(".md")
CALLS = (
    "replay of a scope, forward",
    "replay of a scope, backward",
    "capturing step of a scope",
    "replay of a whole step",
    "eager MoELayer, forward",
)

# ---- sizes, read from the sources


def sources(package: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Dotted names that a module imports, relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") + ([""] if is_package else [])
                base = ".".join(filter(None, [*parts[: -node.level], base]))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def arrows(modules: dict[str, Path]) -> set[tuple[str, str]]:
    """Pairs of files of which the first imports the second."""
    found = set()
    for name, path in modules.items():
        for target in imported(ast.parse(path.read_text()), name, path.name == "__init__.py"):
            known = target if target in modules else target.rpartition(".")[0]
            if known in modules and modules[known] != path:
                found.add((str(path), str(modules[known])))
    return found


def public_parameters(tree: ast.AST) -> int:
    """Parameters of functions and methods whose names, and whose classes' names, are public."""
    count = 0
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            count += public_parameters(node)
        elif isinstance(node, ast.FunctionDef) and (
            not node.name.startswith("_") or node.name == "__init__"
        ):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count += sum(argument.arg not in ("self", "cls") for argument in given)
    return count


def sizes(package: Path) -> dict[str, int]:
    modules = sources(package)
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    texts = {name: path.read_text() for name, path in modules.items()}
    engine = {name: path for name, path in modules.items() if ".engine" in name}
    tests = sorted((package.parent / "tests").rglob("*.py"))
    return {
        "files": len(modules),
        "lines": sum(text.count("\n") for text in texts.values()),
        "statements": sum(
            isinstance(node, ast.stmt) for tree in trees.values() for node in ast.walk(tree)
        ),
        "functions": sum(
            isinstance(node, ast.FunctionDef) for tree in trees.values() for node in ast.walk(tree)
        ),
        "public parameters": sum(map(public_parameters, trees.values())),
        "imports between files": len(arrows(modules)),
        "engine: files": len(engine),
        "engine: lines": sum(texts[name].count("\n") for name in engine),
        "engine: imports between files": len(arrows(engine)),
        "tests: lines": sum(path.read_text().count("\n") for path in tests),
        "tests: assertions": sum(
            isinstance(node, ast.Assert)
            for path in tests
            for node in ast.walk(ast.parse(path.read_text()))
        ),
    }


# ---- calls, in a process that imports the checkout's package


def passed(call: Callable[[], object], package: Path) -> dict[str, int]:
    """Files and functions of the package whose frames run during ``call``."""
    seen: set[tuple[str, str, int]] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(package)):
            seen.add((code.co_filename, code.co_name, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    functions = {place for place in seen if place[1] != "<module>"}
    return {"files": len({place[0] for place in functions}), "functions": len(functions)}


def calls(package: Path) -> dict[str, dict[str, int]]:
    import torch
    from torch import nn

    import moe_graphs
    from moe_graphs.layers import MoEConfig, MoELayer

    found: dict[str, dict[str, int]] = {}
    model = nn.Sequential()
    model.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    graphs = moe_graphs.graph(model, moe_graphs.GraphConfig(scopes="blocks.0"))
    kept: dict[str, Any] = {}

    def forward() -> None:
        kept["loss"] = model(torch.randn(4, 8)).sum()

    def backward() -> None:
        kept.pop("loss").backward()

    def step() -> None:
        with graphs.step():
            forward()
            backward()

    for _ in range(3):
        step()
    found["capturing step of a scope"] = passed(step, package)
    for _ in range(2):
        step()
    with graphs.step():
        found["replay of a scope, forward"] = passed(forward, package)
        found["replay of a scope, backward"] = passed(backward, package)
    graphs.release()

    whole = nn.Linear(8, 8)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss = whole(batch).sum()
        loss.backward()
        return loss.detach()

    has_audits = "audit_every" in inspect.signature(moe_graphs.FullIteration).parameters
    options = {"audit_every": None} if has_audits else {}  # an audit would be no replay
    iteration = moe_graphs.FullIteration(loss_of, model=whole, **options)
    for _ in range(8):
        iteration(torch.randn(4, 8))
    batch = torch.randn(4, 8)
    found["replay of a whole step"] = passed(lambda: iteration(batch), package)

    layer = MoELayer(MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8), 8)
    x = torch.randn(2, 4, 8)
    layer(x)
    found["eager MoELayer, forward"] = passed(lambda: layer(x), package)
    return found


def modules_of(arguments: list[str], checkout: Path) -> int:
    """Number of the package's modules that a command imports, in a process of its own."""
    code = (
        "import sys, runpy\n"
        "try: exec(sys.argv[1])\n"
        "except SystemExit: pass\n"
        "print(sum(name.split('.')[0] == 'moe_graphs' for name in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, check=True, env=environment, cwd=checkout,
    )  # fmt: skip
    return int(done.stdout.split()[-1])


def measure(checkout: Path) -> dict[str, Any]:
    """Everything of one checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE), "--calls", "--checkout", str(checkout)],
        capture_output=True, text=True, check=True, env=environment, cwd=checkout,
    )  # fmt: skip
    command = "sys.argv = ['moe-graphs', '--help']; from moe_graphs.cli import main; main()"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--exclude=*"],
        capture_output=True, text=True, cwd=checkout,
    )  # fmt: skip
    return {
        "commit": commit.stdout.strip(),
        "sizes": sizes(checkout / "moe_graphs"),
        "modules imported": {
            "import moe_graphs": modules_of(["import moe_graphs"], checkout),
            "moe-graphs --help": modules_of([command], checkout),
        },
        "calls": json.loads(done.stdout.splitlines()[-1]),
    }


# ---- the page

HEAD = """# The size of the house, before and after

`python tests/support/house.py --checkout DIR` measures a checkout and appends a line to
[house.jsonl](house.jsonl); `--table` writes this page from the lines. How each number is counted
stands at the top of `tests/support/house.py`.

"""


def table(lines: list[dict[str, Any]]) -> str:
    """One row per number, one column per measured commit."""
    rows: dict[str, list[str]] = {}
    for line in lines:
        numbers = dict(line["sizes"])
        numbers |= {f"modules imported: `{k}`": v for k, v in line["modules imported"].items()}
        for name in CALLS:
            found = line["calls"][name]
            numbers[f"{name}: files, functions"] = f"{found['files']}, {found['functions']}"
        for name, value in numbers.items():
            rows.setdefault(name, []).append(f"{value:,}" if isinstance(value, int) else value)
    head = ["", *(f"`{line['commit']}`" for line in lines)]
    ruler = ["---", *("---:" for _ in lines)]
    body = [[name, *cells] for name, cells in rows.items()]
    return HEAD + "\n".join(f"| {' | '.join(row)} |" for row in [head, ruler, *body]) + "\n"


def read() -> list[dict[str, Any]]:
    return [json.loads(text) for text in LINES.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=ROOT, help="measured; this one by default")
    parser.add_argument("--table", action="store_true", help="write the page from the lines")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls:
        print(json.dumps(calls(options.checkout.resolve() / "moe_graphs")))
    elif options.table:
        TABLE.write_text(table(read()))
    else:
        line = json.dumps(measure(options.checkout.resolve()))
        with LINES.open("a") as file:
            file.write(line + "\n")
        print(line)


if __name__ == "__main__":
    main()
