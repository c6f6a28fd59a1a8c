"""A snapshot puts back each of its parts, and nothing else."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from moe_graphs.engine.backends import backend_for
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.guards import Guards
from moe_graphs.engine.snapshot import Snapshot, random_digest
from moe_graphs.engine.tracing import Trace

CPU = torch.device("cpu")


class Counting(nn.Linear):
    """A module whose forward reads Python state that a step could change."""

    def __init__(self):
        super().__init__(3, 3)
        self.count, self.table, self.random = 0, {"a": 1, "b": [2]}, random.Random(0)

    def forward(self, x):
        return super().forward(x) * self.count + self.table["a"] + self.random.random()


def a_world():
    torch.manual_seed(0)
    model = Counting()
    model(torch.ones(3)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    generator = torch.Generator().manual_seed(3)
    backend = backend_for([*model.parameters()], [generator])
    return SimpleNamespace(
        model=model, optimizer=optimizer, generator=generator, backend=backend, extra=[]
    )


def guards_of(world) -> Guards:
    reads = AccessedNames.before_running(type(world.model).forward)
    reads.owners = {id(world.model): world.model}
    return Guards({"": world.model}, reads)


def state_of_python(world) -> list:
    model = world.model
    return [model.count, list(model.table.items()), model.random.getstate()]


def change_python(world) -> None:
    world.model.count += 1
    world.model.random.random()
    del world.model.table["a"]
    world.model.table["a"] = 3


def change_hooks(world) -> None:
    model = world.model
    model.weight.register_hook(print)
    model.register_forward_hook(print)
    world.optimizer.register_step_pre_hook(print)


def hooks(world) -> list:
    model = world.model
    return [
        bool(model.weight._backward_hooks),
        len(model._forward_hooks),
        len(world.optimizer._optimizer_step_pre_hooks),
    ]


def update(world) -> None:
    world.optimizer.step()
    world.optimizer.param_groups[0]["lr"] = 0.5


def optimizer_state(world) -> list:
    state = world.optimizer.state_dict()
    return [group["lr"] for group in state["param_groups"]] + [
        value.tolist() for each in state["state"].values() for value in each.values()
    ]


# Each part has what the snapshot is given, what changes it, and what is the same afterwards.
PARTS = {
    "random numbers of torch": (
        lambda w: {"backend": w.backend},
        lambda w: torch.rand(2),
        lambda w: random_digest(w.backend),
    ),
    "another generator": (
        lambda w: {"backend": w.backend},
        lambda w: torch.rand(2, generator=w.generator),
        lambda w: random_digest(w.backend),
    ),
    "values": (
        lambda w: {"values": w.model.parameters()},
        lambda w: w.model.weight.data.zero_(),
        lambda w: w.model.weight.tolist(),
    ),
    "values on the host": (
        lambda w: {"values": w.model.parameters(), "on_host": True},
        lambda w: w.model.weight.data.zero_(),
        lambda w: w.model.weight.tolist(),
    ),
    "objects": (lambda w: {"guards": [guards_of(w)]}, change_python, state_of_python),
    "random numbers of Python": (
        lambda w: {"python_random": True},
        lambda w: random.random(),
        lambda w: random.getstate(),
    ),
    "random numbers of numpy": (
        lambda w: {"python_random": True},
        lambda w: numpy.random.rand(),
        lambda w: numpy.random.get_state()[1].tolist(),
    ),
    "hooks": (
        lambda w: {"hooks_of": [*w.model.parameters(), w.model, w.optimizer]},
        change_hooks,
        hooks,
    ),
    "gradients": (
        lambda w: {"gradients_of": w.model.parameters()},
        lambda w: w.model.zero_grad(),
        lambda w: [id(p.grad) for p in w.model.parameters()],
    ),
    "optimizer": (lambda w: {"optimizer": w.optimizer}, update, optimizer_state),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_put_back(part):
    arguments, change, look = PARTS[part]
    world = a_world()
    before, taken = look(world), arguments(world)
    with pytest.raises(ZeroDivisionError), Snapshot(**taken):
        change(world)
        assert look(world) != before
        raise ZeroDivisionError
    assert look(world) == before


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_not_given_is_left_alone(part):
    _, change, look = PARTS[part]
    world = a_world()
    before = look(world)
    others = {}
    for name, (arguments, *_) in PARTS.items():
        if not set(arguments(world)) & set(PARTS[part][0](world)):
            others |= {} if name == part else arguments(world)
    with Snapshot(**others):
        change(world)
    assert look(world) != before


def test_a_snapshot_is_put_back_as_often_as_needed():
    tensor = torch.arange(3.0)
    before = Snapshot(values=[tensor])
    for _ in range(2):
        tensor.fill_(7)
        before.put_back()
        assert tensor.tolist() == [0, 1, 2]


def test_versions_and_addresses_stay():
    tensor = torch.arange(3.0)
    where, version = tensor.data_ptr(), tensor._version
    with Snapshot(values=[tensor]):
        tensor.fill_(7)
    assert (tensor.data_ptr(), tensor._version) == (where, version)


def test_what_was_kept_last_is_put_back_first():
    tensor = torch.arange(4.0)
    with Snapshot() as before:
        before.keep(tensor)
        tensor[:2].fill_(7)
        before.keep(tensor[1:3])  # with the new value of tensor[1]
        tensor.fill_(9)
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_part_that_cannot_be_put_back_costs_no_other():
    world = a_world()
    gone = torch.zeros(8)
    tensors = [world.model.weight, gone]
    before, state = world.model.weight.grad, Snapshot(values=tensors, gradients_of=tensors)
    world.model.weight.grad = None
    gone.resize_(4)
    with pytest.raises(RuntimeError, match="size"):
        state.put_back()
    assert world.model.weight.grad is before


def test_copies_go_with_the_snapshot():
    """The copies do not need the garbage collector, which does not run during a capture."""
    gc.disable()
    try:
        state = Snapshot(values=[torch.zeros(3)], gradients_of=[torch.zeros(2)])
        (value,) = map(weakref.ref, state.values)
        del state
        assert value() is None
        with Snapshot(values=[torch.zeros(3)]) as state:
            (value,) = map(weakref.ref, state.values)
        assert value() is None  # though somebody holds the snapshot
    finally:
        gc.enable()


def test_what_has_been_drawn_is_told():
    world = a_world()
    state = Snapshot(world.backend, python_random=True)
    assert not state.has_drawn()
    assert state.drawn_from() is None
    torch.rand(1, generator=world.generator)
    random.random()
    assert state.has_drawn()
    assert state.drawn_from() == "Python's random"
    numpy.random.rand()
    assert state.drawn_from() == "numpy.random"
    state.put_back()
    assert not state.has_drawn()
    assert state.drawn_from() is None


def test_a_trace_adds_what_is_written_outside_of_its_block():
    outside, view = torch.arange(4.0), torch.arange(4.0)
    with Snapshot() as before:
        trace = Trace(CPU, [outside, view], before=before)
        with trace:
            made = torch.zeros(2).add_(outside[0])
            outside.add_(1)
            outside.mul_(2)
            view[:3].add_(outside[:3])
            view[1:].zero_()
            made[:1].zero_()
        assert len(before.tensors) == 3  # one tensor, and two views of the other
    assert outside.tolist() == view.tolist() == [0, 1, 2, 3]
    assert trace._before is None  # what is kept of a trace holds no copies


def test_a_tensor_that_python_makes_in_the_block_is_the_blocks_own():
    with Snapshot() as before:
        with Trace(CPU, before=before):  # strict: memory from outside would be refused
            made = torch.tensor([1.0, 2.0])
            made[0].add_(1)
            made.mul_(2)
        assert before.tensors == []
    assert made.tolist() == [4, 4]


@pytest.mark.gpu
def test_parts_on_a_gpu_are_put_back():
    weight = torch.arange(4.0, device="cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    backend = backend_for([weight], [generator])
    before = random_digest(backend)
    for on_host in (False, True):
        with Snapshot(backend, values=[weight], on_host=on_host) as state:
            assert state.values[0].is_cuda is (not on_host)
            weight += torch.rand(4, device="cuda") + torch.rand(
                4, device="cuda", generator=generator
            )
            assert state.has_drawn()
        assert weight.tolist() == [0, 1, 2, 3]
        assert random_digest(backend) == before
