"""Random number generators: every state around a capture, so that it draws no numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Puts the CPU's and the device's default generators back as they were, whatever happens."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
