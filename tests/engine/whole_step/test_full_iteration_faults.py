"""Footguns of whole-step graphs, each as a test: this table is the documentation.

"right" means that the result is bitwise that of the eager step. "mismatch" means a ``GraphError``
before anything is launched or, by ``on_mismatch``, an eager call or another capture, both right.
"refused" means a warning at the capture (or a ``CaptureError``, with ``on_capture_error="error"``);
training then goes on eagerly as if no capture had been tried.

| what you do                                              | what happens                     |
|----------------------------------------------------------|----------------------------------|
| keep what the step returned                              | right: copies of your own        |
| zero_grad(), either way, before, after or in the step    | right                            |
| accumulate into ``.grad`` over calls                     | right if captured so, else mismatch |
| parameters without gradient                              | right: ``.grad`` stays None      |
| a smaller last batch, another dtype, key, constant       | mismatch, names the leaf         |
| a batch on the wrong device                              | mismatch; refused at the capture |
| another number of microbatches                           | mismatch                         |
| eval(), another dropout rate                             | mismatch                         |
| a hook on a submodule                                    | refused, later a mismatch        |
| a learning rate in a float, changed                      | mismatch, says what to do        |
| a learning rate in a tensor, filled by a scheduler       | right                            |
| load a state into the optimizer, the model               | mismatch, right                  |
| replace a parameter, ``p.data = ...``                    | mismatch                         |
| an optimizer that reads values on the host               | refused by name                  |
| an optimizer that FullIteration was not told of          | refused by name                  |
| ``.item()``                                              | refused, with the line           |
| step the scheduler within the step                       | refused                          |
| read a tensor from outside, count in Python              | right                            |
| validation between capture and replay                    | right                            |
| a loss of an earlier eager step is still held            | right                            |
| run out of memory, raise in the capture                  | refused                          |
| capture ahead of time                                    | right, no trace                  |
| release(), delete                                        | eager from then on               |

``test_full_iteration_mismatches`` tests calls that differ, ``test_full_iteration_life`` the last
rows, and this file all others.
"""

from __future__ import annotations

import copy

import pytest
import torch

from moe_graphs import CaptureError, GraphError
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from toy_steps import WIDTH, Model, Toy, add_hook, both, warm
from training_runs import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)


# ---- outputs and gradients


def test_what_is_returned_is_your_own(device):
    def scenario(toy, step):
        kept = [step(toy.batch()) for _ in range(3)]
        copies = copy.deepcopy([r["calls"] for r in kept])
        return [kept, copies]

    toy = Toy(device)
    result = warm(toy)(toy.batch())
    assert not result["losses"][0].requires_grad
    assert result["calls"].data_ptr() != toy.model.calls.data_ptr()
    report = both(device, lambda toy, step: [step(toy.batch())["losses"] for _ in range(3)])
    assert report.eager_calls == {"warmup": 3}


@pytest.mark.parametrize("zero", ["start", "start in place", "end", "never"])
def test_gradients_are_zeroed_within_the_step(device, zero):
    """Gradients accumulate over the calls with "never", from the first one on."""
    report = both(device, lambda toy, step: [step(toy.batch()) for _ in range(3)], zero=zero)
    assert report.eager_calls == {"warmup": 3}


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_zeroed_between_the_steps(device, to_none):
    def scenario(toy, step):
        returned, gradients = [], []
        for _ in range(3):
            returned.append(step(toy.batch()))
            gradients.append([p.grad.clone() for p in toy.model.first.parameters()])
            toy.optimizer.step()
            toy.optimizer.zero_grad(set_to_none=to_none)
        return [returned, gradients]

    options = {} if to_none else {"on_mismatch": "recapture"}
    report = both(device, scenario, options, zero="never", update=False)
    assert report.captures == (1 if to_none else 2)


@pytest.mark.parametrize("inside", [False, True])
def test_a_gradient_that_no_backward_adds_to_may_be_dropped(device, inside):
    """A frozen weight has a gradient of before. The update inside reads it, which none replaces."""

    def scenario(toy, step):
        frozen = toy.model.first.weight
        frozen.requires_grad_(False)
        frozen.grad = torch.ones_like(frozen)
        returned = [step(toy.batch())]
        for _ in range(2):
            toy.optimizer.zero_grad()
            returned.append(step(toy.batch()))
        assert frozen.grad is None
        return [returned, frozen.detach().clone()]

    zero = "start in place" if inside else "never"
    report = both(device, scenario, {"on_mismatch": "recapture"}, zero=zero, update=inside)
    assert report.captures >= 2


def test_left_over_gradients_are_no_silent_overwrite(device):
    toy = Toy(device, zero="never", update=False)
    step = toy.graph()
    for _ in range(5):
        toy.optimizer.zero_grad()
        step(toy.batch())
    with pytest.raises(GraphError, match=r"first\.weight\.grad was None when .* call zero_grad"):
        step(toy.batch())
    toy.optimizer.zero_grad()
    step(toy.batch())
    assert toy.model.unused.grad is None


def test_accumulating_over_calls_by_an_eager_call(device):
    def scenario(toy, step):
        return [step(toy.batch()) for _ in range(2)]  # the second adds to the first's

    options = {"on_mismatch": "eager"}
    report = both(device, scenario, options, zero="never", update=False)
    assert report.eager_calls == {"warmup": 3, "gradients_left": 1}


