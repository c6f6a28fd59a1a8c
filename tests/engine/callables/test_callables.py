"""Tests of ``make_graphed_callables``: the arguments and the mistakes of other helpers.

The other helpers are torch's and Transformer Engine's.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import CaptureError, GraphError, make_graphed_callables
from moe_graphs.engine.callables.order import Action
from moe_graphs.pipelines.builders import one_f_one_b
from training_runs import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)
WIDTH = 8


def block(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()).to(device)


def blocks(device: str, count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [block(device) for _ in range(count)]


def data(device: str, rows: int = 4, grad: bool = True) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device=device, requires_grad=grad)


def gradients(*modules: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for module in modules for p in module.parameters()]


def equal(a: list, b: list) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_a_module_a_function_and_both(device):
    def scenario(graphed: bool) -> list[torch.Tensor]:
        (module,) = blocks(device, 1)
        weight = nn.Parameter(torch.ones(WIDTH, device=device))

        class Loss(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = weight

            def forward(self, h):
                return (h * self.weight).square()

        loss_module = Loss()

        def loss(h):
            return loss_module(h)

        first, second = module, loss
        if graphed:
            first, second = make_graphed_callables(
                (module, loss), ((data(device),), (data(device),))
            )
            assert first is module
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            x = data(device)
            out = second(first(x)).sum()
            out.backward()
            found += [x.grad, out.detach(), *gradients(module, loss_module)]
        if graphed:
            # A sum has an expanded gradient, and the sample had another one: it is compared once.
            assert second.graphs.eager_calls == {"backward: other_layout": 1}
            module.reset()
            assert "forward" not in module.__dict__
            assert not hasattr(module, "reset")
            with pytest.raises(GraphError, match="callable 1 was reset"):
                second(data(device))
        return found

    assert equal(scenario(True), scenario(False))


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict


def test_keywords_none_constants_and_nested_structures(device):
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def function(pair, mask=None, *, scale, mode="plain"):
        h = linear(pair.left) * scale + pair.right["x"][0]
        h = h if mask is None else h * mask
        return {"h": h, "mode": mode, "parts": [h.sin(), None]}

    sample = Pair(data(device), {"x": [data(device)]})
    graphed = make_graphed_callables(
        function, (sample,), sample_kwargs={"scale": 2.0, "mask": None}, on_mismatch="error"
    )
    pair = Pair(data(device), {"x": [data(device)]})
    found, expected = graphed(pair, scale=2.0, mask=None), function(pair, scale=2.0, mask=None)
    assert found["mode"] == "plain"
    assert found["parts"][1] is None
    assert torch.equal(found["h"], expected["h"])
    assert torch.equal(found["parts"][0], expected["parts"][0])
    del found
    with pytest.raises(GraphError, match="captured the constant 2.0, got 3.0"):
        graphed(pair, scale=3.0, mask=None)
    with pytest.raises(GraphError, match="got a tensor|captured the constant None"):
        graphed(pair, scale=2.0, mask=torch.ones(WIDTH, device=device))


def test_gradients_accumulate_over_microbatches(device):
    """One static buffer would not do: the second call would overwrite it (pytorch#181723).

    torch's helper returns such a buffer.
    """

    def scenario(graphed: bool) -> list[torch.Tensor]:
        (module,) = blocks(device, 1)
        if graphed:
            make_graphed_callables(module, (data(device),), on_mismatch="error")
        torch.manual_seed(1)
        inputs = [data(device) for _ in range(3)]
        for x in inputs:
            module(x).sum().backward()
        return gradients(module) + [x.grad for x in inputs]

    assert equal(scenario(True), scenario(False))


def test_the_order_of_nvidias_troubleshooting_page(device):
    """The calls are captured as F1 F2 B2 B1 and called in other orders.

    torch's helper computes wrong gradients from a shared pool. Here calls that do not fit run
    eagerly and are counted, or they are refused (below).
    """

    def scenario(graphed: bool):
        first, second = blocks(device, 2)
        if graphed:
            make_graphed_callables((first, second), ((data(device),), (data(device),)))
        torch.manual_seed(1)
        found = []
        for order in ("F2 F1 B1 B2", "F1 B1 F2 B2", "F2 F1 B2 B1", "F1 F2 B2 B1"):
            modules, outputs = {"1": first, "2": second}, {}
            for action in order.split():
                if action[0] == "F":
                    outputs[action[1]] = modules[action[1]](data(device)).sum()
                else:
                    outputs.pop(action[1]).backward()
            found += gradients(first, second)
        return found, (first.graphs.eager_calls if graphed else None)

    expected, _ = scenario(False)
    found, eager = scenario(True)
    assert equal(found, expected)
    assert eager == {"slots_full": 2, "backward: other_layout": 2}


def test_backwards_in_another_order_than_captured_run_eagerly(device):
    def scenario(graphed: bool):
        first, second = blocks(device, 2)
        if graphed:
            make_graphed_callables((first, second), ((data(device),), (data(device),)))
        torch.manual_seed(1)
        outputs = [first(data(device)).sum(), second(data(device)).sum()]
        outputs[0].backward()
        outputs[1].backward()
        return gradients(first, second), (first.graphs.eager_calls if graphed else None)

    expected, _ = scenario(False)
    found, eager = scenario(True)
    assert equal(found, expected)
    assert eager == {"backward: out_of_order": 1, "backward: other_layout": 1}


@pytest.mark.parametrize("form", ["schedule", "_order"])
def test_microbatches_in_flight(device, form):
    order = one_f_one_b(2, 4).local_order(0)

    def scenario(graphed: bool) -> list[torch.Tensor]:
        modules = blocks(device, 2)
        functions = [[module] * 4 for module in modules]
        if graphed and form == "schedule":
            make_graphed_callables(
                tuple(modules), ((data(device),),) * 2, schedule=order, on_mismatch="error"
            )
        elif graphed:
            made = make_graphed_callables(
                tuple(modules),
                ((data(device),),) * 8,
                num_warmup_iters=2,
                _order=[1, 1, -1, 1, -1, 1, -1, -1],
                _num_layers_per_chunk=2,
                _reuse_graph_input_output_buffers=True,
                on_mismatch="error",
            )
            functions = [[made[2 * m + layer] for m in range(4)] for layer in range(2)]
        torch.manual_seed(1)
        outputs, found = {}, []
        for action in order:
            m = action.microbatch
            if action.kind == "F":
                outputs[m] = functions[1][m](functions[0][m](data(device))).sum()
            else:
                outputs.pop(m).backward()
                found += gradients(*modules)
        if graphed:
            assert len(modules[0].graphs.captured.slots) == 2
        return found

    assert equal(scenario(True), scenario(False))


def test_delayed_weight_gradients(device):
    signed = [1, 1, -1, -1.5, -1, -1.5]

    def scenario(graphed: bool) -> list[torch.Tensor]:
        (module,) = blocks(device, 1)
        calls = [module, module]
        if graphed:
            calls = make_graphed_callables(
                (module,), ((data(device),),) * 2, _order=signed, on_mismatch="error"
            )
        torch.manual_seed(1)
        inputs = [data(device) for _ in calls]
        losses = [call(x).sum() for call, x in zip(calls, inputs, strict=True)]
        losses[0].backward()
        if graphed:
            assert module[0].weight.grad is None
            calls[0].backward_dw()
        losses[1].backward()
        if graphed:
            module.backward_weight()
            with pytest.raises(GraphError, match="without a backward that waits"):
                module.backward_dw()
        return gradients(module) + [x.grad for x in inputs]

    assert equal(scenario(True), scenario(False))


def test_several_generators(device):
    def scenario(graphed: bool) -> list[torch.Tensor]:
        own = torch.Generator(device).manual_seed(3)
        weight = nn.Linear(WIDTH, WIDTH).to(device)

        def noisy(x):
            noise = torch.rand(x.shape, device=device, generator=own)
            return weight(x) * noise + torch.rand(x.shape, device=device)

        torch.manual_seed(0)
        nn.init.ones_(weight.weight), nn.init.zeros_(weight.bias)
        function = noisy
        if graphed:
            function = make_graphed_callables(noisy, (data(device),), generators=[own])
            torch.manual_seed(0)
            assert function.graphs.eager_calls == {}
        else:
            torch.manual_seed(0)
        return [
            function(torch.ones(4, WIDTH, device=device, requires_grad=True)).detach().clone()
            for _ in range(3)
        ] + [torch.rand(2, device=device, generator=own)]

    found, expected = scenario(True), scenario(False)
    assert equal(found, expected)
    assert not torch.equal(found[0], found[1])


def test_capture_time_hooks_run_at_capture_and_never_at_replay(device):
    calls = []

    def note(name):
        return lambda module, *values: calls.append((name, len(values)))

    (module,) = blocks(device, 1)
    hooks = {
        "forward_pre_hooks": {0: note("pre"), 1: note("pre with kwargs")},
        "forward_pre_hooks_with_kwargs": {1: True},
        "forward_hooks": {0: note("post")},
        "backward_pre_hooks": {0: note("backward pre")},
        "backward_hooks": {0: note("backward")},
    }
    make_graphed_callables(
        module,
        (data(device),),
        num_warmup_iters=1,
        capture_time_hooks=[hooks],
        pre_warmup_hook=lambda: calls.append("before"),
        post_warmup_hook=lambda: calls.append("after"),
    )
    once = [("pre", 1), ("pre with kwargs", 2), ("post", 2), ("backward pre", 1), ("backward", 2)]
    assert calls == ["before", *once, "after", *once]
    module(data(device)).sum().backward()
    assert len(calls) == 12
    bad = [{"forward_hooks": {0: lambda module, args, output: output}}]
    with pytest.raises(CaptureError, match="returned a value"):
        make_graphed_callables(block(device), (data(device),), capture_time_hooks=bad)


def test_an_input_without_gradient(device):
    def ignores(x, y):
        return x * 2

    samples = (data(device), data(device))
    with pytest.raises(GraphError, match="input 'y' requires a gradient and gets none"):
        make_graphed_callables(ignores, samples)
    graphed = make_graphed_callables(ignores, samples, allow_unused_input=True)
    x, y = data(device), data(device)
    graphed(x, y).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    assert y.grad is None


def test_another_shape_no_grad_and_eval_run_eagerly(device):
    (module,) = blocks(device, 1)
    make_graphed_callables(module, (data(device),))
    module(data(device, rows=3))
    with torch.no_grad():
        module(data(device))
    module.eval()
    x = data(device)
    assert torch.equal(module(x), nn.Sequential(module[0], module[2])(x))
    assert module.graphs.eager_calls == {"shape": 1, "no_grad": 1, "training_flag": 1}


def test_a_failed_capture_leaves_no_trace(device):
    (module,) = blocks(device, 1)

    class AccessedNames(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    before = torch.rand(1, device=device), torch.manual_seed(5)
    states = [p.clone() for p in module.parameters()]
    with pytest.raises(CaptureError, match="reads values on the host"):
        make_graphed_callables((module, AccessedNames()), ((data(device),), (data(device),)))
    assert before is not None
    assert "forward" not in module.__dict__
    assert all(map(torch.equal, module.parameters(), states))
    module(data(device)).sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_mismatch": "ignore"}, "accepted are 'eager', 'error'"),
        ({"on_mismatch": "recapture"}, r"reset\(\) and make .* moe_graphs.graph captures"),
        ({"sample_kwargs": ({}, {})}, "2 for 1 sample_args"),
        ({"schedule": [Action("F", 0, 0), Action("B", 0, 0)], "_order": [1, -1]}, "give one"),
        ({"_order": [1, 1, -1, -1]}, "one per forward, 2"),
        ({"_order": [1, 2, -2, -1]}, "callables do not make 2 chunks"),
        ({"capture_time_hooks": [{}, {}]}, "2 for 1 callables"),
        ({"capture_time_hooks": [{"forward": {}}]}, "'forward' is none of"),
        ({"pool": "pool", "_order": [1, 1, -1, -1]}, "pools of their own"),
    ],
)
def test_bad_arguments(device, options, message):
    samples = (data(device),) if "_order" not in options else ((data(device),),)
    with pytest.raises(ValueError, match=message):
        make_graphed_callables(block(device), samples, **options)


def test_a_partial_and_a_patched_module(device):
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def scaled(module, x):
        return module(x) * 2

    graphed = make_graphed_callables(
        functools.partial(scaled, linear), (data(device),), on_mismatch="error"
    )
    x = data(device)
    assert torch.equal(graphed(x), scaled(linear, x))
    linear.weight = nn.Parameter(torch.ones_like(linear.weight))
    with pytest.raises(GraphError, match="was replaced by another object"):
        graphed(x)
    module = block(device)
    moe_graphs.make_graphed_callables(module, (data(device),))
    with pytest.raises(ValueError, match="has graphs already"):
        make_graphed_callables(module, (data(device),))
