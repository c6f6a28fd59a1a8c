"""The comparison with other libraries: equal computations, and failures that are reported."""

from __future__ import annotations

import fcntl
import importlib
import json
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

import library_stand_ins
import moe_layer
import peers
from contenders import fullest
from grids import by_turns
from moe_graphs.layers import MoEConfig
from moe_graphs.layers.moe import MoELayer
from peer_models import cases, entries, worker
from peer_models import lines as result_rows

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins for libraries that need a GPU; modules built with them are imported anew."""
    library_stand_ins.install(monkeypatch, library_stand_ins.transformer_engine())
    library_stand_ins.install(monkeypatch, library_stand_ins.megablocks())
    yield
    for name in ("te_peer", "megablocks_peer"):
        sys.modules.pop(f"peer_models.{name}", None)


def first_losses(name, case):
    library = importlib.import_module(f"peer_models.{entries.ENTRIES[name].module}")
    run = worker.build(library, name, case, CPU)
    run.warm_up()
    return torch.tensor(run.first_losses), run


@pytest.mark.parametrize(
    ("name", "case"),
    by_turns(
        ["torchtitan", "huggingface", "te", "te-fp8-block", "megablocks-grouped"],
        ["mixtral", "launch_bound"],
    ),
)
def test_a_peer_computes_what_we_compute(libraries, case, name):
    """Train five steps with the same weights and tokens.

    The first step shows that every weight is in its place, the others show it for every gradient.
    """
    smoke = cases.cases()[case].smoke()
    expected, ours = first_losses("ours", smoke)
    losses, run = first_losses(name, smoke)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)
    assert losses.unique().numel() == 5
    numbers = [sum(p.numel() for p in each.model.parameters()) for each in (run, ours)]
    assert numbers[0] == numbers[1]


def test_a_block_of_another_library_takes_the_place_of_the_plain_one(monkeypatch):
    """Every weight of the block is in its place, also in the layer alone, with skewed routing."""
    smoke = cases.cases()["launch_bound"].smoke()
    expected, _ = first_losses("ours", smoke)
    block = entries.Entry("block", "block_peer", {"block": "HF grouped_mm"})
    monkeypatch.setitem(entries.ENTRIES, "block", block)
    losses, _ = first_losses("block", smoke)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)
    size = moe_layer.Size(tokens=64, hidden=32, ffn=16, experts=8, top_k=2)
    layer = MoELayer(MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=16), 32)
    x, grad = torch.randn(64, 32).requires_grad_(), torch.randn(64, 32)
    loads = [moe_layer.skew(layer, x, routing) for routing in moe_layer.ROUTINGS]
    assert loads[0] < 2 < loads[1]
    theirs = moe_layer.peer(size, "HF grouped_mm", layer)
    got = [t.clone() for t in theirs.train(x, grad)]
    ours = moe_layer.Contender("ours", layer, lambda x: layer(x).hidden)
    torch.testing.assert_close(got, list(ours.train(x, grad)))


def test_a_weight_that_is_elsewhere_shows(libraries, monkeypatch):
    """The comparison above can fail: here keys and values are exchanged."""
    import peer_models.weights as weights

    smoke = cases.cases()["launch_bound"].smoke()
    expected, _ = first_losses("ours", smoke)
    real = weights.LayerWeights.of

    def exchanged(*arguments):
        found = real(*arguments)
        return replace(found, key=found.value, value=found.key)

    monkeypatch.setattr(weights.LayerWeights, "of", exchanged)
    losses, _ = first_losses("te", smoke)
    assert (losses - expected).abs().max() > 1e-4


@pytest.mark.parametrize("case", ["mixtral", "launch_bound"])
def test_weights_decide_the_routing_of_every_contender(libraries, case):
    """Loads are as asked, steps do not change them, and every contender has the same losses."""
    loads = {}
    for routing in ("even", "zipf"):
        asked = replace(cases.cases()[case].smoke(), routing=routing)
        expected, ours = first_losses("ours", asked)
        losses, theirs = first_losses("te", asked)
        torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)
        assert ours.load == theirs.load
        assert fullest(ours.model, asked.batches(CPU)[0, :, :-1]) == ours.load
        loads[routing] = ours.load
    assert loads["even"] < 1.6 < 2 < loads["zipf"]


def test_every_contender_has_a_file_and_a_title_of_its_own():
    found = entries.ENTRIES.values()
    assert len({entry.title for entry in found}) == len(found)
    for entry in found:
        assert (BENCHMARKS / "peer_models" / f"{entry.module}.py").exists()


def test_no_benchmark_hides_a_library():
    """No file of the benchmarks has a library's name; the folder is on the path of imports."""
    libraries = {"grouped_gemm", "megablocks", "megatron", "stk", "transformer_engine", "trl"}
    path = [folder for folder in sys.path if Path(folder).name.endswith("-packages")]
    for file in BENCHMARKS.glob("*.py"):
        assert file.stem not in libraries
        assert PathFinder.find_spec(file.stem, path) is None, file


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Lines of two contenders in processes of their own: whole steps, and a missing library."""
    out = tmp_path_factory.mktemp("peers") / "lines.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "ENTRIES", dict(entries.ENTRIES))
        megatron = entries.ENTRIES["megatron"]
        there = entries.Entry(megatron.title, megatron.module, {}, runs_on_cpu=True)
        patch.setitem(peers.ENTRIES, "megatron", there)
        options = "--smoke --device cpu --contenders ours-whole,megatron --parallel 2 --commit c"
        peers.main([*options.split(), "--out", str(out)])
    found = [json.loads(text) for text in out.read_text().splitlines()]
    return sorted(found, key=lambda line: line["contender"], reverse=True)


@pytest.mark.long
def test_a_line_holds_what_was_measured(lines):
    good = lines[0]
    assert (good["benchmark"], good["model"], good["contender"]) == (
        "peers", "launch_bound", "ours-whole",
    )  # fmt: skip
    assert good["error"] is None
    assert good["step_ms"]["count"] == 2
    assert good["host_ms"]["median"] > 0
    assert good["capture_s"] > 0
    assert good["graphs"]["captures"] == 1
    assert len(good["first_losses"]) == 5
    assert good["optimizer"] == "torch fused AdamW"
    assert (good["routing"], good["load"] < 1.6) == ("even", True)
    assert good["environment"]["commit"] == "c"


@pytest.mark.long
def test_a_library_that_is_missing_leaves_its_error(lines):
    assert lines[1]["contender"] == "megatron"
    assert "No module named 'megatron'" in lines[1]["error"]
    assert "step_ms" not in lines[1]


def test_what_takes_too_long_is_stopped(capsys):
    options = "--smoke --device cpu --contenders ours --time-limit 0.2 --json"
    peers.main(options.split())
    (line,) = json.loads(capsys.readouterr().out.splitlines()[-1])["lines"]
    assert "took more than 0.2 s" in line["error"]


def test_one_process_at_a_time_is_past_the_gate(tmp_path):
    gate = tmp_path / "gate"
    held = worker.take_turn(gate)
    with gate.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    held.close()
    with gate.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def record(step_ms, loss=2.0, **changes):
    return {
        "error": None, "settings": {}, "graphs": None, "timeline": None, "first_losses": [loss],
        "last_loss": 1.0, "step_samples_ms": step_ms, "host_samples_ms": [1.0],
        "reserved_bytes": 2**30, "max_allocated_bytes": 2**29, "capture_s": None,
        "first_step_s": 1.0, "build_s": 1.0,
    } | changes  # fmt: skip


def test_samples_of_several_processes_are_one_line():
    case = cases.cases()["launch_bound"]
    records = [record([1.0, 2.0, 3.0]), record([5.0, 6.0, 7.0], reserved_bytes=2**31)]
    line = result_rows.line("te", case, records, {})
    assert line["round_ms"] == [2.0, 6.0]
    assert (line["step_ms"]["median"], line["step_ms"]["count"]) == (4.0, 6)
    assert (line["reserved_bytes"], line["error"]) == (2**31, None)
    half = result_rows.line("te", case, [record([1.0]), {"error": "it died"}], {})
    assert (half["error"], half["step_ms"]["count"]) == ("it died", 1)


def test_the_table_says_who_is_ahead():
    case = cases.cases()["launch_bound"]
    made = [
        result_rows.line("ours", case, [record([10.0])], {}),
        result_rows.line("te", case, [record([8.0], loss=2.2)], {}),
        result_rows.line("torchtitan", case, [record([20.0])], {}),
        result_rows.line("megatron", case, [{"error": "Traceback\nIt died"}], {}),
    ]
    drawn = result_rows.table(case, made)
    assert [next(iter(drawn.columns[0].cells))] == ["Transformer Engine, bf16"]
    assert list(drawn.columns[3].cells) == ["0.80", "1.00", "2.00"]
    assert next(iter(drawn.columns[10].cells)) == "1.0e-01"
    assert "ahead of moe_graphs, eager: Transformer Engine, bf16 (1.25x)" in drawn.caption
    assert "behind it: as torchtitan, eager (2.00x)" in drawn.caption
    assert "It died" in drawn.caption


def test_the_table_of_the_readme():
    from peers_table import CASES, peers
    from result_lines import Line

    def stored(contender, ms, date, case="launch_bound", error=None, **more):
        stamp = {"gpu": "a GPU", "commit": "abc", "date": date, "torch": "2"}
        measured = {} if ms is None else {"step_ms": {"median": ms}, "reserved_bytes": 2**30}
        title = entries.ENTRIES[contender].title
        values = dict(
            benchmark="peers", model=case, contender=contender, title=title, error=error, **more
        )
        return Line(values | measured | {"environment": stamp}, f"{date}.jsonl")

    lines = [
        stored("ours", 10.0, "2"), stored("te", 3.0, "1"), stored("te", 8.0, "2"),
        stored("megatron", 1.0, "1"), stored("megatron", None, "2", error="Traceback\nIt died"),
        stored("te", 7.0, "1", case="mixtral"),
        stored("torchtitan", None, "1", error="not started"),
        stored("huggingface", 20.0, "2", case="mixtral"), stored("ours", 9.0, "2", case="mixtral"),
    ]  # fmt: skip
    text = peers(lines, gpu="a GPU")
    ahead = "ahead of moe_graphs, eager: Transformer Engine, bf16 (1.25x)."
    assert f"{CASES['launch_bound']}: {ahead}" in text
    rows = [row for row in text.splitlines() if row.startswith("| ")][1:]
    assert rows == [
        "| Transformer Engine, bf16 | 8.0 ms, 30%, 1.0 GiB | 7.0 ms, 677%, 1.0 GiB |",
        "| moe_graphs, eager | 10.0 ms, 24%, 1.0 GiB | 9.0 ms, 526%, 1.0 GiB |",
    ]
    assert "1 more settings were measured on one of the models only" in text
    assert "Did not run: Megatron-core, alltoall, eager: `It died`." in text  # nobody else
    assert "It reserves 1.0 GiB; least memory: Transformer Engine, bf16, 1.0 GiB." in text
    routed = [stored("ours", 12.0, "3", routing="zipf"), stored("te", 15.0, "3", routing="zipf")]
    text = peers([*lines, *routed], gpu="a GPU")
    assert f"| {CASES['launch_bound']} | {CASES['launch_bound']}, skewed |" in text
    assert "| moe_graphs, eager | 10.0 ms, 24%, 1.0 GiB | 12.0 ms, 20%, 1.0 GiB |" in text
    with pytest.raises(LookupError, match=r"no line of peers.py"):
        peers([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cases none", "unknown: choose from"),
        ("--contenders none", "match none of"),
        ("--routing none", "unknown: choose from"),
        ("--device cpu", "needs a CUDA device"),
        ("--smoke --rounds 0", "must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(capsys, options, message):
    with pytest.raises(SystemExit):
        peers.main(options.split())
    assert message in capsys.readouterr().err
