"""Batches in fixed memory: right values, clear errors, and a loader that goes on after errors."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_graphs import GraphError
from moe_graphs.training.static_loader import StaticLoader
from training_runs import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)


def batch(number: int, rows: int = 4, **changes) -> dict:
    nested = {"tokens": torch.full((rows, 3), number), "mask": (torch.ones(rows) * number,)}
    return {**nested, "name": "train", **changes}


def number(batch: dict) -> int:
    return int(batch["tokens"][0, 0])


class Flaky:
    """An iterator that raises at one batch and goes on with the next."""

    def __init__(self, count: int, bad: int) -> None:
        self.numbers, self.bad = iter(range(count)), bad

    def __iter__(self) -> Flaky:
        return self

    def __next__(self) -> dict:
        number = next(self.numbers)
        if number == self.bad:
            raise OSError("disk on fire")
        return batch(number)


def drain(loader: StaticLoader) -> list[int | str]:
    """Number in each batch, or the error in its place."""
    batches, found = iter(loader), []
    while True:
        try:
            found.append(number(next(batches)))
        except StopIteration:
            return found
        except (GraphError, OSError) as error:
            found.append(str(error))


@pytest.mark.parametrize("held", [1, 3])
def test_batches_arrive_unchanged_in_few_places(device, held):
    loader = StaticLoader([batch(n) for n in range(9)], device, held=held)
    assert len(loader) == 9
    for _ in range(2):
        places = set()
        for index, got in enumerate(loader):
            assert got["name"] == "train"
            assert got["tokens"].device.type == device
            assert torch.equal(got["tokens"].cpu(), torch.full((4, 3), index))
            assert torch.equal(got["mask"][0].cpu(), torch.ones(4) * index)
            places.add(got["tokens"].data_ptr())
        assert len(places) == held + 1


def test_held_batches_stay_good(device):
    batches = iter(StaticLoader([batch(n) for n in range(8)], device, held=3))
    for first in (0, 3):
        group = list(itertools.islice(batches, 3))
        assert [number(each) for each in group] == [first, first + 1, first + 2]


def test_a_batch_is_not_overwritten_while_enqueued_work_reads_it(device):
    """The reads on a GPU wait behind a long kernel; the host takes all batches meanwhile."""
    loader = StaticLoader([batch(n, rows=1 << 16) for n in range(20)], device)
    sums = []
    for each in loader:
        if device == "cuda":
            torch.cuda._sleep(20_000_000)
        sums.append(each["tokens"].sum())
    assert [int(s) for s in sums] == [3 * n << 16 for n in range(20)]


def test_a_reused_host_buffer_is_read_in_time(device):
    """A loader may write each batch into the same host memory, once the next one is asked for."""

    def reusing() -> Iterator[dict]:
        buffer = batch(0, rows=1 << 16)
        for number in range(20):
            buffer["tokens"].fill_(number)
            yield buffer

    sums = [each["tokens"].sum() for each in StaticLoader(reusing(), device)]
    assert [int(s) for s in sums] == [3 * n << 16 for n in range(20)]


MISFITS = {
    "last partial batch": (lambda n: batch(n, rows=3), "batch['tokens'] was [4, 3] torch.int64"),
    "missing key": (lambda n: {"tokens": batch(n)["tokens"]}, "batch['mask'][0], batch['name'] mi"),
    "extra key": (lambda n: batch(n, more=1), "batch['more'] not known"),
    "changed dtype": (
        lambda n: batch(n, tokens=torch.full((4, 3), float(n))),
        "[4, 3] torch.float32 now",
    ),
    "changed constant": (lambda n: batch(n, name="test"), "batch['name']"),
    "no tensor": (lambda n: batch(n, tokens=[[n]]), "batch['tokens']"),
}


@pytest.mark.parametrize("misfit", [m for m in MISFITS if m != "no tensor"])
@pytest.mark.parametrize("policy", ["error", "pass"])
def test_a_batch_that_does_not_fit(device, misfit, policy):
    make, message = MISFITS[misfit]
    loader = StaticLoader([batch(0), make(1), batch(2), batch(3)], device, on_mismatch=policy)
    first, second, *rest = drain(loader)
    assert (first, rest) == (0, [2, 3])
    assert second == 1 if policy == "pass" else message in second


def test_something_else_where_a_tensor_was(device):
    found = drain(StaticLoader([batch(0), batch(1, tokens=7), batch(2)], device))
    assert found[::2] == [0, 2]
    assert "batch['tokens'] was a tensor in the first batch and is 7 now" in found[1]


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_an_exception_in_the_loader_comes_in_its_turn_and_the_loader_goes_on(device, bad):
    found = drain(StaticLoader(Flaky(4, bad), device))
    expected: list[int | str] = [0, 1, 2, 3]
    expected[bad] = "disk on fire"
    assert found == expected


def test_loaders_share_nothing(device):
    one = StaticLoader([batch(n) for n in range(4)], device)
    other = StaticLoader([batch(n, rows=2) for n in range(10, 14)], device)
    pairs = [(number(a), number(b)) for a, b in zip(one, other, strict=True)]
    assert pairs == [(n, n + 10) for n in range(4)]


def test_a_second_pass_ends_the_first(device):
    loader = StaticLoader([batch(n) for n in range(4)], device)
    first = iter(loader)
    next(first)
    assert drain(loader) == [0, 1, 2, 3]
    with pytest.raises(GraphError, match="another iter"):
        next(first)


def test_batches_that_are_on_the_device_already(device):
    source = ({"tokens": torch.full((4, 3), n, device=device)} for n in range(5))
    assert drain(StaticLoader(source, device)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("endless", ["generator", "iter"])
def test_a_break_over_an_iterator_loses_no_batch(device, endless):
    numbers = range(8)
    source = map(batch, numbers) if endless == "iter" else (batch(n) for n in numbers)
    loader, found = StaticLoader(source, device), []
    for each in loader:
        found.append(number(each))
        if len(found) == 3:
            break
    assert found + drain(loader) == list(numbers)


class Drawing:
    """A loader with a state for checkpoints, whose batches come from torch's generator."""

    def __init__(self) -> None:
        self.state = 0

    def __iter__(self) -> Iterator[dict]:
        while self.state < 6:
            self.state += 1
            yield {"x": torch.rand(3)}


