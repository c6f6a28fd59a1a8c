"""Events before a step of a program: ``BEFORE`` has functions of (world, pick) by name.

``pick`` is a number to choose with. The functions draw no random numbers unless that is what they
do. ``note`` is for hooks that look.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from programs.bodies_python import GLOBALS
from programs.world import World

BEFORE: dict[str, Callable[[World, int], None]] = {}
FACTORS = (0.5, 2.0)


def before(function: Callable[[World, int], None]) -> Callable[[World, int], None]:
    BEFORE[function.__name__] = function
    return function


# ---- Python


@before
def turn_knob(world, pick):
    choices = world.turnable()
    if choices:
        choices[pick % len(choices)].turn(pick // 7)


@before
def patch_forward(world, pick):
    module = world.linears()[pick % len(world.linears())]
    module.forward = partial(_patched, type(module).forward.__get__(module))


def _patched(original, x):
    return original(x) * 2.0


@before
def set_attribute(world, pick):
    modules = list(world.model.modules())
    modules[pick % len(modules)].a_new_attribute = pick


@before
def add_module(world, pick):
    module = world.linears()[pick % len(world.linears())]
    module.add_module("a_new_module", nn.Identity())


@before
def train_or_eval(world, pick):
    modules = list(world.model.modules())
    modules[pick % len(modules)].train(bool(pick & 8))


@before
def seed_everything(world, pick):
    torch.manual_seed(pick)
    random.seed(pick)
    np.random.seed(pick)


@before
def draw_numbers(world, pick):
    world.log.append(float(torch.rand(())) + random.random() + float(np.random.rand()))
    torch.rand(pick % 3, generator=GLOBALS["generator"])


@before
def new_generator(world, pick):
    GLOBALS["generator"] = torch.Generator().manual_seed(pick)


@before
def collect_garbage(world, pick):
    gc.collect()


# ---- parameters, buffers, modules


@before
def scale_parameter(world, pick):
    with torch.no_grad():
        world.parameter(pick).mul_(FACTORS[pick % 2])


@before
def freeze(world, pick):
    parameter = world.parameter(pick)
    parameter.requires_grad_(not parameter.requires_grad)


@before
def assign_data(world, pick):
    parameter = world.parameter(pick)
    data = parameter.data
    is_square = data.dim() == 2 and data.shape[0] == data.shape[1]
    parameter.data = data.t() if is_square and pick & 16 else data.clone() * 0.5


@before
def replace_parameter(world, pick):
    linear = world.linears()[pick % len(world.linears())]
    linear.weight = nn.Parameter(linear.weight.detach() * 0.5)


@before
def replace_module(world, pick):
    places = [
        (m._modules, key)
        for m in world.model.modules()
        for key, child in m._modules.items()
        if isinstance(child, nn.Linear)
    ]
    place, key = places[pick % len(places)]
    place[key] = copy.deepcopy(place[key])


@before
def replace_buffer(world, pick):
    places = _buffers(world)
    if places:
        place, key = places[pick % len(places)]
        place[key] = place[key].clone()


@before
def change_buffer(world, pick):
    places = _buffers(world)
    if places:
        place, key = places[pick % len(places)]
        place[key].copy_(place[key] * 0 + 2)


def _buffers(world: World) -> list[tuple[dict, str]]:
    places = [m._buffers for m in world.model.modules()]
    return [(place, key) for place in places for key, b in place.items() if b is not None]


@before
def load_state(world, pick):
    """Keeps the weights the first time; then, and later, loads half of the kept weights."""
    if not world.saved_state:
        world.saved_state = copy.deepcopy(world.model.state_dict())
    changed = {
        key: value * 0.5 if value.is_floating_point() else value
        for key, value in world.saved_state.items()
    }
    world.model.load_state_dict(changed, assign=pick % 4 == 3)


@before
def tie_weights(world, pick):
    first, *others = world.linears()
    same = [m for m in others if m.weight.shape == first.weight.shape]
    if same:
        same[pick % len(same)].weight = first.weight


@before
def average_copy(world, pick):
    """An EMA copy, used once."""
    twin = copy.deepcopy(world.model)
    with torch.no_grad():
        for mine, other in zip(twin.parameters(), world.model.parameters(), strict=True):
            mine.lerp_(other, 0.5)
        world.log.append(twin(world.batch()[0].detach()).hidden.clone())


@before
def pickled(world, pick):
    twin = pickle.loads(pickle.dumps(world.model))
    with torch.no_grad():
        world.log.append(twin(world.batch()[0].detach()).hidden.clone())


@before
def saved(world, pick):
    torch.save(world.model.state_dict(), io.BytesIO())


# ---- gradients and optimizer


@before
def set_gradient(world, pick):
    parameter = world.parameter(pick)
    kind = pick // 7 % 4
    if kind == 0:
        parameter.grad = None
    elif kind == 1:
        parameter.grad = torch.ones_like(parameter)
    elif kind == 2:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad is not None:
        world.kept.append(parameter.grad)


@before
def change_rate(world, pick):
    for group in world.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor) and pick % 2:
            group["lr"].mul_(0.5)
        else:
            group["lr"] = group["lr"] * 0.5


@before
def change_decay(world, pick):
    for group in world.optimizer.param_groups:
        group["weight_decay"] = 0.3


@before
def reload_optimizer(world, pick):
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))


# ---- hooks


@before
def remove_hooks(world, pick):
    while world.handles:
        world.handles.pop().remove()


@before
def hook_parameter(world, pick):
    parameter = world.parameter(pick)
    if not parameter.requires_grad:
        return
    if pick // 7 % 3 == 0:
        handle = parameter.register_hook(lambda gradient: gradient * 0.5)
    elif pick // 7 % 3 == 1:
        handle = parameter.register_hook(partial(note, world))
    else:
        handle = parameter.register_post_accumulate_grad_hook(partial(_note_and_halve, world))
    world.handles.append(handle)


def note(world: World, *values: Any) -> None:
    world.log += [v.detach().clone() for v in values if isinstance(v, torch.Tensor)]


def _note_and_halve(world: World, parameter: torch.Tensor) -> None:
    world.log.append(parameter.grad.detach().clone())
    parameter.grad.mul_(0.5)


@before
def hook_accumulator(world, pick):
    parameter = world.parameter(pick)
    if parameter.requires_grad:
        accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
        world.handles.append(accumulator.register_prehook(lambda grads: (grads[0] * 2.0,)))
        world.kept.append(accumulator)  # without it the hook would be gone


@before
def hook_module(world, pick):
    modules = list(world.model.modules())[1:]
    module = modules[pick % len(modules)]
    kind = pick // 7 % 5
    if kind == 0:
        handle = module.register_forward_hook(lambda m, args, out: note_leaves(world, out))
    elif kind == 1:
        handle = module.register_forward_hook(_halves)
    elif kind == 2:
        handle = module.register_forward_pre_hook(lambda m, args: note_leaves(world, args))
    elif kind == 3:
        handle = module.register_full_backward_hook(lambda m, i, o: note_leaves(world, (i, o)))
    else:
        handle = module.register_full_backward_pre_hook(_halves_gradients)
    world.handles.append(handle)


def note_leaves(world: World, tree: Any) -> None:
    note(world, *torch.utils._pytree.tree_leaves(tree))


def _halves(module, args, out):
    return out * 0.5 if isinstance(out, torch.Tensor) else None


def _halves_gradients(module, gradients):
    return tuple(None if g is None else g * 0.5 for g in gradients)


# ---- evaluation


@before
def evaluate(world, pick):
    mode = (torch.no_grad, torch.inference_mode)[pick % 2]
    was_training = world.model.training
    if pick // 2 % 2:
        world.model.eval()
    with mode():
        world.log.append(world.model(world.batch()[0].detach()).hidden.clone())
    world.model.train(was_training)


@before
def outside_of_step(world, pick):
    """A forward and a backward that are no step of training."""
    world.model(world.batch()[0]).hidden.sum().backward()
    world.model.zero_grad()
