"""The shared expert on a side stream: training is bitwise that of one stream, eagerly and in
graphs; what cannot be is refused by name. On the CPU a checker stands in for the two streams.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import full_iterations
import moe_graphs
from full_iterations import Run
from moe_graphs import CaptureError, GraphConfig, side_stream
from moe_graphs.dispatch import LocalDispatcher, PaddedDispatcher
from moe_graphs.engine.scopes.split_backward import SplitBackward
from moe_graphs.layers import LanguageModel, MoEConfig, MoELayer, TransformerConfig
from moe_graphs.layers.moe import moe_layers
from moe_graphs.parallel.tensor_parallel import check_tensor_parallel
from moe_graphs.staged import Stop, run_until
from side_streams import TwoStreams
from training_runs import DEVICES, SEQUENCE, VOCABULARY, Trace, tiny_model, train

CONFIG = MoEConfig(
    num_experts=4,
    top_k=2,
    ffn_hidden_size=16,
    shared_ffn_hidden_size=24,
    aux_loss_coef=0.1,
    overlap="shared_experts",
)
WIDTH = 32
OVERLAP = {True: "shared_experts", False: "none"}
on_devices = pytest.mark.parametrize("device", DEVICES)


def beside(model: nn.Module, on: bool = True) -> nn.Module:
    for layer in moe_layers(model):
        layer.config = replace(layer.config, overlap=OVERLAP[on])
    return model


@pytest.fixture
def late(monkeypatch) -> None:
    """On a GPU the side stream begins long after it could."""
    forked = side_stream.forked

    @contextlib.contextmanager
    def forked_late(device: torch.device) -> Iterator[None]:
        with forked(device):
            if device.type == "cuda":
                torch.cuda._sleep(200_000)
            yield

    monkeypatch.setattr(side_stream, "forked", forked_late)


class Noisy:
    """Graphs whose steps begin and end with other work, in memory that was used before."""

    def __init__(self, graphs: moe_graphs.Graphs, device: str) -> None:
        self._graphs, self._device = graphs, device

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        for _ in range(2):
            kept = [torch.full((2**n,), torch.nan, device=self._device) for n in range(4, 16)]
            del kept
        with self._graphs.step():
            yield


def trained(
    device: str, scopes: str | None, on: bool, **options: bool
) -> tuple[Trace, moe_graphs.Graphs]:
    steps = 20 if device == "cuda" else 5
    model = beside(tiny_model(device), on)
    config = GraphConfig(impl="none")
    if scopes:
        config = GraphConfig(scopes, warmup_steps=2, on_mismatch="error", **options)
    graphs = moe_graphs.graph(model, config)
    trace = train(model, Noisy(graphs, device), device, steps)
    return trace, graphs


@on_devices
def test_scopes_are_bitwise_one_stream(device, late):
    expected, _ = trained(device, None, on=False)
    for scopes, split in ((None, False), ("attn,moe", False), ("full", False), ("full", True)):
        trace, graphs = trained(device, scopes, on=True, split_backward=split)
        trace.assert_equal(expected)
        report = graphs.report()
        assert (report.replayed > 0) == bool(scopes), report
        graphs.release()


@on_devices
def test_a_split_backward_is_bitwise_one_stream(device):
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        layer = MoELayer(replace(CONFIG, overlap=OVERLAP[on]), WIDTH, device=device)
        hidden = torch.randn(64, WIDTH).to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            output = layer(hidden * 1.5)
        outputs, weights = [output.hidden, output.aux_loss], list(layer.parameters())
        ones = [torch.ones_like(each) for each in outputs]
        whole = torch.autograd.grad(outputs, [hidden, *weights], ones, retain_graph=True)
        split = SplitBackward(outputs, [hidden], weights)
        parts = [*split.input_gradients(ones), *split.parameter_gradients()]
        assert all(map(torch.equal, parts, whole))
        results.append(parts)
    assert all(map(torch.equal, *results))


@on_devices
def test_whole_steps_are_bitwise_one_stream(device, late):
    results = []
    for on, graphed in ((False, False), (True, False), (True, True)):
        run = Run(device, graphed=graphed, microbatches=2)
        beside(run.model, on)
        trace, _ = full_iterations.train(run, 20 if device == "cuda" else 6)
        results.append(trace)
        if graphed:
            assert run.step.report().replayed > 0
            for made in (run.step, run.validate):
                made.release()
    for trace in results[1:]:
        trace.assert_equal(results[0])


@pytest.mark.gpu
def test_a_graph_that_is_not_of_the_engine(late):
    """Forward and backward of a layer under ``torch.cuda.graph``."""
    layer = MoELayer(replace(CONFIG, shared_gate=True), WIDTH, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(512, WIDTH, device="cuda").bfloat16().requires_grad_()

    def both() -> list[torch.Tensor]:
        output = layer(hidden)
        loss = output.hidden.float().square().sum() + output.aux_loss
        return [output.hidden, *torch.autograd.grad(loss, [hidden, *layer.parameters()])]

    stream = torch.cuda.Stream()  # of everything: gradients accumulate where they first did
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        both()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            static = both()
        for _ in range(5):
            with torch.no_grad():
                hidden.normal_()
            graph.replay()
            replayed = [tensor.clone() for tensor in static]
            assert all(map(torch.equal, replayed, both()))
            layer.config = replace(layer.config, overlap=OVERLAP[False])
            assert all(map(torch.equal, replayed, both()))
            layer.config = replace(layer.config, overlap=OVERLAP[True])


@pytest.mark.gpu
def test_every_stream_has_a_side_stream_of_its_own():
    device = torch.device("cuda", torch.cuda.current_device())
    pairs = {}
    for stream in (torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(33))):
        with torch.cuda.stream(stream), side_stream.forked(device):
            side = torch.cuda.current_stream().cuda_stream
        assert side != stream.cuda_stream
        assert pairs.setdefault(stream.cuda_stream, side) == side
    assert side_stream.is_used(device)


# ---- lifetimes


def offloaded():
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone)


@pytest.mark.parametrize("dispatcher", [LocalDispatcher(), PaddedDispatcher(1.0)], ids=repr)
@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("mode", ["train", "no_grad", "offloaded", "reentrant", "checkpoint"])
def test_nothing_is_freed_or_read_too_early(monkeypatch, mode, gate, dispatcher):
    torch.manual_seed(0)
    config = replace(CONFIG, shared_gate=gate)
    layers = [MoELayer(config, WIDTH, dispatcher) for _ in range(2)]
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    gc.collect()
    with TwoStreams(monkeypatch) as streams:
        for _ in range(2):
            with contextlib.ExitStack() as entered:
                if mode == "no_grad":
                    entered.enter_context(torch.no_grad())
                if mode == "offloaded":
                    entered.enter_context(offloaded())
                hidden = x * 2
                for layer in layers:
                    call = lambda h, layer=layer: layer(h * 1.5).hidden  # noqa: E731
                    if mode in ("reentrant", "checkpoint"):
                        hidden = checkpoint(call, hidden, use_reentrant=mode == "reentrant")
                    else:
                        hidden = call(hidden)
                loss = hidden.square().sum()
            if mode != "no_grad":
                loss.backward()
            torch.ones(3)
    assert not streams.hazards, set(streams.hazards)
    forks = {"train": 8, "offloaded": 8, "no_grad": 4, "reentrant": 12, "checkpoint": 12}
    assert streams.events.count("fork") == streams.events.count("join") == forks[mode]


def test_the_gradient_forks_before_the_experts_backward(monkeypatch):
    layer = MoELayer(CONFIG, WIDTH)
    output = layer(torch.randn(7, WIDTH)).hidden
    with TwoStreams(monkeypatch) as streams:
        assert isinstance(layer.experts, nn.Module)
        seen = []
        output.grad_fn.register_hook(lambda *_: seen.append(len(streams.events)))
        layer.experts.w2.register_hook(lambda gradient: seen.append(len(streams.events)))
        output.sum().backward()
    first, of_experts = seen
    assert "fork" in streams.events[first:of_experts]
    assert "join" not in streams.events[:of_experts]


# ---- refused by name


class HostSync(LocalDispatcher):
    name, host_sync = "reads", True


@on_devices
@pytest.mark.parametrize("scopes", ["moe_router", "moe_router,moe_preprocess", "attn,moe_router"])
def test_scopes_that_hold_a_part_are_refused(device, scopes):
    model = beside(tiny_model(device))
    graphs = moe_graphs.graph(model, GraphConfig(scopes, warmup_steps=1))
    with pytest.raises(
        CaptureError, match=r"overlap='shared_experts'.*begins before.*'moe' or 'full'"
    ):
        train(model, graphs, device, 3)


def test_scopes_that_hold_nothing_of_it_are_not():
    expected, _ = trained("cpu", None, on=False)
    trace, graphs = trained("cpu", "attn", on=True)
    trace.assert_equal(expected)
    assert graphs.report().replayed > 0
    graphs.release()


def test_a_dispatcher_that_reads_sizes_on_the_host_in_a_scope_of_it():
    layer = MoELayer(CONFIG, WIDTH)
    layer.dispatcher = HostSync()
    assert layer(torch.randn(3, WIDTH)).hidden.isfinite().all()
    with pytest.raises(CaptureError, match="here a graph ends or begins at dispatcher 'reads'"):
        run_until(Stop(capturing=True), lambda: layer(torch.randn(3, WIDTH)))


def with_hook() -> MoELayer:
    layer = MoELayer(CONFIG, WIDTH)
    layer.shared_expert.w1.register_forward_hook(lambda *_: None)
    return layer


def with_adapter() -> MoELayer:
    layer = MoELayer(CONFIG, WIDTH)
    layer.shared_expert.w2 = nn.Sequential(layer.shared_expert.w2)
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [(with_hook, "the Linear of the shared expert has hooks"), (with_adapter, "has a Sequential")],
)
def test_modules_that_would_not_be_called(make, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.randn(3, WIDTH))


def test_an_autocast_that_caches():
    layer = MoELayer(CONFIG, WIDTH)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="cache_enabled=False"),
    ):
        layer(torch.randn(3, WIDTH))


@on_devices
@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gated"])
def test_autocast_without_a_cache_is_bitwise_one_stream(device, gate):
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        config = replace(CONFIG, shared_gate=gate, overlap=OVERLAP[on])
        layer = MoELayer(config, WIDTH, device=device)
        hidden = torch.randn(64, WIDTH).to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            output = layer(hidden * 1.5)
        loss = output.hidden.float().square().sum() + output.aux_loss
        found = torch.autograd.grad(loss, [hidden, *layer.parameters()])
        results.append([output.hidden, *found])
    assert all(map(torch.equal, *results))


def test_configurations():
    with pytest.raises(ValueError, match="overlap='shared_experts' needs a shared expert"):
        replace(CONFIG, shared_ffn_hidden_size=0)
    with pytest.raises(ValueError, match="linear is 'transformer_engine'"):
        MoELayer(CONFIG, WIDTH, linear="transformer_engine")
    config = TransformerConfig(
        hidden_size=WIDTH, num_layers=1, num_heads=2, vocab_size=VOCABULARY, moe=CONFIG,
        max_sequence_length=SEQUENCE,
    )  # fmt: skip
    assert LanguageModel(config, device="meta").layers[0].moe.config.overlap == "shared_experts"
    with pytest.raises(ValueError, match="tp: overlap='shared_experts' is not built"):
        check_tensor_parallel(config, 2)
