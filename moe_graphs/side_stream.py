"""A CUDA stream beside the one that work is on, for what has time until later.

Every stream that forks has a side stream of its own: so a side stream only ever waits for, and is
waited for by, that one stream. Whoever uses one keeps to this, and then nothing has to be told to
the allocator (``record_stream``, which in a capture defers what it frees to the capture's end):

- What was allocated outside of ``forked`` and is read within is held until ``join``: else the
  stream that forks would be given its memory while the side stream reads it.
- What was allocated within and is read outside, behind ``join``, may be dropped at any time
  outside: its memory is the side stream's, and that waits for all of it at the next fork.
- Of the two streams at most one is given work that waits for other ranks between a fork and its
  join: so what is beside always ends, and two waits never hold up one another's ranks.
- A capture that forks also joins before its end.
- Nobody else allocates on a side stream without waiting for the stream that forks it. torch hands
  out the same 32 streams by turns, so one that a program makes later may be a side stream, too.

On devices other than CUDA's there is one stream: ``forked`` and ``join`` do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_sides: dict[tuple[int, int], torch.cuda.Stream] = {}
_not_joined: set[tuple[int, int]] = set()


def is_used(device: torch.device) -> bool:
    """Whether anything has ever been forked on the device."""
    index = 0 if device.index is None else device.index
    return any(of_device == index for of_device, _ in _sides)


@contextlib.contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Work of the block goes to the current stream's side stream, behind what is enqueued now."""
    if device.type != "cuda":
        yield
        return
    here = torch.cuda.current_stream(device)
    side = _side_of(here)
    _not_joined.add(_key(here))
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield


def join(device: torch.device) -> None:
    """What the current stream is given from now on waits for its side stream, if that has been
    given anything since the last join: a capture may wait for what it has forked itself alone."""
    if device.type == "cuda":
        here = torch.cuda.current_stream(device)
        if _key(here) in _not_joined:
            _not_joined.remove(_key(here))
            here.wait_stream(_side_of(here))


def _key(stream: torch.cuda.Stream) -> tuple[int, int]:
    return stream.device.index, stream.cuda_stream


def _side_of(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    key = _key(stream)
    if key not in _sides:
        side = torch.cuda.Stream(stream.device)
        while side.cuda_stream == stream.cuda_stream:  # torch hands out the same few by turns
            side = torch.cuda.Stream(stream.device)
        _sides[key] = side
    return _sides[key]
