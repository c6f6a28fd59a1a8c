"""Which part of a whole tensor is this rank's, and where it lies here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_graphs.parallel.tensor_parallel import fused_rows, whole_name
from moe_graphs.parallel.whole_rows import runs_of

Region = tuple[slice, ...]
"""Of a whole tensor: a slice with both ends for every dimension."""


def shares(tensor: Tensor, parts: Sequence[int] | None = None) -> list[tuple[Region, Tensor]]:
    """Where this rank's pieces of a tensor lie in the whole one, and the pieces, which are views:
    of a plain one all of it. ``parts``: as ``fused_rows`` has them for it."""
    if not isinstance(tensor, DTensor):
        return [(_region([0] * tensor.ndim, tensor.shape), tensor)]
    if parts is not None:
        chunks = [(run.chunk, run.rows) for run in runs_of(tensor, parts)]
    else:
        (chunk,) = tensor.__create_chunk_list__()
        chunks = [(chunk, tensor.to_local())]
    return [(_region(chunk.offsets, chunk.sizes), piece) for chunk, piece in chunks]


class OwnParts:
    """This rank's parts of a model's parameters and saved buffers, by the names on one GPU."""

    def __init__(self, model: nn.Module) -> None:
        parts: Mapping[str, Sequence[int]] = fused_rows(model)
        found = {whole_name(name): value for name, value in model.state_dict().items()}
        self._pieces = {name: shares(value, parts.get(name)) for name, value in found.items()}

    def within(self, name: str, region: Region) -> Iterator[tuple[Tensor, Region]]:
        """What is this rank's of a region of the tensor ``name``: memory, and which part of the
        region belongs into it. Nothing if the tensor is elsewhere."""
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
