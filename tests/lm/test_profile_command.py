"""``moe-graphs profile`` as users type it, on the CPU."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from moe_graphs.cli import build_app
from moe_graphs.config import FullIterationConfig, GraphConfig
from moe_graphs.lm.profile_command import parse_ways

SMALL = [
    *("--preset", "tiny", "--device", "cpu"),
    *("--batch-size", "2", "--microbatches", "2", "--sequence-length", "16"),
]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["profile", *map(str, arguments)])


@pytest.mark.long
def test_two_ways_side_by_side(text, tmp_path):
    picture, trace = tmp_path / "step.png", tmp_path / "step.json"
    ways = ["--impl", "attn+moe,full_iteration", "--optimizer-in-graph"]
    result = invoke(*SMALL, *ways, "--data", text, "--out", picture, "--trace", trace, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    profiles = json.loads(result.stdout)["profiles"]
    assert [each["name"] for each in profiles] == ["attn+moe", "full_iteration"]
    for each in profiles:
        groups = {group["name"]: group for group in each["traced"]["groups"]}
        assert each["step_ms"] > 0
        for name in ("grouped GEMM", "dense GEMM", "attention", "optimizer", "cross entropy"):
            assert groups[name]["calls"] >= 1, name
        assert 0 < groups["grouped GEMM"]["reached"] < 1
        shared = sum(group["share_ms"] for group in groups.values())
        assert shared == pytest.approx(each["traced"]["busy_ms"])
    assert "TFLOP/s in a dense matrix product of float32" in result.stderr
    assert "where the time of a step goes" in result.stderr
    assert "attn+moe: replayed" in result.stderr
    assert picture.stat().st_size > 10_000
    for way in ("attn+moe", "full_iteration"):
        events = json.loads((tmp_path / f"step_{way}.json").read_text())["traceEvents"]
        assert any(event["name"] == "aten::mm" for event in events)


def test_ways_are_configs():
    ways = parse_ways("none, local,moe_router+moe_preprocess,full_iteration", False, "attn,moe")
    assert list(ways) == ["none", "local", "moe_router+moe_preprocess", "full_iteration"]
    assert ways["none"] is None
    assert ways["local"] == GraphConfig("attn,moe", audit_every=None)
    assert ways["moe_router+moe_preprocess"] == GraphConfig(
        "moe_router,moe_preprocess", audit_every=None
    )
    assert ways["full_iteration"] == FullIterationConfig(False, audit_every=None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--impl", "atn"], "did you mean 'attn'"),
        (["--impl", "none,none"], "listed twice"),
        (["--impl", ","], "name at least one"),
        (["--impl", "none", "--optimizer-in-graph"], "add it, or drop the flag"),
        (["--preset", "huge"], "'huge' is unknown: choose one of tiny, small"),
        (["--dtype", "int8"], "int8"),
        (["--out", "/nowhere/step.png"], "no directory /nowhere"),
        (["--batch-size", 3], "does not divide"),
    ],
)
def test_refused_in_a_line(arguments, words):
    result = invoke(*SMALL, *arguments)
    assert result.exit_code == 1
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
