"""The origin of code: some code is compared, and some is taken for granted."""

from __future__ import annotations

import json

import hypothesis
import pytest
import torch

from moe_graphs.engine.guards import introspection
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
