"""Every reason that the engine counts is explained, with a remedy, in the code and in the guide."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import moe_graphs
from moe_graphs.engine.reasons import COPIED_GRADIENTS, EAGER_CALLS, Reason, reason_for

PACKAGE = Path(moe_graphs.__file__).parent
GUIDE = PACKAGE.parent / "docs" / "guide.md"
# Functions that return a reason for an eager call, or for a copied gradient.
OF_CALLS = {"reason_to_run_eagerly", "reason_of_modes", "eager_reason", "unreplayable", "other"}
OF_COPIES = {"copies_gradients", "uses_again", "reason_to_copy"}
WORD = re.compile(r"[a-z_0-9]+")


def words_in(node: ast.AST | None) -> set[str]:
    """Words that an expression may be: constants, and both ends of conditions between them."""
    if isinstance(node, ast.IfExp):
        return words_in(node.body) | words_in(node.orelse)
    if isinstance(node, ast.BoolOp):
        return set().union(*map(words_in, node.values))
    if isinstance(node, ast.Tuple):
        return set().union(*map(words_in, node.elts))
    word = getattr(node, "value", None)
    return {word} if isinstance(word, str) and WORD.fullmatch(word) else set()


def assigned(tree: ast.AST) -> set[str]:
    """Words that a variable ``reason`` gets where the next line makes a ``Mismatch`` of it."""
    made = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and getattr(n.func, "id", "") == "Mismatch"
        and getattr(n.args[0], "id", "") == "reason"
    ]
    targets = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and made
               and getattr(n.targets[0], "id", "") == "reason"]  # fmt: skip
    return set().union(*(words_in(n.value) for n in targets))


def returned(tree: ast.AST, functions: set[str]) -> set[str]:
    made = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in functions]
    returns = [n.value for each in made for n in ast.walk(each) if isinstance(n, ast.Return)]
    return set().union(*map(words_in, returns))


def counted(tree: ast.AST, counters: set[str], calls: dict[str, int]) -> set[str]:
    """Words that index one of the counters, or are the given argument of a call."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") in counters:
            found |= words_in(node.slice)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if len(node.args) > calls.get(name, 99) >= 0:
                found |= words_in(node.args[calls[name]])
    return found


def fields(tree: ast.AST) -> set[str]:
    """Names of the properties of a tensor that are compared; each of them is a reason."""
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For)]
    return set().union(*(words_in(n.iter) for n in loops if getattr(n.target, "id", "") == "field"))


def of_sources() -> tuple[set[str], set[str]]:
    calls, copies = {"warmup", "off", "released", "capture_failed"}, set()
    takes = {"Mismatch": 0, "_eager": 1, "ran_backward_eagerly": 0, "ran_eagerly": 1}
    for file in [*(PACKAGE / "engine").rglob("*.py")]:
        tree = ast.parse(file.read_text())
        calls |= returned(tree, OF_CALLS) | counted(tree, {"eager_calls", "_eager_calls"}, takes)
        copies |= returned(tree, OF_COPIES) | counted(tree, {"copied"}, {})
        calls |= assigned(tree)
        calls |= fields(tree) if file.name == "tensors.py" else set()
    return calls, copies


def test_every_reason_of_the_sources_is_explained():
    calls, copies = of_sources()
    assert len(calls) > 35
    assert len(copies) > 8
    # These reasons are no literals of the engine: f"{held}_held", options of transformers, and
    # words that Graphs.paused() is given.
    made = {"output_held", "gradient_held", "gradient_checkpointing", "paused", "lengths"}
    assert calls | made == EAGER_CALLS.keys()
    assert copies | {"not_observed", "several_shapes"} == COPIED_GRADIENTS.keys()


def test_a_reason_that_nobody_explains_is_found(tmp_path, monkeypatch):
    (tmp_path / "engine").mkdir()
    source = 'def f():\n    return Mismatch("new_reason", "message")\n'
    (tmp_path / "engine" / "new.py").write_text(source)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert "new_reason" in of_sources()[0]


@pytest.mark.parametrize("word", ["shape", "backward: shape", "output_attentions", "another"])
def test_every_word_has_an_entry(word):
    assert isinstance(reason_for(word), Reason)


def table(reasons) -> str:
    rows = [f"| `{word}` | {r.explanation} | {r.remedy} |" for word, r in reasons.items()]
    return "\n".join(["| reason | what has happened | what to do |", "|---|---|---|", *rows])


@pytest.mark.parametrize("reasons", [EAGER_CALLS, COPIED_GRADIENTS], ids=["calls", "gradients"])
def test_the_guide_has_the_table(reasons):
    assert table(reasons) in GUIDE.read_text(), table(reasons)
