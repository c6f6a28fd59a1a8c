"""Forwards and backwards of one step of a program.

Every engine runs ``train_step``: within ``graphs.step()``, with graphed callables, or as the
function that ``FullIteration`` captures. It changes nothing in Python unless an event asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from programs.model import Result
from programs.world import Planned, World

Outputs = list[dict[str, Any]]
ORDERS: dict[str, Callable[[World, Sequence[torch.Tensor]], Outputs]] = {}
GRADIENTS: dict[str, Callable[..., Any]] = {}


def train_step(world: World, batch: Sequence[torch.Tensor]) -> Outputs:
    outputs = ORDERS[world.plan.order](world, batch)
    if world.program.optimizer_inside:
        update(world)
    return outputs


def update(world: World) -> None:
    world.optimizer.step()
    if world.program.zero != "never":
        world.optimizer.zero_grad(set_to_none=world.program.zero == "none")


# ---- one microbatch


def forward(world: World, x: torch.Tensor) -> tuple[Result, torch.Tensor]:
    plan = world.plan
    with plan.around_forward():
        result = world.model(x)
    terms = {"all": result.terms, "first": result.terms[:1], "none": []}[plan.terms]
    if world.program.own_layers:
        return result, sum(terms) if terms else result.hidden.square().mean()
    loss = sum((0.1 * term for term in terms), result.hidden.square().mean())
    return result, loss


def backward(world: World, x: torch.Tensor, result: Result, loss: torch.Tensor) -> dict[str, Any]:
    plan = world.plan
    for before in plan.before_backward:
        before(world, result, loss)
    with plan.around_backward():
        gradients = GRADIENTS[plan.gradients](world, x, result, loss)
    return _observed(world, x, result, loss, gradients)


def _observed(
    world: World, x: torch.Tensor, result: Result, loss: torch.Tensor, gradients: Any
) -> dict[str, Any]:
    for what in world.plan.kept:
        world.kept += _what_to_keep(what, result, loss)
    return {
        "loss": loss.detach(),
        "hidden": result.hidden.detach().clone(),
        "terms": [term.detach().clone() for term in result.terms],
        "gradients": gradients,
        "input gradient": None if x.grad is None else x.grad.clone(),
    }


def _what_to_keep(what: str, result: Result, loss: torch.Tensor) -> list[torch.Tensor]:
    hidden = result.hidden
    return {
        "hidden": [hidden],
        "detached": [hidden.detach()],
        "view": [hidden.detach()[1:]],
        "loss": [loss],
        "terms": [term.detach() for term in result.terms],
        "transposed": [hidden.t() if hidden.dim() == 2 else hidden.transpose(0, 1)],
    }[what]


# ---- how gradients are asked for


def _gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    GRADIENTS[function.__name__.lstrip("_")] = function
    return function


@_gradients
def _backward(world, x, result, loss):
    loss.backward()


@_gradients
def _autograd_grad(world, x, result, loss):
    """``autograd.grad`` for half of the parameters, which keep no ``.grad``."""
    parameters = [p for p in world.model.parameters() if p.requires_grad][::2]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [None if gradient is None else gradient.clone() for gradient in found]


@_gradients
def _some_inputs(world, x, result, loss):
    loss.backward(inputs=[p for p in world.model.parameters() if p.requires_grad][1::2])


@_gradients
def _penalty(world, x, result, loss):
    """The norm of the gradient of a weight is a part of the loss."""
    parameters = [p for p in world.model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    norms = [gradient.square().sum() for gradient in first if gradient is not None]
    (loss + 0.1 * sum(norms)).backward()


@_gradients
def _retained_twice(world, x, result, loss):
    loss.backward(retain_graph=True)
    loss.backward()


@_gradients
def _retained(world, x, result, loss):
    loss.backward(retain_graph=True)


@_gradients
def _each_term_alone(world, x, result, loss):
    """One backward for each term, through a graph that the terms share."""
    for term in [term for term in result.terms if term.requires_grad]:
        term.backward(retain_graph=True)
    loss.backward()


@_gradients
def _scaled(world, x, result, loss):
    """Scaled loss and gradients that are unscaled in place, as a loss scaler does it."""
    (loss * 8.0).backward()
    for parameter in world.model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(8.0)


@_gradients
def _averaged(world, x, result, loss):
    """``.grad`` is assigned, as code that reduces over ranks does."""
    loss.backward()
    for parameter in world.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


@_gradients
def _clipped(world, x, result, loss):
    loss.backward()
    return torch.nn.utils.clip_grad_norm_(world.model.parameters(), 0.1).clone()


# ---- the order of microbatches


def _order(function: Callable[..., Any]) -> Callable[..., Any]:
    ORDERS[function.__name__.lstrip("_")] = function
    return function


def _raise_if_planned(world: World, place: str) -> None:
    if world.plan.abort == place:
        raise Planned(place)


@_order
def _accumulate(world, batch):
    outputs = []
    for x in batch:
        result, loss = forward(world, x)
        _raise_if_planned(world, "forward")
        outputs.append(backward(world, x, result, loss))
    _raise_if_planned(world, "backward")
    return outputs


@_order
def _all_then_all(world, batch):
    found = [forward(world, x) for x in batch]
    _raise_if_planned(world, "forward")
    return [backward(world, x, *each) for x, each in zip(batch, found, strict=True)]


@_order
def _last_first(world, batch):
    found = [forward(world, x) for x in batch]
    backwards = [
        backward(world, x, *each) for x, each in zip(batch[::-1], found[::-1], strict=True)
    ]
    return backwards[::-1]


@_order
def _interleaved(world, batch):
    """The schedule 1F1B of depth two."""
    outputs, waiting = [], []
    for x in batch:
        waiting.append((x, *forward(world, x)))
        if len(waiting) == 2:
            outputs.append(backward(world, *waiting.pop(0)))
    _raise_if_planned(world, "forward")
    return outputs + [backward(world, *each) for each in waiting]


@_order
def _summed(world, batch):
    """All losses in one backward."""
    found = [forward(world, x) for x in batch]
    total = sum(loss for _, loss in found)
    _raise_if_planned(world, "forward")
    last = Result(found[-1][0].hidden, [t for result, _ in found for t in result.terms])
    return [backward(world, batch[-1], last, total)]


@_order
def _forward_left_alone(world, batch):
    """A forward without a backward before each forward with one."""
    outputs = []
    for x in batch:
        forward(world, x)
        outputs.append(backward(world, x, *forward(world, x)))
    return outputs


@_order
def _fed_back(world, batch):
    """Each microbatch starts from the result of the one before (backpropagation through time)."""
    if world.program.own_layers:
        return _accumulate(world, batch)
    x, losses, result = batch[0], [], None
    for _ in range(2):
        result, loss = forward(world, x)
        losses.append(loss)
        x = result.hidden
    _raise_if_planned(world, "forward")
    return [backward(world, batch[0], result, sum(losses))]
