"""State that is put back as it was, whatever happens in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


@contextlib.contextmanager
def preserved_rng(
    device: torch.device, generators: Iterable[torch.Generator] = ()
) -> Iterator[None]:
    """The CPU's and the device's default generators, and others: a capture draws no numbers."""
    others = [(generator, generator.get_state()) for generator in generators]
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        for generator, state in others:
            generator.set_state(state)


@contextlib.contextmanager
def preserved_values(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """The values of tensors, copied back in place: their addresses stay."""
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
