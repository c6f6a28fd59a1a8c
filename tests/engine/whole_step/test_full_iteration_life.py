"""The life of a captured step up to its release: rows of test_full_iteration_faults' table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from full_iterations import Run, batches
from moe_graphs import CaptureError, GraphError, GraphWarning
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from toy_steps import WIDTH, Toy, both
from training_runs import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)


def test_a_loss_of_an_eager_step_may_still_be_held(device):
    """The loss keeps accumulators of the caller's stream, which a capture must not touch."""
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
    assert step.report().matched == 3


class Trainer:
    """An object that holds the whole step in an attribute whose name the step's code mentions."""

    def __init__(self, device):
        self.toy = Toy(device)
        options = {"model": self.toy.model, "optimizer": self.toy.optimizer}
        self.step = FullIteration(self._step, on_mismatch="error", **options)

    def _step(self, batch):
        loss = self.toy.step(batch)
        assert self.toy.optimizer.state
        getattr(self, "step")  # noqa: B009
        return loss


def test_a_step_that_reaches_its_own_graph(device):
    trainer = Trainer(device)
    for _ in range(6):
        trainer.step(trainer.toy.batch())
    assert trainer.step.report().matched == 3
    assert trainer.step.state == "captured"


def test_an_error_names_every_difference_of_the_call(device):
    trainer = Trainer(device)
    for _ in range(5):
        trainer.step(trainer.toy.batch())
    trainer.toy.model.train(not trainer.toy.model.training)
    with torch.autocast(device, torch.bfloat16), pytest.raises(GraphError) as raised:
        trainer.step(trainer.toy.batch(rows=2))
    for part in ("shape", "autocast", "training"):
        assert part in str(raised.value)


class CountingTrainer(Trainer):
    """A trainer whose result holds what its graph has counted."""

    def _step(self, batch):
        return {**super()._step(batch), "so far": self.step._replayed}


def test_a_step_that_asks_its_own_graph(device):
    trainer = CountingTrainer(device)
    trainer.step._on_mismatch = "eager"
    for _ in range(6):
        trainer.step(trainer.toy.batch())
    assert trainer.step.report().matched == 1
    assert trainer.step.report().eager_calls == {"warmup": 3, "attribute": 2}


def test_a_step_that_is_no_longer_replayed_says_so(device):
    """The caller keeps each result in a place where the step looks something up."""
    trainer = CountingTrainer(device)
    trainer.step._on_mismatch = "eager"
    for _ in range(6):
        trainer.step(trainer.toy.batch())
    with pytest.warns(GraphWarning, match=r"ran eagerly 3 times \(attribute\): .*_replayed"):
        trainer.step(trainer.toy.batch())
    trainer.step(trainer.toy.batch())


def test_a_step_that_is_replayed_now_and_then_says_so_once(device):
    toy = Toy(device)
    step = toy.graph(on_mismatch="eager")

    def calls(number, every):
        for call in range(number):
            step(dict(toy.batch(), scale=0.5 if call % every == 1 else 1.0))

    calls(8, every=2)
    said_of = r"full iteration ran eagerly 3 times \(constant\): .*scale"
    with pytest.warns(GraphWarning, match=said_of) as said:
        calls(60, every=3)
    assert len(said) == 1


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
    assert step.report().matched == 3


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
            assert step.report().matched == 3
        return returned

    both(device, scenario)
    toy = Toy(device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(toy.optimizer, lambda n: 0.9**n)

    def stepping(batch):
        result = toy.step(batch)
        scheduler.step()
        return result

    step = FullIteration(
        stepping,
        model=toy.model,
        optimizer=toy.optimizer,
        state=[scheduler],
        warmup_steps=1,
        on_capture_error="error",
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
    """Releasing clears the workspaces of cuBLAS; those of other graphs must lie in their pools."""

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
    assert run.step.report().matched == 5
