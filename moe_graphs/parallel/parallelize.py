"""A language model, laid out over a mesh."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moe_graphs.layers import LanguageModel
from moe_graphs.parallel.layout import ParallelConfig


def parallelize(
    model: LanguageModel,
    config: ParallelConfig,
    mesh: DeviceMesh,
    *,
    dispatcher: str = "all_to_all",
    mixed_precision: MixedPrecisionPolicy | None = None,
    **dispatcher_options: Any,
) -> LanguageModel:
    """Shards ``model`` in place over ``mesh``, which ``make_mesh(config, ...)`` made.

    The model is one as for a single device: all experts, and the same weights on every rank (from
    one seed), or on the meta device. Parameters become FSDP2's; make the optimizer afterwards.
    Gradients are those of the mean of the ranks' losses.

    Args:
        dispatcher, dispatcher_options: as of ``make_dispatcher``, its group excepted; ignored
            without expert parallelism.
        mixed_precision: of FSDP2; by default everything is in the dtype of the parameters.

    Raises:
        ValueError: a mesh of another layout.
    """
    if config.ep > 1:
        raise ValueError("ep: expert parallelism is not built yet: pass ep=1")
    shards = mesh["dp_replicate", "dp_shard"] if config.dp_replicate > 1 else mesh["dp_shard"]
    policy = MixedPrecisionPolicy() if mixed_precision is None else mixed_precision
    options: dict[str, Any] = {"mesh": shards, "mp_policy": policy}
    reshard = config.reshard_after_forward
    fully_shard(model.embedding, reshard_after_forward=reshard, **options)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    # Needed again at once by the backward.
    fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    return model
