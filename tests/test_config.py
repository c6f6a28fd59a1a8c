"""Each rule of ``config.py``: what it refuses, and what its message says to change."""

from __future__ import annotations

import pytest
from torch import nn

import moe_graphs
from moe_graphs import GraphConfig
from moe_graphs.dispatch import AllToAllDispatcher
from moe_graphs.engine.partial.scope import find_scopes
from training_runs import tiny_model

BROKEN = {
    "unknown": (dict(scopes="attn,moe_ruoter"), "did you mean 'moe_router'"),
    "unknown_without_guess": (
        dict(scopes="xyz"),
        r"a pattern on its name, such as '\*xyz'.* list by 'xyz\..'",
    ),
    "duplicate": (dict(scopes=["attn", "attn"]), "listed twice"),
    "impl_none": (dict(scopes="attn", impl="none"), "leave scopes out to train eagerly"),
    "nothing_chosen": (dict(scopes=[]), "name scopes or impl='none'"),
    "full_is_alone": (dict(scopes="full,attn"), "stands alone"),
    "moe_excludes_its_parts": (dict(scopes="moe,moe_router"), "drop moe_router"),
    "preprocess_needs_router": (dict(scopes="moe_preprocess"), "add 'moe_router'"),
    "impl_unknown": (dict(impl="inductor"), "accepted are none, local, transformer_engine$"),
    "impl_of_a_whole_step": (dict(impl="full_iteration"), "use moe_graphs.FullIteration"),
    "scope_of_a_whole_step": (dict(scopes="full_iteration"), "use moe_graphs.FullIteration"),
    "on_mismatch": (dict(on_mismatch="warn"), "accepted are 'eager', 'error'"),
    "warmup_steps": (dict(warmup_steps=0), "at least 1"),
}


@pytest.mark.parametrize(("options", "message"), BROKEN.values(), ids=BROKEN)
def test_a_config_that_breaks_a_rule_says_what_to_change(options, message):
    with pytest.raises(ValueError, match=message):
        GraphConfig(**options)


BROKEN_FOR_MODEL = {
    "mlp_needs_a_dense_layer": (dict(layers="moe"), "attn,mlp", "'mlp' needs a dense layer"),
    "moe_needs_an_moe_layer": (dict(layers="dense"), "moe", "'moe' needs a MoE layer"),
    "moe_router_needs_an_moe_layer": (dict(layers="dense"), "moe_router", "needs a MoE layer"),
    "moe_without_host_sync": (
        dict(dispatcher=AllToAllDispatcher()),
        "attn,moe",
        "synchronises with the host .dispatcher 'all_to_all'.*use 'moe_router,moe_preprocess'",
    ),
    "full_without_host_sync": (dict(dispatcher=AllToAllDispatcher()), "full", "all_to_all"),
    "pattern_without_match": (dict(), "*.self_attn", "matches no submodule"),
    "container_without_a_forward": (
        dict(),
        "lay*",
        "a ModuleList.* take 'layers..' for its members",
    ),
    "same_module_twice": (dict(), "*.attention,layers.0.att*", "the same module"),
    "one_inside_the_other": (dict(), "layers.0,layers.0.attention", "lies inside scope"),
}


@pytest.mark.parametrize(
    ("options", "scopes", "message"), BROKEN_FOR_MODEL.values(), ids=BROKEN_FOR_MODEL
)
def test_a_config_that_does_not_fit_the_model_says_what_to_change(options, scopes, message):
    model = tiny_model("cpu", **options)
    with pytest.raises(ValueError, match=message):
        moe_graphs.graph(model, GraphConfig(scopes))
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_model_without_stages_is_told_about_patterns():
    with pytest.raises(ValueError, match="stages found: none.*pattern"):
        moe_graphs.graph(nn.Sequential(nn.Linear(2, 2)), GraphConfig("attn"))


def test_defaults_and_spellings():
    assert GraphConfig().scopes == ("attn",)
    assert GraphConfig(impl="none").scopes == ()
    assert GraphConfig("attn, moe_router").scopes == ("attn", "moe_router")
    assert GraphConfig(["attn", "*.mlp"]).scopes == ("attn", "*.mlp")


def test_megatron_flags():
    assert GraphConfig.from_megatron().scopes == ("full",)
    config = GraphConfig.from_megatron(
        cuda_graph_impl="local", cuda_graph_scope="attn,moe_router", cuda_graph_warmup_steps=5
    )
    assert (config.scopes, config.warmup_steps) == (("attn", "moe_router"), 5)
    modules = ["attn", "moe_router", "moe_preprocess"]
    assert GraphConfig.from_megatron(cuda_graph_modules=modules).scopes == tuple(modules)
    assert GraphConfig.from_megatron(cuda_graph_impl="none").scopes == ()
    with pytest.raises(ValueError, match="set one"):
        GraphConfig.from_megatron(cuda_graph_scope="attn", cuda_graph_modules="attn")


def test_megatrons_other_implementation_is_the_same_capture():
    theirs = "transformer_engine"
    for scopes in (None, "attn", "attn,moe_router,moe_preprocess"):
        flags = dict(cuda_graph_scope=scopes, cuda_graph_warmup_steps=4)
        config = GraphConfig.from_megatron(theirs, **flags)
        assert config == GraphConfig.from_megatron("local", **flags)
    assert GraphConfig(impl=theirs) == GraphConfig()
    assert str(GraphConfig("attn,mlp", theirs)) == "local, attn,mlp"
    with pytest.raises(ValueError, match="captures nothing: name scopes"):
        GraphConfig([], theirs)
    with pytest.raises(ValueError, match="use moe_graphs.FullIteration"):
        GraphConfig.from_megatron("full_iteration")


def test_a_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="devices cpu, meta: graphs need exactly one"):
        moe_graphs.graph(model, GraphConfig("0*"))


def test_a_pattern_with_a_dot_matches_names_at_the_top():
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "inner": nn.Sequential(nn.Linear(2, 2))})
    model["inner"].add_module("encoder", nn.Linear(2, 2))
    found = find_scopes(model, GraphConfig("*.encoder"))
    assert [scope.name for scope in found] == ["encoder", "inner.encoder"]


def test_the_hint_for_a_name_at_the_top_is_a_pattern_that_shows_its_match():
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"unknown scope 'encoder'.* such as '\*encoder'"):
        GraphConfig("encoder")
    assert [scope.name for scope in find_scopes(model, GraphConfig("*encoder"))] == ["encoder"]
