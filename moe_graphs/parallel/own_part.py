"""Local shards of global tensors: which region they are, and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_graphs.parallel.tensor_parallel import fused_rows, global_fqn
from moe_graphs.parallel.whole_rows import runs_of

Region = tuple[slice, ...]
"""Region of a whole tensor: a slice with both ends for every dimension."""


def shares(tensor: Tensor, parts: Sequence[int] | None = None) -> list[tuple[Region, Tensor]]:
    """Local pieces of a tensor, as views, each with its region of the whole tensor.

    A plain tensor is one piece.

    Args:
        parts: the tensor's value in ``fused_rows``, if it is there.
    """
    if not isinstance(tensor, DTensor):
        return [(_region([0] * tensor.ndim, tensor.shape), tensor)]
    if parts is not None:
        chunks = [(run.chunk, run.rows) for run in runs_of(tensor, parts)]
    else:
        (chunk,) = tensor.__create_chunk_list__()
        chunks = [(chunk, tensor.to_local())]
    return [(_region(chunk.offsets, chunk.sizes), piece) for chunk, piece in chunks]


class OwnParts:
    """Local shards of a model's parameters and saved buffers, by their names on one GPU."""

    def __init__(self, model: nn.Module) -> None:
        parts: Mapping[str, Sequence[int]] = fused_rows(model)
        found = {global_fqn(name): value for name, value in model.state_dict().items()}
        self._pieces = {name: shares(value, parts.get(name)) for name, value in found.items()}

    def within(self, name: str, region: Region) -> Iterator[tuple[Tensor, Region]]:
        """Local memory of a region of the tensor ``name``.

        Yields:
            Pieces of local memory, each with the part of the region that belongs there; nothing
            if the region is on other ranks.
        """
        for place, piece in self._pieces.get(name, ()):
            both = [
                (max(here.start, asked.start), min(here.stop, asked.stop))
                for here, asked in zip(place, region, strict=True)
            ]
            if all(start < stop for start, stop in both):
                yield piece[_moved(both, place)], _moved(both, region)


def _region(offsets: Sequence[int], sizes: Sequence[int]) -> Region:
    return tuple(slice(a, a + size) for a, size in zip(offsets, sizes, strict=True))


def _moved(ends: Sequence[tuple[int, int]], origin: Region) -> Region:
    pairs = zip(ends, origin, strict=True)
    return tuple(slice(a - begin.start, b - begin.start) for (a, b), begin in pairs)