def test_the_loader_is_never_ahead_in_its_state_and_its_random_draws(device):
    runs = []
    for wrap in (lambda loader: loader, lambda loader: StaticLoader(loader, device)):
        torch.manual_seed(0)
        loader, found = Drawing(), []
        for each in wrap(loader):
            found += [loader.state, each["x"].tolist(), torch.rand(1).item()]
        runs.append(found)
    assert runs[0] == runs[1]


LAYOUTS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "gaps": lambda x: x[..., 1:],
    "one element": lambda x: x[:1, :1, :1, :1].transpose(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_are_those_of_the_batch_on_the_device(device, layout):
    batches = [layout(torch.randn(2, 3, 4, 6)) for _ in range(5)]
    expected = [each.to(device) for each in batches]
    for source in (batches, expected):  # batches in host memory, and batches on the device
        loader = StaticLoader(source, device)
        for want, got in zip(expected, loader, strict=True):
            assert got.stride() == want.stride()
            assert torch.equal(got, want)


def test_other_strides_are_a_mismatch(device):
    plain = torch.randn(2, 3, 4, 6)
    loader = StaticLoader([plain, LAYOUTS["channels_last"](plain)], device)
    batches = iter(loader)
    next(batches)
    with pytest.raises(GraphError, match=r"strides \[72, 24, 6, 1\].*strides \[72, 1, 18, 3\] now"):
        next(batches)
    passing = StaticLoader(loader.loader, device, on_mismatch="pass")
    assert [each.stride() for each in passing] == [each.stride() for each in loader.loader]


CONSTANTS = [(0.0, -0.0), (1, True), (1, 1.0), (0, False), (complex(0, 0.0), complex(0, -0.0))]
SAME = [float("nan"), -0.0, None, "text", 3, torch.float32]


@pytest.mark.parametrize("pair", CONSTANTS, ids=str)
def test_constants_that_only_compare_equal_are_a_mismatch(device, pair):
    batches = [batch(n, scale=constant) for n, constant in enumerate(pair)]
    _, error = drain(StaticLoader(batches, device))
    assert f"batch['scale'] was {pair[0]!r} in the first batch and is {pair[1]!r} now" in error
    passed = StaticLoader(batches, device, on_mismatch="pass")
    assert [repr(each["scale"]) for each in passed] == [repr(constant) for constant in pair]


@pytest.mark.parametrize("constant", SAME, ids=str)
def test_constants_that_stay_the_same_are_none(device, constant):
    same = float("nan") if constant != constant else constant
    found = drain(StaticLoader([batch(0, scale=constant), batch(1, scale=same)], device))
    assert found == [0, 1]


@dataclass
class Fields:
    x: Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    x: Any


HIDDEN = {
    "UserDict": lambda x: UserDict(x=x),
    "Fields": Fields,
    "Slots": lambda x: Slots([x]),
    "Slots of UserDict": lambda x: Slots({"more": UserDict(x=[x])}),
}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("policy", ["error", "pass"])
def test_tensors_in_a_container_that_is_no_pytree_are_refused_at_once(device, hide, policy):
    loader = StaticLoader([(hide(torch.ones(3)), 1)], device, on_mismatch=policy)
    with pytest.raises(GraphError, match=r"batch\[0\] is a \w+, whose.*collate_fn.*register_py"):
        next(iter(loader))


class Image(Tensor):
    pass


UNFIT = {
    "requires grad": (lambda x: x.requires_grad_(), "requires grad.*detach it"),
    "a history": (lambda x: x.requires_grad_() * 2, "requires grad.*detach it"),
    "a subclass": (lambda x: x.as_subclass(Image), "is a Image, and would come as a plain tensor"),
    "sparse": (lambda x: x.to_sparse(), "is sparse, nested.*only dense tensors"),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("policy", ["error", "pass"])
def test_tensors_that_a_copy_would_change_are_refused(device, name, turn, policy):
    """Copies would lose gradients or types; a batch with a history would keep memory alive."""
    make, message = UNFIT[name]
    tensors = [torch.ones(3) for _ in range(3)]
    tensors[turn] = make(tensors[turn])
    loader = iter(StaticLoader([{"x": x} for x in tensors], device, on_mismatch=policy))
    for _ in range(turn):
        next(loader)
    with pytest.raises(GraphError, match=rf"batch\['x'\] {message}"):
        next(loader)
    assert not next(loader)["x"].requires_grad


def test_a_first_batch_under_inference_mode_spoils_no_later_one(device):
    loader = StaticLoader([{"x": torch.full((3,), float(n))} for n in range(6)], device)
    with torch.inference_mode():
        assert len([each["x"].sum() for each in loader]) == 6
    weight = torch.ones(3, device=device, requires_grad=True)
    for each in loader:
        (weight * each["x"]).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.full((3,), 15.0))


def test_arguments(device):
    with pytest.raises(ValueError, match="held: got 0"):
        StaticLoader([], device, held=0)
    with pytest.raises(ValueError, match="accepted are 'error', 'pass'"):
        StaticLoader([], device, on_mismatch="skip")
    assert drain(StaticLoader([], device)) == []
