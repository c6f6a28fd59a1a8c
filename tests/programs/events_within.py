"""Events within a step of a program: ways to run it, and events between forward and backward.

``PLANS``: functions of (plan, pick) that change how a step runs, for this one or, if pick is odd,
from then on. ``WITHIN``: functions of (world, result, loss, pick).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from programs.bodies_python import flag
from programs.events_between import FACTORS, change_buffer, draw_numbers, note, turn_knob
from programs.world import Plan

PLANS: dict[str, Callable[[Plan, int], None]] = {}
WITHIN: dict[str, Callable[..., None]] = {}


def changes_plan(function: Callable[[Plan, int], None]) -> Callable[[Plan, int], None]:
    PLANS[function.__name__] = function
    return function


def within(function: Callable[..., Any]) -> Callable[..., Any]:
    WITHIN[function.__name__] = function
    return function


# ---- how a step runs


@changes_plan
def other_rows(plan, pick):
    plan.rows = (5, 1, 2)[pick // 2 % 3]


@changes_plan
def other_terms(plan, pick):
    plan.terms = ("none", "first")[pick // 2 % 2]


@changes_plan
def other_gradients(plan, pick):
    kinds = ("autograd_grad", "some_inputs", "penalty", "retained_twice", "retained",
             "each_term_alone", "scaled", "averaged", "clipped")  # fmt: skip
    plan.gradients = kinds[pick // 2 % len(kinds)]


@changes_plan
def other_order(plan, pick):
    kinds = ("all_then_all", "last_first", "interleaved", "summed", "forward_left_alone",
             "fed_back", "accumulate")  # fmt: skip
    plan.order = kinds[pick // 2 % len(kinds)]


@changes_plan
def other_input(plan, pick):
    plan.input = ("transposed", "expanded", "kept", "double")[pick // 2 % 4]


@changes_plan
def keep(plan, pick):
    kinds = ("hidden", "detached", "view", "loss", "terms", "transposed")
    plan.kept = (*plan.kept, kinds[pick // 2 % len(kinds)])


@changes_plan
def abort(plan, pick):
    plan.abort = ("forward", "backward")[pick // 2 % 2]


CONTEXTS = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "autocast without cache": partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False),
    "sdpa_kernel": partial(sdpa_kernel, SDPBackend.MATH),
    "flag": flag,
    "anomaly": torch.autograd.detect_anomaly,
    "saved_tensors_hooks": partial(
        torch.autograd.graph.saved_tensors_hooks, torch.clone, lambda tensor: tensor
    ),
}


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _double_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONTEXTS["deterministic"] = _deterministic
CONTEXTS["default dtype"] = _double_by_default


@changes_plan
def context(plan, pick):
    """Puts a context around forwards, backwards or the whole step."""
    where = ("around_forward", "around_backward", "around_step")[pick // 2 % 3]
    names = sorted(CONTEXTS)
    setattr(plan, where, CONTEXTS[names[pick // 6 % len(names)]])


# ---- between forward and backward


@within
def weights_changed(world, result, loss, pick):
    with torch.no_grad():
        world.parameter(pick).mul_(FACTORS[pick % 2])


@within
def weights_changed_by_data(world, result, loss, pick):
    world.parameter(pick).data.mul_(FACTORS[pick % 2])


@within
def hidden_changed(world, result, loss, pick):
    with torch.no_grad():
        (result.hidden.data if pick % 2 else result.hidden).mul_(0.5)


@within
def hook_hidden(world, result, loss, pick):
    if result.hidden.requires_grad:
        hooks = (lambda gradient: gradient * 2.0, partial(note, world))
        result.hidden.register_hook(hooks[pick % 2])


@within
def hook_terms(world, result, loss, pick):
    """A hook gets None if the term gets no gradient and another output of its scope gets one."""
    for term in itertools.islice((t for t in result.terms if t.requires_grad), 2):
        term.register_hook(lambda gradient: None if gradient is None else gradient * 3.0)


@within
def retain_hidden(world, result, loss, pick):
    if result.hidden.requires_grad:
        result.hidden.retain_grad()
        world.kept.append(result.hidden)


@within
def knob_meanwhile(world, result, loss, pick):
    turn_knob(world, pick)


@within
def mode_meanwhile(world, result, loss, pick):
    world.model.train(bool(pick % 2))


@within
def gradient_meanwhile(world, result, loss, pick):
    parameter = world.parameter(pick)
    parameter.grad = torch.ones_like(parameter)


@within
def evaluation_meanwhile(world, result, loss, pick):
    with torch.no_grad():
        world.log.append(world.model(world.batch()[0].detach()).hidden.clone())


@within
def buffer_meanwhile(world, result, loss, pick):
    change_buffer(world, pick)


@within
def draw_meanwhile(world, result, loss, pick):
    draw_numbers(world, pick)


@within
def frozen_meanwhile(world, result, loss, pick):
    world.parameter(pick).requires_grad_(bool(pick % 2))
