"""Calls that differ from the captured step: rows of the table in test_full_iteration_faults."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from grids import by_turns
from moe_graphs import CaptureError, GraphError
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from toy_steps import Toy, add_hook, both, warm
from training_runs import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)


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


@pytest.mark.parametrize(
    ("policy", "difference"), by_turns(["error", "eager", "recapture"], list(DIFFERENT))
)
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


@pytest.mark.filterwarnings("ignore:full iteration ran eagerly:moe_graphs.GraphWarning")
@pytest.mark.parametrize(("policy", "change"), by_turns(["eager", "recapture"], list(CHANGES)))
def test_changes_are_followed_on_request(device, change, policy):
    def scenario(toy, step):
        CHANGES[change][0](toy)
        return [step(toy.batch()) for _ in range(2)]

    report = both(device, scenario, {"on_mismatch": policy})
    # The optimizer does not know the new parameter, so it does not zero its gradient either.
    again = 2 if change == "replaced" else 1
    assert report.captures == 1 + (again if policy == "recapture" else 0)


def test_a_hook_after_the_capture(device):
    toy = Toy(device)
    step = warm(toy)
    add_hook(toy)
    with pytest.raises(GraphError, match="hooks"):
        step(toy.batch())


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameters_hook_that_comes_where_one_has_gone(device, kind):
    toy = Toy(device)
    register = getattr(toy.model.first.weight, kind)
    register(print).remove()
    step = warm(toy)
    handle = register(lambda gradient: None)
    with pytest.raises(GraphError, match="weight has other hooks now"):
        step(toy.batch())
    handle.remove()
    step(toy.batch())
    register(print)
    with pytest.raises(GraphError, match="weight has other hooks now"):
        step(toy.batch())


def test_a_rate_in_a_float_must_stay_as_it_is(device):
    toy = Toy(device, rate=0.01)
    step = warm(toy)
    toy.optimizer.param_groups[0]["lr"] = 0.02
    with pytest.raises(
        GraphError, match=r"\['lr'\]. was 0.01 .* is 0.02 now.*tensor_hyperparameters"
    ):
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


def test_a_step_that_is_captured_anew_leaves_the_states_of_first_updates(device):
    """A parameter gets its first gradient in the step that is captured anew."""

    def scenario(toy, step):
        def late(loss):
            toy.model.unused.grad = torch.ones_like(toy.model.unused)
            return loss

        toy.inside = late
        return step(toy.batch())

    report = both(device, scenario, {"on_mismatch": "recapture"})
    assert report.captures == 2
