"""The device mesh of a layout, and views of it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_graphs.parallel.layout import ParallelConfig

DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def make_mesh(config: ParallelConfig, device_type: str) -> DeviceMesh:
    """Make the mesh of all ranks, outermost ``pp``, innermost ``tp``, with torchtitan's names.

    It needs an initialised process group, and all ranks call it.

    Raises:
        ValueError: the process group has another number of ranks than the layout.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else None
    if ranks != config.world_size:
        found = "there is no process group" if ranks is None else f"there are {ranks} ranks"
        raise ValueError(
            f"the layout {config} needs {config.world_size} ranks and {found}: dp_replicate * "
            f"dp_shard * tp * cp * pp must be the number of ranks (torchrun --nproc-per-node)"
        )
    shape = tuple(getattr(config, name) for name in DIMS)
    return init_device_mesh(device_type, shape, mesh_dim_names=DIMS)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Ranks with batches of their own, in one dimension: ``dp_replicate`` x ``dp_shard``.

    The mesh's ``get_local_rank()`` is the number of this rank's part of the data.
    """
    return mesh["dp_replicate", "dp_shard"]._flatten("dp")


def loss_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Ranks with tokens of their own: ``dp_replicate`` x ``dp_shard`` x ``cp`` in one dimension.

    The mesh's ``get_group()`` is the group over which to sum losses, counts and flags.
    """
    return mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Mesh with ``dp_shard`` and ``cp`` as one dimension, ``dp_shard_cp``.

    FSDP2 shards over these ranks, since all of them need the same weights.
    """
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    # Torch deprecates to slice ``mesh`` itself by the name of a flattened dimension.
    return DeviceMesh._concatenate([mesh["pp", "dp_replicate"], flat, mesh["tp"]])


def expert_mesh(config: ParallelConfig, shards: DeviceMesh) -> DeviceMesh:
    """Mesh like ``shard_mesh``, with ``dp_shard_cp`` split into ``efsdp`` and, inside, ``ep``.

    It makes process groups: call it once per model, on all ranks.
    """
    sizes = (config.dp_shard * config.cp // config.ep, config.ep)
    names = shards.mesh_dim_names
    assert names is not None
    # The dimension is given by its number, because torch 2.11 refuses its name.
    return shards._unflatten(names.index("dp_shard_cp"), sizes, ("efsdp", "ep"))
