"""The origin of code: some code is compared, and some is taken for granted."""

from __future__ import annotations

import functools
import json
import sys
import types
import typing

import hypothesis
import pytest
import torch

from moe_graphs.engine.guards import introspection
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.guards import Guards
from moe_graphs.engine.whole_step.full_iteration import FullIteration


def test_what_is_installed_is_no_users():
    triton = pytest.importorskip("triton")
    found = [introspection.origin_of(each.__file__) for each in (torch, triton, json, hypothesis)]
    assert found == ["internal", "internal", "internal", "library"]
    assert introspection.origin_of(__file__) == "own"
    assert introspection.origin_of(FullIteration.__call__.__code__.co_filename) == "internal"


def test_a_torch_that_was_built_where_its_sources_are_is_torch(tmp_path, monkeypatch):
    (tmp_path / "built_in_place").mkdir()
    file = tmp_path / "built_in_place" / "__init__.py"
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(introspection, "_INTERNAL", ("not_there", "built_in_place"))
    uncached = introspection._internal_places.__wrapped__
    monkeypatch.setattr(introspection, "_internal_places", uncached)
    assert introspection.origin_of.__wrapped__(str(file)) == "internal"
    assert introspection.origin_of.__wrapped__(str(tmp_path / "built_in_place_by_me.py")) == "own"


@pytest.mark.parametrize(
    ("file", "origin"),
    [
        ("/env/lib/site-packages/project/model.py", "own"),
        ("/env/lib/site-packages/module_of_the_user.py", "own"),
        ("/env/lib/site-packages/transformers/modeling_utils.py", "library"),
        ("/env/lib/dist-packages/einops/einops.py", "library"),
        ("<string>", "own"),
        ("<ipython-input-1-cell>", "own"),
        ("<frozen importlib._bootstrap>", "internal"),
        (torch.nn.functional.__file__, "internal"),
    ],
)
def test_the_origin_of_code(file, origin):
    assert introspection.origin_of(file) == origin


@pytest.mark.parametrize("kind", [typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple])
def test_type_variables_have_no_state(kind):
    """Python 3.12 has them in C. Modules of einops have some, and so have modules of users."""
    assert introspection.is_without_state(kind)


def test_generated_code_has_the_origin_of_its_module():
    (code,) = (each for each in compile("lambda: 0", "<string>", "eval").co_consts
               if isinstance(each, types.CodeType))  # fmt: skip
    assert introspection.origin_of_code(code, {"__file__": torch.__file__}) == "internal"
    assert introspection.origin_of_code(code, {}) == "own"


def test_loading_a_module_reads_nothing(tmp_path, monkeypatch):
    """A first import within a call runs finders, such as pytest's, and the module's body."""

    class Finder:
        calls = 0

        def find_spec(self, *asked):
            self.calls += 1

    finder = Finder()
    (tmp_path / "loaded_late.py").write_text("def f():\n    return a_name\n\na_name = 1\nf()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.meta_path", [finder, *sys.meta_path])
    with AccessedNames() as accessed:
        import loaded_late

        json.dumps(loaded_late.a_name)
    assert finder.calls
    assert id(finder) not in accessed.owners
    assert not {"meta_path", "calls"} & accessed.names_of_modules
    assert "dumps" in {code.co_name for code in accessed.code}


@pytest.mark.parametrize("is_over", [False, True], ids=["as at the forward", "set back"])
def test_names_of_a_backward_are_compared_unless_something_has_changed_since_the_forward(is_over):
    """``accelerate_model`` sets transformers' kind of attention for the time of a forward."""
    owner = types.SimpleNamespace(mode="inside", slope=1.0)

    def forward():
        return owner.mode

    def backward():
        return owner.slope

    with AccessedNames() as of_forward:
        forward()
    with AccessedNames() as of_backward:
        backward()
    guards = Guards({"forward": forward}, of_forward)
    owner.mode = "outside" if is_over else "inside"
    guards.also_read(of_backward)
    owner.mode = "inside"
    assert guards.mismatch() is None
    owner.slope = 2.0
    assert (guards.mismatch() is None) == is_over


@pytest.mark.parametrize("maxsize", [None, 8])
def test_answers_of_a_cached_function_are_compared_and_others_may_come(maxsize):
    gains = {0: [1.0], 1: [2.0]}

    @functools.lru_cache(maxsize)
    def cached(which=0):
        return gains[which]

    def forward():
        return cached()[0]

    with AccessedNames() as accessed:
        forward()
    guards = Guards({"forward": forward}, accessed)
    cached(1)
    assert guards.mismatch() is None
    gains[0][0] = 3.0
    assert "cached" in guards.mismatch().message
    gains[0][0] = 1.0
    assert guards.mismatch() is None
    cached.cache_clear()
    assert "answers" in guards.mismatch().message
    cached()
    assert guards.mismatch() is None


def test_a_cached_function_may_lose_the_attribute_that_names_what_it_wraps():
    """Python keeps the function itself, and calls go on."""

    @functools.lru_cache
    def cached():
        return 2.0

    def forward():
        return cached()

    with AccessedNames() as accessed:
        forward()
    del cached.__wrapped__
    assert Guards({"forward": forward}, accessed).mismatch() is None
