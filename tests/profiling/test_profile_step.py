"""Real profiles of steps, on the CPU and on a GPU with graphs."""

from __future__ import annotations

import gzip
import io
import json

import pytest
import torch
from rich.console import Console

import moe_graphs
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.step_floors import step_floors
from moe_graphs.profiling import profiler
from moe_graphs.profiling.floors import Floor, Rates, counted_floors, measure_rates
from moe_graphs.profiling.profile_picture import draw_profiles
from moe_graphs.profiling.profile_table import profile_table
from moe_graphs.profiling.profiler import profile_graphs, profile_step

RATES = Rates(1e12, 1e10, "float32")
SIZES = dict(hidden_size=64, num_heads=2, vocab_size=64, ffn_hidden_size=96, max_sequence_length=32)


def small_model(device: str = "cpu") -> LanguageModel:
    torch.manual_seed(0)
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=48)
    config = TransformerConfig(num_layers=2, moe=moe, moe_layers=(False, True), **SIZES)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return LanguageModel(config, device=device, dtype=dtype)


def stepping(model: LanguageModel, graphs: moe_graphs.Graphs):
    device = model.head.weight.device
    ids_BS = torch.arange(64, device=device).view(2, 32)

    def step() -> torch.Tensor:
        with graphs.step():
            loss = model(ids_BS).logits_BSV.float().square().mean()
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    return step


def test_matrix_products_are_counted_and_traced(tmp_path):
    x, y = torch.randn(2, 256, 256)
    product = 2 * 256**3

    def step() -> None:
        (x @ y) @ y
        x.add(y)

    assert counted_floors(step) == {"dense GEMM": Floor(flops=2 * product)}
    trace = tmp_path / "trace.json.gz"
    found = profile_step(step, name="two", device="cpu", rates=RATES, trace=trace)
    groups = {group.name: group for group in found.traced.groups}
    assert groups["dense GEMM"].longest[0][0] == "aten::mm"
    assert groups["elementwise"].calls == 1
    assert groups["dense GEMM"].floor_ms == pytest.approx(1e3 * 2 * product / 1e12)
    assert 0 < found.traced.busy_ms <= found.traced.span_ms
    assert found.timeline is None
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) == 2
    document = json.loads(json.dumps(found.to_dict()))
    assert document["traced"]["groups"][0]["reached"] == pytest.approx(
        found.traced.groups[0].reached
    )


def test_grouped_gemms_are_counted():
    model = small_model()
    graphs = moe_graphs.graph(model, moe_graphs.GraphConfig(impl="none"))
    counted = counted_floors(stepping(model, graphs))
    settings = TrainSettings(steps=1, batch_size=2, sequence_length=32, learning_rate=1e-3)
    known = step_floors(model, settings, compute_dtype=torch.float32, local=True)
    assert counted["grouped GEMM"].flops == known["grouped GEMM"].flops == 6 * 3 * 64 * 48 * 128
    assert counted["dense GEMM"].flops == known["dense GEMM"].flops


def test_floors_of_a_model():
    model = small_model()
    settings = TrainSettings(
        steps=1, batch_size=2, sequence_length=32, learning_rate=1e-3, microbatches=2
    )
    known = step_floors(model, settings, compute_dtype=torch.bfloat16, local=True)
    T, D = 64, 64
    experts = 4 * 3 * D * 48
    assert known["grouped GEMM"].bytes == 2 * experts * (2 + 2 + 4)
    assert known["attention"].flops == 3 * 2 * D * 2 * 32 * T
    assert known["optimizer"].bytes == 8 * 4 * model.num_parameters()
    assert known["swiglu"].bytes == 8 * 2 * (T * 96 + T * 2 * 48)
    assert known["norms"].bytes == T * D * (3 * (3 * 4 + 2 * 2) + 2 * (5 * 4 + 3 * 2))
    assert known["permute"].bytes == 2 * D * (4 * T + 5 * 2 * T)
    assert "permute" not in step_floors(model, settings, compute_dtype=torch.bfloat16, local=False)


def test_graphs_are_profiled_beside_eager(tmp_path):
    model = small_model()
    graphs = moe_graphs.graph(model, moe_graphs.GraphConfig("attn,moe", warmup_steps=1))
    step = stepping(model, graphs)
    with pytest.raises(moe_graphs.GraphError, match="warmup: run steps"):
        profile_graphs(graphs, step)
    for _ in range(3):
        step()
    replayed = graphs.report().replayed
    pair = profile_graphs(graphs, step, rates=RATES)
    assert [each.name for each in pair] == ["eager", "graphed"]
    report = graphs.report()
    assert report.replayed > replayed
    assert report.eager_calls["paused"] > 0
    for each in pair:
        groups = {group.name: group for group in each.traced.groups}
        assert groups["grouped GEMM"].floor_ms == pytest.approx(1e-9 * 6 * 3 * 64 * 48 * 128)
        assert groups["attention"].busy_ms > 0
        assert groups["attention"].floor_ms is None
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(profile_table(pair))
    text = console.export_text()
    for words in ("grouped GEMM", "eager", "graphed", "idle (step less busy)", "1 TFLOP/s"):
        assert words in text
    assert draw_profiles(tmp_path / "picture.png", pair, title="two") is None
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    graphs.release()


