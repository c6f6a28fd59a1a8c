"""The device mesh of a layout, and views of it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_graphs.layout import ParallelConfig
from moe_graphs.registry import DEGREES


def make_mesh(config: ParallelConfig, device_type: str) -> DeviceMesh:
    """Make the mesh of all ranks, with torchtitan's names in the order of ``registry.DEGREES``.

    It needs an initialised process group, and all ranks call it.

    Raises:
        ValueError: the process group has another number of ranks than the layout.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else None
    dims = config.degrees("is_factor")
    if ranks != config.world_size:
        found = "there is no process group" if ranks is None else f"there are {ranks} ranks"
        raise ValueError(
            f"the layout {config} needs {config.world_size} ranks and {found}: "
            f"{' * '.join(dims)} must be the number of ranks (torchrun --nproc-per-node)"
        )
    return init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Ranks with batches of their own, in one dimension: ``dp_replicate`` x ``dp_shard``.

    The mesh's ``get_local_rank()`` is the number of this rank's part of the data.
    """
    return mesh[_names(mesh, "has_batches")]._flatten("dp")


def loss_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Ranks with tokens of their own: ``dp_replicate`` x ``dp_shard`` x ``cp`` in one dimension.

    The mesh's ``get_group()`` is the group over which to sum losses, counts and flags.
    """
    return mesh[_names(mesh, "has_tokens")]._flatten("dp_cp")


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Mesh with ``dp_shard`` and ``cp`` as one dimension, ``dp_shard_cp``.

    FSDP2 shards over these ranks, since all of them need the same weights.
    """
    names = _names(mesh)
    first, last = names.index("dp_shard"), names.index("cp")
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    # Torch deprecates to slice ``mesh`` itself by the name of a flattened dimension.
    return DeviceMesh._concatenate([mesh[names[:first]], flat, mesh[names[last + 1 :]]])


def expert_mesh(config: ParallelConfig, shards: DeviceMesh) -> DeviceMesh:
    """Mesh like ``shard_mesh``, with ``dp_shard_cp`` split into ``efsdp`` and, inside, ``ep``.

    It makes process groups: call it once per model, on all ranks.
    """
    sizes = (config.dp_shard * config.cp // config.ep, config.ep)
    names = _names(shards)
    # The dimension is given by its number, because torch 2.11 refuses its name.
    return shards._unflatten(names.index("dp_shard_cp"), sizes, ("efsdp", "ep"))


def _names(mesh: DeviceMesh, fact: str | None = None) -> tuple[str, ...]:
    """Names of the mesh's dimensions, all or those whose degree has this fact."""
    names = mesh.mesh_dim_names or ()
    return tuple(name for name in names if fact is None or getattr(DEGREES[name], fact))
