"""State that is put back as it was, whatever happens in between."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A graph that is collected during a capture invalidates it."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def preserved_rng(
    device: torch.device, generators: Sequence[torch.Generator] = ()
) -> Iterator[None]:
    """The CPU's and the device's default generators, and others: a capture draws no numbers."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


@contextlib.contextmanager
def preserved_values(tensors: Iterable[torch.Tensor], *, on_host: bool = False) -> Iterator[None]:
    """The values of tensors, copied back in place: their addresses stay.

    on_host: keeps the copies in host memory, where there is room for a whole optimizer.
    """
    values = [
        (tensor, tensor.detach().to("cpu", copy=True) if on_host else tensor.detach().clone())
        for tensor in tensors
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)


@contextlib.contextmanager
def attributes_put_back_on_failure(model: nn.Module) -> Iterator[None]:
    """Numbers, flags and strings on modules. If all goes well, what was set up lazily stays."""
    plain = (bool, int, float, str, type(None))
    before = [
        (module.__dict__, key, value)
        for module in model.modules()
        for key, value in module.__dict__.items()
        if type(value) in plain
    ]
    try:
        yield
    except BaseException:
        for attributes, key, value in before:
            attributes[key] = value
        raise