def test_the_path_of_a_gpu_on_a_trace_that_was_written_down(tmp_path, monkeypatch):
    """A trace of two steps, with a graph and a collective, replaces the measurement alone."""

    def event(category: str, name: str, start: float, end: float, **arguments: int) -> dict:
        times = {"ts": start, "dur": end - start}
        return {"ph": "X", "cat": category, "name": name, "args": arguments, **times}

    events = [
        event("cuda_runtime", "cudaGraphLaunch", 0, 5, correlation=1),
        event("kernel", "rows_gluon_kernel", 10, 50, correlation=1, stream=7),
        event("kernel", "nvjet_tst_128x256", 60, 80, correlation=1, stream=7),
        event("cuda_runtime", "cudaLaunchKernelExC", 6, 7, correlation=2),
        event("kernel", "ncclDevKernel_ReduceScatter", 70, 110, correlation=2, stream=9),
    ]
    traced = []
    monkeypatch.setattr(
        profiler,
        "traced_events",
        lambda _, __, steps, *more: traced.append((steps, more)) or events,
    )
    monkeypatch.setattr(profiler, "_timed", lambda *_: (0.06, 0.02))
    floors, trace = {"grouped GEMM": Floor(flops=1e7)}, tmp_path / "trace.json"
    found = profile_step(
        lambda: None, device="cuda", steps=2, floors=floors, rates=RATES, trace=trace
    )
    assert [steps for steps, _ in traced] == [1, 2, 1]
    assert traced[-1][1][1] == trace
    assert found.idle_ms == pytest.approx(0.06 - 0.09 / 2)
    assert found.traced.communication_exposed_ms == pytest.approx(0.03 / 2)
    assert found.timeline.graph_launches == 0.5
    assert str(found).startswith("step: 0.060 ms a step, cuda busy 0.045 ms and idle 0.015 ms")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(profile_table([found]))
    rows = {}
    for line in console.export_text().splitlines():
        if line.startswith("│"):
            label, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            rows[label] = cells
    assert rows["grouped GEMM"] == ["0.010", "0.020", "50%", "0"]
    assert rows["communication exposed"][1] == "0.015"
    assert rows["communication hidden"][1] == "0.005"
    assert rows["idle inside graphs"][1] == "0.005"
    assert rows["host, launches"][1:] == ["0.020", "", "1"]
    assert draw_profiles(tmp_path / "picture.png", [found], title="one") is None


def test_rates_are_those_of_this_machine():
    rates = measure_rates("cpu")
    assert 1e9 < rates.flops_per_second < 1e14
    assert 1e8 < rates.bytes_per_second < 1e12
    assert rates.dtype == "float32"


def test_arguments_are_refused_before_anything_runs():
    def step() -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="steps: 0"):
        profile_step(step, steps=0)
    with pytest.raises(ValueError, match="meta"):
        profile_step(step, device="meta")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    model = small_model("cuda")
    graphs = moe_graphs.graph(model, moe_graphs.GraphConfig("attn,moe", warmup_steps=1))
    step = stepping(model, graphs)
    for _ in range(3):
        step()
    eager, graphed = profile_graphs(graphs, step, trace=tmp_path / "trace.json")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())[
        "traceEvents"]}  # fmt: skip
    assert any(name.startswith("cudaGraphLaunch") for name in names)
    assert eager.timeline.graph_launches == 0
    assert graphed.timeline.graph_launches > 0
    assert graphed.timeline.kernel_launches < eager.timeline.kernel_launches
    kernels = []
    for each in (eager, graphed):
        groups = {group.name: group for group in each.traced.groups}
        kernels.append([groups[n].calls for n in ("grouped GEMM", "attention", "swiglu", "norms")])
        assert groups["dense GEMM"].floor_ms > 0
        assert each.rates.flops_per_second > 1e13
        shared = sum(group.share_ms for group in each.traced.groups)
        assert shared == pytest.approx(each.traced.busy_ms)
        assert each.traced.busy_ms == pytest.approx(each.timeline.busy_ms)
    assert kernels[0] == kernels[1]
    graphs.release()
