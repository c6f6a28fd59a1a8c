"""Static memory by the place where it is used, for what is never in use at the same time."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from moe_graphs.engine.tensors import span_bytes, static_like


class StaticBuffers:
    """One piece of memory for each place, such as an input of a call.

    Graphs of several shapes of microbatches are never in use at once, so what they read at one
    place lies in one piece. A tensor that is larger than the piece makes a new one, which later
    tensors get; graphs that read the old one keep it alive.
    """

    def __init__(self) -> None:
        self._pieces: dict[Hashable, torch.UntypedStorage] = {}

    def like(self, place: Hashable, tensor: Tensor) -> Tensor:
        """A tensor at a place with the shape, the strides, the dtype and the device of another one.

        Its values are those of whoever has written there.
        """
        piece, needed = self._pieces.get(place), span_bytes(tensor)
        if piece is None or piece.nbytes() < needed or piece.device != tensor.device:
            made = static_like(tensor)
            self._pieces[place] = made.untyped_storage()
            return made
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(piece, 0, tensor.shape, tensor.stride())

    def clear(self) -> None:
        """Forgets all pieces."""
        self._pieces.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes() for piece in self._pieces.values())
