"""The benchmark's logic: its gate, its lines and its failures."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_graphs.layers import LanguageModel

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """The benchmark's files as they import each other when run as a script."""
    names = ("environment", "contenders", "measure", "phases", "partial_graphs",
        "denoiser", "unet", "full_iteration", "layer_kernels", "optimizers", "pipeline",
        "document_attention", "fine_tuning", "huggingface",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEARDOWN_CUPTI", "0")  # the script sets both, and the patch undoes them
        patch.setenv("DISABLE_CUPTI_LAZY_REINIT", "1")
        yield types.SimpleNamespace(**{name: __import__(name) for name in names})
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def rows(modules, tmp_path_factory):
    """A run with a contender that must fail: `all_to_all` cannot capture `moe`."""
    out = tmp_path_factory.mktemp("results") / "rows.jsonl"
    options = "--tiny --device cpu --models launch_bound --rounds 2 --dispatcher all_to_all"
    modules.partial_graphs.main([*options.split(), "--out", str(out)])
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.long
def test_one_line_per_contender(rows):
    assert [row["contender"] for row in rows] == [
        "eager", "attn", "attn,moe_router,moe_preprocess", "attn,moe",
    ]  # fmt: skip
    for row in rows[:3]:
        assert row["error"] is None
        assert "bitwise equal" in row["gate"]["message"]
        assert row["step_ms"]["count"] == 4
        assert row["step_ms"]["p10"] <= row["step_ms"]["median"] <= row["step_ms"]["p90"]
        assert row["host_ms"]["median"] > 0
        assert row["environment"]["torch"] == torch.__version__
    assert rows[0]["speedup"]["median"] == 1.0
    assert rows[0]["repeat"]["count"] == 2


def test_layer_kernels(modules, tmp_path):
    out = tmp_path / "rows.jsonl"
    modules.layer_kernels.main(["--tiny", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    ops = ["split_heads", "route", "cross_entropy", "rms_norm", "linear_cross_entropy"]
    assert [row["op"] for row in rows] == ops
    assert all(0 < row["error"] < 5e-3 for row in rows)  # bf16 rounds by 2e-3
    case = next(modules.layer_kernels.cases("cpu", tiny=True))
    wrong = replace(case, ours=lambda *leaves: [1.1 * x for x in case.plain(*leaves)])
    with pytest.raises(RuntimeError, match="split_heads.*error"):
        modules.layer_kernels.measure(wrong, 1)


def test_optimizers(modules, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    modules.optimizers.main(["--tiny", "--out", str(out)])
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (row["tensors"], row["dtype"]) == (12, "bfloat16")
    assert 0 < row["ours_error"] == row["torch_error"] < 1e-2  # bf16 rounds by 2e-3 a step
    assert 0 < row["8bit_error"] < 1e-2
    assert row["environment"]["torch"] == torch.__version__
    wrong = {**modules.optimizers.OPTIONS, "lr": 1e-1}
    contenders = modules.optimizers.CONTENDERS
    monkeypatch.setitem(contenders, "ours", lambda p: torch.optim.AdamW(p, **wrong))
    with pytest.raises(RuntimeError, match="tiny.*errors"):
        modules.optimizers.measure(modules.optimizers.cases(tiny=True)[0], "cpu", 1)


def test_document_attention(modules, tmp_path, monkeypatch):
    out, benchmark = tmp_path / "rows.jsonl", modules.document_attention
    benchmark.main(["--tiny", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["documents"] for row in rows] == [1, 3]
    assert all(0 < row["varlen_error"] < 1e-2 for row in rows)
    ids = torch.tensor([[0, 0, 1, 2], [5, 5, 5, 5]])
    assert benchmark.ends_of(ids, 6).tolist() == [0, 2, 3, 4, 8, 8, 8]
    assert benchmark.ends_of(ids, 4).tolist() == [0, 2, 3, 4, 8]
    assert benchmark.ends_of(ids, 3).tolist() == [0, 2, 3, 4]
    assert benchmark.ends_of(ids, 3).dtype == torch.int32
    monkeypatch.setitem(benchmark.CONTENDERS, "varlen", benchmark.causal)
    with pytest.raises(RuntimeError, match="documents=3.*errors"):
        benchmark.measure(benchmark.cases(tiny=True)[1], "cpu", 1)


@pytest.mark.gpu
def test_document_attention_on_a_gpu(modules):
    """Flash attention by lengths has the error of the mask, in one graph for all lengths."""
    case = modules.document_attention.Case(2, 512, 7, 64, (8, 2, 64))
    record = modules.document_attention.measure(case, "cuda", 1)
    assert record["varlen_us"] > 0


@pytest.mark.long
def test_pipeline(modules, tmp_path, monkeypatch):
    """A row that fails leaves the others."""
    out = tmp_path / "rows.jsonl"
    monkeypatch.setitem(modules.pipeline.CAPTURES, "moe_graphs.graph", lambda device: 1 / 0)
    with pytest.raises(SystemExit, match="1 of 3 rows failed"):
        modules.pipeline.main(["--smoke", "--cases", "1", "--out", str(out)])
    memory, failed, made = [json.loads(line) for line in out.read_text().splitlines()]
    assert (memory["slots"], memory["graphs"], memory["graphs_of_the_seeds"]) == ([2], 8, 16)
    assert memory["eager_calls"] == {"warmup": 8}
    assert (failed["contender"], failed["error"][:17]) == ("moe_graphs.graph", "ZeroDivisionError")
    assert (made["scopes"], made["slots"]) == (12, 4)
    monkeypatch.undo()
    row = modules.pipeline.captured_as_graphs(torch.device("cpu"))
    assert row["seconds"] > 0
    monkeypatch.setattr(modules.pipeline, "STEPS", 1)
    with pytest.raises(modules.pipeline.NotReplayed, match="capturing, eager calls {'warmup': 48}"):
        modules.pipeline.captured_as_graphs(torch.device("cpu"))


def test_layer_kernels_times_nothing_but_the_op(modules):
    """Gradients of the outputs once were made in the timed part, and took four times as long."""
    for case in modules.layer_kernels.cases("cpu", tiny=True):
        leaves = [leaf.requires_grad_() for leaf in case.leaves]
        step = case.step(case.plain, leaves)
        with torch.profiler.profile() as profiler:
            step()
        assert not {"aten::linspace", "aten::full"} & {
            event.key for event in profiler.key_averages()
        }


@pytest.mark.long
def test_whole_steps(modules, tmp_path):
    out = tmp_path / "rows.jsonl"
    options = f"--tiny --device cpu --models llama,diffusion --rounds 1 --out {out}"
    modules.full_iteration.main(options.split())
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    whole = ["full iteration", "full iteration, optimizer", "full iteration, our AdamW"]
    names = ["eager", "attn,mlp", *whole]
    assert [row["contender"] for row in rows[:5]] == names
    assert [row["contender"] for row in rows[5:]] == [names[0], "down.*,middle*,up.*", *names[2:]]
    for row in rows:
        assert row["error"] is None
        assert "bitwise equal" in row["gate"]["message"]
        assert row["step_ms"]["count"] == 2
    for row in (*rows[2:5], *rows[7:10]):
        assert (row["graphs"]["captured"], row["graphs"]["replayed"]) == (1, 5)
        assert row["graphs"]["eager_calls"] == {"warmup": 3}


# Dynamo itself causes both warnings.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute")
@pytest.mark.parametrize("factor", [1, 10])
@pytest.mark.long
def test_a_compiled_contender_is_judged_when_it_is_built(modules, monkeypatch, tmp_path, factor):
    """A backend of ours really compiles the model; if it is too far from eager, it is not timed."""

    def backend(module, inputs):
        return lambda *given: [factor * x if torch.is_tensor(x) else x for x in module(*given)]

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: compile_(model, backend=backend))
    # The real function is for CUDA graphs, and would import all of inductor.
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    full_iteration, out = modules.full_iteration, tmp_path / "rows.jsonl"
    contenders = [modules.contenders.EAGER, full_iteration.COMPILED]
    monkeypatch.setattr(full_iteration, "contenders", lambda model, compiled: contenders)
    options = f"--tiny --device cpu --models llama --rounds 1 --compile --out {out}"
    full_iteration.main(options.split())
    eager, compiled = [json.loads(line) for line in out.read_text().splitlines()]
    assert eager["error"] is None
    assert "bitwise equal" in eager["gate"]["message"]
    if factor == 1:
        assert compiled["error"] is None
        assert compiled["gate"]["passed"]
        assert compiled["step_ms"]["count"] == 2
    else:
        assert "differ from eager, first in step 1" in compiled["error"]
        assert "step_ms" not in compiled


def test_counters_of_the_graphs(rows):
    assert rows[0]["graphs"] is None
    for row in rows[1:3]:
        graphs = row["graphs"]
        assert graphs["captured"] == graphs["forward_graphs"] == graphs["backward_graphs"] == 2
        assert graphs["replayed"] == 2 * (2 + 3)
        assert graphs["eager_calls"] == {"warmup": 6}
        assert row["graph_replay_ms"] > 0


def test_a_failing_contender_is_recorded_and_has_no_speed(rows):
    assert "all_to_all" in rows[3]["error"]
    assert "step_ms" not in rows[3]


def test_json_is_the_last_line(modules, capsys, monkeypatch):
    monkeypatch.setattr(modules.measure, "GATE_STEPS", 4)
    monkeypatch.setattr(modules.partial_graphs, "contenders", lambda _: [modules.contenders.EAGER])
    options = "--tiny --device cpu --models gpu_bound --rounds 1 --json"
    modules.partial_graphs.main(options.split())
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["model"] for row in document["rows"]] == ["gpu_bound"]


def test_the_picture(modules, rows, tmp_path):
    import plot_partial_graphs

    results = tmp_path / "rows.jsonl"
    results.write_text("\n".join(json.dumps(row) for row in rows))
    plot_partial_graphs.main([str(results)])
    assert results.with_suffix(".png").stat().st_size > 10_000


def test_the_gate(modules):
    contender = modules.contenders.Contender
    reference = torch.tensor([2.0, 3.0])
    near, far = torch.tensor([2.0, 3.0001]), torch.tensor([2.0, 4.0])
    judge = modules.measure.judge
    assert judge(contender("attn", "attn"), reference.clone(), reference).passed
    assert "step 2" in judge(contender("attn", "attn"), near, reference).message
    assert not judge(contender("attn", "attn"), near, reference).passed
    assert "reproduce itself" in judge(modules.contenders.EAGER, near, reference).message
    assert judge(contender("torch.compile", compiled=True), near, reference).passed
    assert not judge(contender("torch.compile", compiled=True), far, reference).passed
    assert not judge(contender("attn", "attn"), reference * torch.nan, reference).passed


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("an update is lost", "gate: losses differ from eager, first in step 8"),
        ("later steps are eager", "2 captured, 2 replayed instead of 10; eager calls"),
    ],
)
def test_the_gate_stops_a_run_that_is_not_eager(modules, monkeypatch, tmp_path, fault, message):
    """All but the fault is real; the eager run beside it passes and is timed."""
    real = modules.contenders.LanguageRun

    class Wrong(real):
        updates = 0

        def update(self):
            self.updates += 1
            if fault == "an update is lost" and self.updates == modules.measure.GATE_STEPS - 1:
                return self.optimizer.zero_grad()  # only the last step's loss shows this fault
            return super().update()

        def forward_backward(self, batch):
            if fault == "later steps are eager" and self.graphs.report().captured:
                with self.graphs.paused():
                    return super().forward_backward(batch)
            return super().forward_backward(batch)

    def run(setting, contender, *others):
        return (real if contender.scopes is None else Wrong)(setting, contender, *others)

    monkeypatch.setattr(modules.contenders, "LanguageRun", run)
    two = [modules.contenders.EAGER, modules.contenders.Contender("attn", "attn")]
    monkeypatch.setattr(modules.partial_graphs, "contenders", lambda _: two)
    out = tmp_path / "rows.jsonl"
    options = f"--tiny --device cpu --models launch_bound --rounds 1 --out {out}"
    modules.partial_graphs.main(options.split())
    eager, wrong = [json.loads(line) for line in out.read_text().splitlines()]
    assert eager["error"] is None
    assert eager["step_ms"]["count"] == 2
    assert message in wrong["error"]
    assert "step_ms" not in wrong


def test_a_contender_that_fails_while_timed_leaves_the_others(modules):
    class Broken(types.SimpleNamespace):
        def step(self):
            raise RuntimeError("out of luck")

    device = torch.device("cpu")
    fine = types.SimpleNamespace(step=lambda: torch.zeros(()), device=device, report=lambda: None)
    setting = modules.contenders.launch_bound().tiny(device)
    runs = {"eager": fine, "attn": Broken(device=device)}
    timings = modules.measure.time_together(setting, list(runs), runs)
    assert timings["attn"] == "RuntimeError: out of luck"
    assert timings["eager"].step_ms.count == setting.rounds * setting.steps


def test_the_time_limit(modules):
    with pytest.raises(TimeoutError, match="0.05 s"), modules.measure.time_limit(0.05):
        while True:
            pass


@pytest.mark.gpu
def test_on_a_gpu(modules, tmp_path):
    out = tmp_path / "rows.jsonl"
    modules.partial_graphs.main(["--tiny", "--rounds", "2", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["error"] for row in rows] == [None] * 8
    for row in rows:
        eager, timeline = row["contender"] == "eager", row["timeline"]
        assert row["reserved_bytes"] >= row["max_allocated_bytes"] > 0
        assert timeline["span_ms"] >= timeline["busy_ms"] > 0
        # Each of the two layers has a forward and a backward graph.
        assert timeline["graph_launches"] == (0 if eager else 4)
        assert (timeline["graph_kernels"] > 0) == (not eager)
        # The trace is complete: every kernel has one launch, or is in a graph.
        single = timeline["kernels"] - timeline["graph_kernels"]
        assert timeline["kernel_launches"] == pytest.approx(single)


# The contenders of each model.
WHOLE_STEPS = {
    "launch_bound": 6,
    "llama": 5,
    "diffusion": 5,
    "gpu_bound": 9,
    "gpu_bound_even": 9,
    "gpu_bound_zipf": 9,
}


def test_whole_steps_have_these_models_and_contenders(modules):
    known = modules.full_iteration.settings()
    found = {name: len(modules.full_iteration.contenders(name, False)) for name in known}
    assert found == WHOLE_STEPS
    assert sum(found.values()) == 43


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "contenders"), WHOLE_STEPS.items())
def test_whole_steps_on_a_gpu(modules, tmp_path, model, contenders):
    out = tmp_path / "rows.jsonl"
    tiny = ["--tiny", "--rounds", "1", "--models", model]
    modules.full_iteration.main([*tiny, "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["error"] for row in rows] == [None] * contenders
    for row in rows:
        if row["contender"] == "full iteration, optimizer":
            assert row["timeline"]["graph_launches"] == 1
            assert row["timeline"]["kernel_launches"] < 10  # only the copies in and out


def test_routing_of_whole_steps(modules):
    """Tokens of an untrained model are alike, and go to few experts."""
    contenders = modules.contenders
    moe = replace(contenders.gpu_bound().config.moe, num_experts=32, top_k=2, ffn_hidden_size=16)
    sizes = dict(num_layers=3, hidden_size=256, vocab_size=2048, num_heads=4, num_kv_heads=2)
    config = replace(contenders.gpu_bound().config, **sizes, head_dim=32, moe=moe)
    torch.manual_seed(1)
    tokens, loads = torch.randint(2048, (1, 512)), []
    for routing in ("untrained", "even", "zipf"):
        torch.manual_seed(0)
        model = LanguageModel(config)
        if routing != "untrained":
            contenders.route_by_embeddings(model, routing)
        loads.append(contenders.fullest(model, tokens))
    assert loads[0] > 3 > 2.2 > loads[1]
    assert loads[2] > 6


@pytest.mark.long
def test_transformers_model_with_even_routing(modules, tmp_path):
    out = tmp_path / "rows.jsonl"
    given = "--tiny --device cpu --models hf_4k,hf_4k_even --rounds 1 --contenders whole"
    modules.huggingface.main([*given.split(), "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["error"] for row in rows] == [None] * 4
    loads = {row["model"]: row["load"] for row in rows}
    assert loads["hf_4k_even"] < loads["hf_4k"]
    assert {row["setting"].endswith("routing even") for row in rows[2:]} == {True}
