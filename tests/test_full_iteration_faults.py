"""What users of whole-step graphs run into, each as a test: this table is the documentation.

"right": bitwise what the eager step does. "mismatch": ``GraphError`` before anything is launched,
or with ``on_mismatch`` an eager call or another capture, both right. "refused": ``CaptureError``
at the capture, after which training goes on eagerly as if it had not been tried.

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
| ``.item()``, a tensor from outside                       | refused, with the line           |
| count in Python, step the scheduler within the step      | refused                          |
| validation between capture and replay                    | right                            |
| a loss of an earlier eager step is still held            | right                            |
| run out of memory, raise in the capture                  | refused                          |
| capture ahead of time                                    | right, no trace                  |
| release(), delete                                        | eager from then on               |
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from full_iterations import Run, batches
from moe_graphs import CaptureError, GraphError
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from training_runs import DEVICES, Trace

pytestmark = pytest.mark.parametrize("device", DEVICES)
WIDTH = 8


class Model(nn.Module):
    """Weights, dropout, a counting buffer, and a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls.add_(1)
        return self.second(self.dropout(torch.tanh(self.first(x))))


class Toy:
    """A model with a training step that tests can bend: ``inside`` runs within it."""

    def __init__(
        self,
        device: str,
        *,
        zero: str = "end",
        update: bool = True,
        rate: float | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.zero, self.update = device, zero, update
        self.model = Model().to(device)
        options: dict[str, Any] = {"fused": True}
        if device == "cuda":
            options["capturable"] = True
        lr = torch.tensor(0.01, device=device) if rate is None else rate
        make = optimizer or (lambda p: torch.optim.AdamW(p, lr=lr, **options))
        self.optimizer = make(self.model.parameters())
        self.inside: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss

    def step(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        if self.zero == "start":
            self.optimizer.zero_grad()
        if self.zero == "start in place":
            self.optimizer.zero_grad(set_to_none=False)
        losses = []
        for x in batch["x"]:
            loss = self.inside(self.model(x).square().mean() * batch.get("scale", 1.0))
            loss.backward()
            losses.append(loss)
        if self.update:
            self.optimizer.step()
        if self.zero == "end":
            self.optimizer.zero_grad()
        return {"losses": losses, "calls": self.model.calls}

    def owning_step(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The buffer that is returned goes on counting: a copy, as from a graph."""
        return pytree.tree_map(lambda t: t.detach().clone(), self.step(batch))

    def graph(self, **options: Any) -> FullIteration:
        options = {"on_mismatch": "error", **options}
        return FullIteration(self.step, model=self.model, optimizer=self.optimizer, **options)

    def batch(self, rows: int = 4, count: int = 2, **more: Any) -> dict[str, Any]:
        return {"x": [torch.randn(rows, WIDTH, device=self.device) for _ in range(count)], **more}

    def trace(self) -> Trace:
        trace = Trace()
        trace.note_state(self.model, "now")
        for name, parameter in self.model.named_parameters():
            trace.note(f"grad {name}", parameter.grad)
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                trace.note(f"{key} {name}", torch.as_tensor(value))
        trace.note("rng", torch.get_rng_state())
        if self.device == "cuda":
            trace.note("cuda rng", torch.cuda.get_rng_state())
        return trace


Scenario = Callable[[Toy, Callable[[dict[str, Any]], Any]], Any]


def both(device: str, scenario: Scenario, options: dict[str, Any] | None = None, **toy: Any):
    """Runs ``scenario(toy, step)`` eagerly and graphed from a captured state; they must agree."""
    traces, report = [], None
    for graphed in (False, True):
        made = Toy(device, **toy)
        step = made.graph(**(options or {})) if graphed else made.owning_step
        for _ in range(5):
            step(made.batch())
            if not made.update:
                made.optimizer.step()
                made.optimizer.zero_grad()
        returned = scenario(made, step)
        trace = made.trace()
        for number, leaf in enumerate(pytree.tree_leaves(returned)):
            trace.note(f"returned {number}", leaf)
        traces.append(trace)
        if graphed:
            report = step.report()
            assert report.replayed >= 2
    traces[1].assert_equal(traces[0])
    return report


def warm(toy: Toy, **options: Any) -> FullIteration:
    step = toy.graph(**options)
    for _ in range(5):
        step(toy.batch())
    assert step.report().state == "captured"
    return step


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
    """ "never" accumulates over the calls, from the first one on."""
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


# ---- calls that differ


def smaller(toy):
    return toy.batch(rows=3)


def other_dtype(toy):
    return {"x": [x.double() for x in toy.batch()["x"]]}


DIFFERENT = {
    "shape": (smaller, r"batch\['x'\]\[0\]\": captured shape \(4, 8\), got \(3, 8\)"),
    "structure": (lambda toy: toy.batch(count=3), r"batch\['x'\]\[2\] not known"),
    "fewer": (lambda toy: toy.batch(count=1), r"batch\['x'\]\[1\] missing"),
    "key": (lambda toy: toy.batch(scale=1.0), r"batch\['scale'\] not known"),
}


@pytest.mark.parametrize("difference", DIFFERENT)
@pytest.mark.parametrize("policy", ["error", "eager", "recapture"])
def test_a_batch_that_is_not_like_the_captured_one(device, difference, policy):
    make, message = DIFFERENT[difference]

    def scenario(toy, step):
        returned = []
        batch = make(toy)
        if policy == "error" and isinstance(step, FullIteration):
            before = toy.trace()
            with pytest.raises(GraphError, match=message):
                step(batch)
            toy.trace().assert_equal(before)
        elif policy != "error":
            returned.append(step(batch))
        returned.append(step(toy.batch()))
        return returned

    report = both(device, scenario, {"on_mismatch": policy})
    assert report.captures == (3 if policy == "recapture" else 1)
    reason = "shape" if difference == "shape" else "structure"
    assert report.eager_calls == {"warmup": 3} | ({reason: 1} if policy == "eager" else {})


def test_other_dtypes_constants_and_devices(device):
    toy = Toy(device)
    step = warm(toy)
    with pytest.raises(GraphError, match=r"captured dtype torch.float32, got torch.float64"):
        step(other_dtype(toy))
    with pytest.raises(GraphError, match=r"captured device .*, got meta"):
        step({"x": [x.to("meta") for x in toy.batch()["x"]]})
    other = Toy(device)
    scaled = other.graph()
    for _ in range(4):
        scaled(other.batch(scale=2.0))
    with pytest.raises(GraphError, match=r"batch\['scale'\]\": captured the constant 2.0, got 3"):
        scaled(other.batch(scale=3.0))
    with pytest.raises(GraphError, match="grad mode"), torch.no_grad():
        step(toy.batch())
    step(toy.batch())


def test_a_capture_with_a_batch_on_the_wrong_device(device):
    toy = Toy(device)
    wrong = "cpu" if device == "cuda" else "meta"
    with pytest.raises(CaptureError, match=rf"batch\['x'\]\[0\]\" is on {wrong} .*StaticLoader"):
        toy.graph().capture({"x": [x.to(wrong) for x in toy.batch()["x"]]})


def change_dropout(toy):
    toy.model.dropout.p = 0.5


def add_hook(toy):
    toy.model.first.register_forward_hook(lambda *_: None)


def replace_parameter(toy):
    toy.model.first.weight = nn.Parameter(toy.model.first.weight.detach().clone())


def move_data(toy):
    toy.model.first.weight.data = toy.model.first.weight.data.clone()


def load_optimizer(toy):
    toy.optimizer.load_state_dict(copy.deepcopy(toy.optimizer.state_dict()))


def float_rate(toy):
    toy.optimizer.param_groups[0]["lr"] = 0.02


def other_betas(toy):
    toy.optimizer.param_groups[0]["betas"] = (0.8, 0.9)


def add_group(toy):
    extra = nn.Parameter(torch.ones(1, device=toy.device))
    toy.optimizer.add_param_group({"params": [extra]})


CHANGES = {
    "training_flag": (lambda toy: toy.model.eval(), r"training' was True"),
    "attribute": (change_dropout, "'dropout.p' was 0.3 at the capture and is 0.5"),
    "model_moved": (move_data, "'first.weight' lies at another address"),
    "replaced": (replace_parameter, "'first.weight' was replaced by another object"),
    "state_replaced": (load_optimizer, r"optimizer.state\[first.weight\]\['step'\]. was replaced"),
    "lr": (
        float_rate,
        r"optimizer.param_groups\[0\]\['lr'\]. was replaced .*filled instead of assigned",
    ),
    "betas": (other_betas, r"optimizer.param_groups\[0\]\['betas'\]\[0\]. was 0.9 .* is 0.8"),
    "group": (add_group, r"optimizer.param_groups\[1\].* was not there at the capture"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_a_graph_would_not_see(device, change):
    make, message = CHANGES[change]
    toy = Toy(device)
    step = warm(toy)
    make(toy)
    with pytest.raises(GraphError, match=message):
        step(toy.batch())


@pytest.mark.filterwarnings("ignore:full iteration runs eagerly:moe_graphs.GraphWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("policy", ["eager", "recapture"])
def test_changes_are_followed_on_request(device, change, policy):
    def scenario(toy, step):
        CHANGES[change][0](toy)
        return [step(toy.batch()) for _ in range(2)]

    report = both(device, scenario, {"on_mismatch": policy})
    # The optimizer does not know the new parameter, and so does not zero its gradient either.
    again = 2 if change == "replaced" else 1
    assert report.captures == 1 + (again if policy == "recapture" else 0)


def test_a_hook_after_the_capture(device):
    toy = Toy(device)
    step = warm(toy)
    add_hook(toy)
    with pytest.raises(GraphError, match="hooks"):
        step(toy.batch())


def test_a_rate_in_a_float_must_stay_as_it_is(device):
    toy = Toy(device, rate=0.01)
    step = warm(toy)
    toy.optimizer.param_groups[0]["lr"] = 0.02
    with pytest.raises(GraphError, match=r"\['lr'\]. was 0.01 .* is 0.02 now.*lr=torch.tensor"):
        step(toy.batch())
    toy.optimizer.param_groups[0]["lr"] = 0.01
    step(toy.batch())


def test_a_state_that_is_loaded_in_place(device):
    """New containers around the same tensors are no change."""

    def scenario(toy, step):
        tensors = {p: dict(s) for p, s in toy.optimizer.state.items()}
        lr = toy.optimizer.param_groups[0]["lr"]
        toy.optimizer.load_state_dict(copy.deepcopy(toy.optimizer.state_dict()))
        toy.optimizer.param_groups[0]["lr"] = lr
        for parameter, state in tensors.items():
            toy.optimizer.state[parameter] = state
        toy.model.load_state_dict(copy.deepcopy(toy.model.state_dict()))
        return [step(toy.batch()) for _ in range(2)]

    report = both(device, scenario)
    assert report.eager_calls == {"warmup": 3}


# ---- what cannot be captured


def read_value(loss):
    loss.item()
    return loss


OUTSIDE: dict[str, torch.Tensor] = {}


def read_outside(loss):
    return loss + OUTSIDE[loss.device.type]


def unknown_optimizer(toy):
    other = torch.optim.SGD(toy.model.parameters(), lr=0.1)

    def inside(loss):
        other.step()
        return loss

    toy.inside = inside


def count_on_the_model(toy):
    toy.model.count = 0

    def inside(loss):
        toy.model.count += 1
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
    "outside": (lambda toy: setattr(toy, "inside", read_outside), r"reads a tensor.*OUTSIDE"),
    "optimizer": (unknown_optimizer, r"step\(\) of a SGD that FullIteration does not know"),
    "counter": (count_on_the_model, r"changes count \(\d+ -> \d+\) .* runs no Python"),
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
    OUTSIDE[device] = torch.ones((), device=device)
    make, message = REFUSED[reason]
    toy = Toy(device)
    step = toy.graph()
    for _ in range(3):
        step(toy.batch())
    make(toy)
    batch, before = toy.batch(), toy.trace()
    random_count = getattr(toy.model, "count", None)
    with pytest.raises(CaptureError, match=message) as caught:
        step(batch)
    assert "capture of the step failed" in str(caught.value)
    assert "it runs eagerly now" in str(caught.value)
    toy.trace().assert_equal(before)
    assert getattr(toy.model, "count", None) == random_count
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

    report = both(device, scenario, {"on_mismatch": "recapture"})
    assert report.state == "capture_failed"
    assert report.eager_calls == {"warmup": 3, "capture_failed": 2}
    assert report.pool_bytes == report.static_bytes == 0


def _fail_while_recording(patch, step, toy, where, failure):
    import contextlib

    backend = step._subject.backend
    original = backend.record

    @contextlib.contextmanager
    def record(pool):
        with original(pool) as graphs:
            if where == "after":
                yield graphs
            if failure == "memory":
                _exhaust(toy.device)
            raise OSError("disk on fire")

    patch.setattr(backend, "record", record)


# ---- the life of a graph


def test_a_loss_of_an_eager_step_may_still_be_held(device):
    """Its gradient accumulators belong to the caller's stream, which a capture must not touch."""
    traces = []
    for graphed in (False, True):
        toy = Toy(device)
        x = torch.ones(4, WIDTH, device=device)
        loss = toy.model(x).square().mean()
        loss.backward(retain_graph=True)
        toy.optimizer.zero_grad()
        step = toy.graph() if graphed else toy.step
        for _ in range(6):
            step(toy.batch())
        traces.append(toy.trace())
        assert loss.grad_fn is not None
    traces[1].assert_equal(traces[0])
    assert step.report().replayed == 3


@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
def test_capturing_ahead_of_time_leaves_no_trace(device, trained):
    traces = []
    for graphed in (False, True):
        toy = Toy(device)
        for _ in range(trained):
            toy.step(toy.batch())
        step = toy.graph() if graphed else toy.step
        batch = toy.batch()
        if graphed:
            gradients, before = [p.grad for p in toy.model.parameters()], toy.trace()
            step.capture(batch)
            toy.trace().assert_equal(before)
            assert all(p.grad is g for p, g in zip(toy.model.parameters(), gradients, strict=True))
            assert len(toy.optimizer.state) == (4 if trained else 0)
        for _ in range(3):
            step(toy.batch())
        traces.append(toy.trace())
    traces[1].assert_equal(traces[0])
    assert step.report().eager_calls == {}
    assert step.report().replayed == 3


def test_a_state_loaded_between_capture_and_first_call(device):
    toy, donor = Toy(device), Toy(device)
    donor.step(donor.batch())
    step = toy.graph()
    step.capture(toy.batch())
    toy.optimizer.load_state_dict(donor.optimizer.state_dict())
    with pytest.raises(GraphError, match="was replaced by another object"):
        step(toy.batch())


def test_an_optimizer_whose_first_step_is_special(device):
    toy = Toy(device, optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.5, fused=True))
    with pytest.raises(CaptureError, match="SGD makes its state in its first step"):
        toy.graph().capture(toy.batch())
    assert not toy.optimizer.state
    both(
        device,
        lambda toy, step: [step(toy.batch()) for _ in range(2)],
        optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.5, fused=True),
    )


def test_generators_of_your_own(device):
    found = []
    for graphed in (False, True):
        toy = Toy(device)
        generator = torch.Generator(device).manual_seed(5)

        def noisy(loss, generator=generator):
            return loss * torch.rand((), device=loss.device, generator=generator)

        toy.inside = noisy
        step = toy.graph(generators=[generator]) if graphed else toy.step
        for _ in range(6):
            step(toy.batch())
        trace = toy.trace()
        trace.note("generator", torch.rand(2, device=device, generator=generator))
        found.append(trace)
    found[1].assert_equal(found[0])


def test_declared_state_is_put_back_and_watched(device):
    class Average:
        def __init__(self, model):
            self.values = [p.detach().clone() for p in model.parameters()]
            self.decay = 0.9

        def update(self, model):
            with torch.no_grad():
                for value, parameter in zip(self.values, model.parameters(), strict=True):
                    value.lerp_(parameter, 1 - self.decay)

    found = []
    for graphed in (False, True):
        toy = Toy(device)
        average = Average(toy.model)

        def step(batch, toy=toy, average=average):
            result = toy.step(batch)
            average.update(toy.model)
            return result

        if graphed:
            step = FullIteration(
                step,
                model=toy.model,
                optimizer=toy.optimizer,
                state=[average],
                warmup_steps=1,
                on_mismatch="error",
            )
        for _ in range(5):
            step(toy.batch())
        trace = toy.trace()
        for number, value in enumerate(average.values):
            trace.note(f"average {number}", value)
        found.append(trace)
    found[1].assert_equal(found[0])
    average.decay = 0.5
    with pytest.raises(GraphError, match=r"state\[0\].decay' was 0.9 .* is 0.5"):
        step(toy.batch())


def test_a_scheduler_may_be_named_but_not_stepped_within(device):
    def scenario(toy, step):
        scheduler = torch.optim.lr_scheduler.LambdaLR(toy.optimizer, lambda n: 0.9**n)
        if isinstance(step, FullIteration):
            step = toy.graph(state=[scheduler], warmup_steps=1)
        returned = []
        for _ in range(4):
            returned.append(step(toy.batch()))
            scheduler.step()
        if isinstance(step, FullIteration):
            assert step.report().replayed == 3
        return returned

    both(device, scenario)
    toy = Toy(device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(toy.optimizer, lambda n: 0.9**n)

    def stepping(batch):
        result = toy.step(batch)
        scheduler.step()
        return result

    step = FullIteration(
        stepping, model=toy.model, optimizer=toy.optimizer, state=[scheduler], warmup_steps=1
    )
    step(toy.batch())
    with pytest.raises(CaptureError, match=r"scheduler.step\(\)|belongs there"):
        step(toy.batch())
    assert scheduler.last_epoch == 1


def test_parameters_outside_the_model(device):
    toy = Toy(device)
    scale = nn.Parameter(torch.ones((), device=device))
    toy.optimizer.add_param_group({"params": [scale]})
    toy.inside = lambda loss: loss * scale
    with pytest.raises(CaptureError, match=r"not in model=.*model=\[model, criterion"):
        toy.graph().capture(toy.batch())
    assert scale.grad is None or not scale.grad.any()


def test_release(device):
    def scenario(toy, step):
        if isinstance(step, FullIteration):
            step.release()
            step.release()
        returned = [step(toy.batch()) for _ in range(2)]
        return returned

    report = both(device, scenario)
    assert report.state == "released"
    assert report.eager_calls == {"warmup": 3, "released": 2}
    toy = Toy(device)
    with toy.graph() as step, pytest.raises(OSError, match="disk"):
        step(toy.batch())
        raise OSError("disk")
    assert step.state == "released"
    with pytest.raises(GraphError, match="released"):
        step.capture(toy.batch())


def test_releasing_one_graph_leaves_the_others_whole(device):
    """Releasing clears the workspaces of cuBLAS: those of other graphs must lie in their pools."""

    def scenario(toy, step):
        x = toy.batch()["x"][0]
        if isinstance(step, FullIteration):
            other = FullIteration(toy.model, model=toy.model)
            other.capture(x)
            other.release()
        return [step(toy.batch()) for _ in range(2)]

    both(device, scenario)


def test_arguments(device):
    toy = Toy(device)
    with pytest.raises(ValueError, match="accepted are 'eager', 'error', 'recapture'"):
        toy.graph(on_mismatch="ignore")
    with pytest.raises(ValueError, match="warmup_steps: got 0"):
        toy.graph(warmup_steps=0)
    with pytest.raises(ValueError, match="devices none"):
        FullIteration(toy.step, model=nn.Module())


def test_no_host_synchronisation_in_a_replay(device):
    run = Run(device, graphed=True, microbatches=2)
    inputs = list(batches(device, 8, 2))
    for batch in inputs[:5]:
        run.step(batch)
    run.validate(inputs[0])
    run.validate(inputs[0])
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in inputs[5:]:
            run.step(batch)
            run.schedule.step()
            run.validate(batch)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert run.step.report().replayed == 5