# ---- what is served


def read_outside(toy):
    outside = torch.full((), 0.5, device=toy.device)
    toy.inside = lambda loss: loss * outside


def count_on_the_model(toy):
    toy.model.count = 0

    def inside(loss):
        toy.model.count += 1
        return loss

    toy.inside = inside


@pytest.mark.parametrize("make", [read_outside, count_on_the_model])
def test_a_tensor_from_outside_and_a_counter_are_right(device, make):
    def run(graphed):
        toy = Toy(device)
        make(toy)
        step = toy.graph() if graphed else toy.owning_step
        losses = [torch.stack(step(toy.batch())["losses"]).detach() for _ in range(6)]
        return toy, step, losses

    eager, _, expected = run(False)
    toy, step, found = run(True)
    assert all(map(torch.equal, found, expected))
    toy.trace().assert_equal(eager.trace())
    assert getattr(toy.model, "count", None) == getattr(eager.model, "count", None)
    assert step.report().matched == 3
    assert step.report().eager_calls == {"warmup": 3}


# ---- what cannot be captured


def read_value(loss):
    loss.item()
    return loss


def unknown_optimizer(toy):
    other = torch.optim.SGD(toy.model.parameters(), lr=0.1)

    def inside(loss):
        other.step()
        return loss

    toy.inside = inside


def use_random(toy):
    import random

    toy.inside = lambda loss: loss * random.random()


def step_the_rate(toy):
    def inside(loss):
        toy.optimizer.param_groups[0]["weight_decay"] *= 0.9
        return loss

    toy.inside = inside


def raise_error(toy):
    def inside(loss):
        raise OSError("disk on fire")

    toy.inside = inside


REFUSED = {
    "host read": (lambda toy: setattr(toy, "inside", read_value), r"reads values on .*loss.item"),
    "optimizer": (unknown_optimizer, r"step\(\) of a SGD that FullIteration does not know"),
    "random": (use_random, "draws from Python's random"),
    "number": (
        step_the_rate,
        r"changes .*\['weight_decay'\] \(0.01 -> .* within the step",
    ),
    "hook": (add_hook, r"'first' has hooks"),
    "exception": (raise_error, r"OSError: disk on fire; at .*raise OSError"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_capture_leaves_no_trace(device, reason):
    make, message = REFUSED[reason]
    toy = Toy(device)
    step = toy.graph(on_capture_error="error")
    for _ in range(3):
        step(toy.batch())
    make(toy)
    batch, before = toy.batch(), toy.trace()
    with pytest.raises(CaptureError, match=message) as caught:
        step(batch)
    assert "capture of the step failed" in str(caught.value)
    assert "it runs eagerly now" in str(caught.value)
    toy.trace().assert_equal(before)
    toy.inside = lambda loss: loss
    step(batch)
    report = step.report()
    assert (report.state, report.captures) == ("capture_failed", 0)
    assert report.eager_calls == {"warmup": 3, "capture_failed": 1}


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1, device=next(iter(p)).device)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_that_read_on_the_host_are_refused_by_name(device, kind):
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step((lambda: loss) if kind == "LBFGS" else None)
        return loss

    iteration = FullIteration(step, model=model, optimizer=optimizer)
    with pytest.raises(CaptureError, match=f"{kind} cannot be in a graph: .*fused=True"):
        iteration.capture(torch.randn(4, WIDTH, device=device))


def test_a_rate_on_the_cpu_beside_a_model_on_the_gpu(device):
    if device == "cpu":
        pytest.skip("needs two devices")
    toy = Toy(device)
    toy.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    with pytest.raises(CaptureError, match=r"\['lr'\] is a tensor on cpu, .* put it on cuda"):
        toy.graph().capture(toy.batch())


# ---- failures within the capture


def _exhaust(device: str) -> None:
    if device == "cuda":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("where", ["before", "after"], ids=["forward", "backward done"])
@pytest.mark.parametrize("failure", ["memory", "exception"])
def test_a_capture_that_fails_under_way(device, monkeypatch, where, failure):
    def scenario(toy, step):
        returned = [step(toy.batch())]
        toy.model.dropout.p = 0.4  # captures again
        batch = toy.batch()
        if isinstance(step, FullIteration):
            before = toy.trace()
            with monkeypatch.context() as patch:
                _fail_while_recording(patch, step, toy, where, failure)
                with pytest.raises(CaptureError, match="OutOfMemory|disk on fire"):
                    step(batch)
            toy.trace().assert_equal(before)
        return [*returned, step(batch), step(toy.batch())]

    report = both(device, scenario, {"on_mismatch": "recapture", "on_capture_error": "error"})
    assert report.state == "capture_failed"
    assert report.eager_calls == {"warmup": 3, "capture_failed": 2}
    assert report.pool_bytes == report.static_bytes == 0


def _fail_while_recording(patch, step, toy, where, failure):
    import contextlib

    backend = step._definition.backend
    original = backend.record

    @contextlib.contextmanager
    def record(*given):
        with original(*given) as graphs:
            if where == "after":
                yield graphs
            if failure == "memory":
                _exhaust(toy.device)
            raise OSError("disk on fire")

    patch.setattr(backend, "record", record)
