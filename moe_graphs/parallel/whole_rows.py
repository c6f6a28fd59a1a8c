"""Positions of a rank's rows in the whole weight, for checkpoints that any layout reads.

A rank of tensor parallelism has its share of every part of a fused weight (queries, keys, values),
and FSDP2 may shard that share again: so a rank has a few runs of rows. The DTensor has as many rows
as the whole weight, but in the order of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

PartsByName = Mapping[str, Sequence[int]]
"""Number of rows of each part, by the tensor's name, as ``fused_rows`` returns it."""


class Run(NamedTuple):
    """Rows that are consecutive in the local tensor and in the whole weight.

    Attributes:
        first: number of the first row in the whole weight.
        rows: the rows, a view of the local tensor.
    """

    first: int
    rows: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        offsets = torch.Size((self.first, *(0 for _ in self.rows.shape[1:])))
        return ChunkStorageMetadata(offsets, self.rows.shape)


def runs_of(tensor: DTensor, parts: Sequence[int]) -> list[Run]:
    """Local runs of a weight, a gradient or a state, sharded over ``tp`` and maybe by FSDP2."""
    mesh, ranks, rank, shards, shard = tensor.device_mesh, 1, 0, 1, 0
    names = mesh.mesh_dim_names or ()
    coordinates = mesh.get_coordinate() or ()
    for dim, (name, placement) in enumerate(zip(names, tensor.placements, strict=True)):
        if name == "tp":
            ranks, rank = mesh.size(dim), coordinates[dim]
        elif not placement.is_replicate():
            shards, shard = mesh.size(dim), coordinates[dim]
    local = tensor.to_local()
    # FSDP2 divides rows as torch.chunk does.
    begin = shard * -(-sum(parts) // ranks // shards)
    return list(_runs(local, begin, [part // ranks for part in parts], parts, rank))


def _runs(
    local: Tensor, begin: int, shares: Sequence[int], parts: Sequence[int], rank: int
) -> Iterator[Run]:
    """Runs of the local rows, which start at row ``begin`` of this ``tp`` rank's rows."""
    before = whole_before = 0
    for share, part in zip(shares, parts, strict=True):
        start, stop = max(begin, before), min(begin + len(local), before + share)
        if start < stop:
            first = whole_before + rank * share + start - before
            yield Run(first, local[start - begin : stop - begin])
        before, whole_before = before + share, whole_before + part


class WholeRowsSavePlanner(DefaultSavePlanner):
    """Save planner that writes the weights in ``parts`` with their rows in one GPU's order.

    It is one for ``torch.distributed.checkpoint``. The names in ``parts`` are keys of the state
    dict that is saved: rename its keys by ``global_fqn``.
    """

    def __init__(self, parts: PartsByName) -> None:
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in self._parts]
        for name in filter(self._parts.__contains__, self.state_dict):
            items += _write_items(name, self.state_dict[name], self._parts[name])
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        if index.fqn not in self._parts:
            return super().lookup_object(index)
        return _rows_at(self.state_dict[index.fqn], self._parts[index.fqn], index)


class WholeRowsLoadPlanner(DefaultLoadPlanner):
    """Load planner for checkpoints that ``WholeRowsSavePlanner`` or one GPU has written.

    It is one for ``torch.distributed.checkpoint``. The names in ``parts`` are keys of the state
    dict that is loaded.
    """

    def __init__(self, parts: PartsByName) -> None:
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.dest_index.fqn not in self._parts]
        assert self.metadata is not None
        for name in filter(self._parts.__contains__, self.state_dict):
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            chunks = [run.chunk for run in runs_of(self.state_dict[name], self._parts[name])]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return dataclasses.replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn not in self._parts:
            return super().lookup_tensor(index)
        return _rows_at(self.state_dict[index.fqn], self._parts[index.fqn], index)


def _write_items(name: str, tensor: DTensor, parts: Sequence[int]) -> Iterator[WriteItem]:
    for run in runs_of(tensor, parts):
        properties = TensorProperties.create_from_tensor(run.rows)
        data = TensorWriteData(run.chunk, properties, tensor.size())
        yield WriteItem(
            MetadataIndex(name, run.chunk.offsets), WriteItemType.SHARD, tensor_data=data
        )


def _rows_at(tensor: DTensor, parts: Sequence[int], index: MetadataIndex) -> Tensor:
    (found,) = (run for run in runs_of(tensor, parts) if run.chunk.offsets == index.offset)
    return found.rows
