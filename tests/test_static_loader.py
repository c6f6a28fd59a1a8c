"""Batches in fixed memory: the right values, clear errors, and a loader that goes on after them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

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
    """The number in each batch, or the error that came instead of it."""
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
    """On a GPU the reads wait behind a long kernel; the host takes all batches meanwhile."""
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


def test_arguments(device):
    with pytest.raises(ValueError, match="held: got 0"):
        StaticLoader([], device, held=0)
    with pytest.raises(ValueError, match="accepted are 'error', 'pass'"):
        StaticLoader([], device, on_mismatch="skip")
    assert drain(StaticLoader([], device)) == []
