"""Degrees of a parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism, named and multiplied as in torchtitan.

    Attributes:
        dp_replicate: copies of the sharded model (HSDP).
        dp_shard: ranks over which FSDP2 shards parameters, gradients and optimizer state.
        tp: ranks that share heads, feed-forward networks and the vocabulary.
        cp: ranks that share every sequence, a contiguous part each. FSDP2 shards over ``dp_shard``
            x ``cp`` ranks.
        pp: ranks of a pipeline, each with stages of the model (``pipeline_stages``).
        ep: ranks that share the experts of a layer. They are taken out of ``dp_shard`` x ``cp``:
            what is left of it shards the experts further by FSDP2.
        reshard_after_forward: free gathered parameters between forward and backward, as
            ``fully_shard`` does by default: less memory, one more all-gather.
        layers_per_group: number of layers that FSDP2 gathers and reduces together. More layers
            mean fewer and larger collectives and copies, but the weights and gradients of all
            these layers are in memory at once.

    Raises:
        ValueError: degrees that do not fit together; the message says which.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    reshard_after_forward: bool = True
    layers_per_group: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if field.name == "reshard_after_forward":
                continue
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{field.name}: got {degree!r}, must be a whole number from 1 on")
        if self.dp_shard * self.cp % self.ep:
            by_cp = f" * cp ({self.cp})" if self.cp > 1 else ""
            raise ValueError(
                f"ep ({self.ep}) must divide dp_shard ({self.dp_shard}){by_cp}: expert-parallel "
                f"ranks are taken out of it"
            )
        if self.layers_per_group > 1 and self.with_tokens == 1:
            raise ValueError(
                f"layers_per_group ({self.layers_per_group}): of FSDP2, which shards nothing "
                f"without dp_replicate, dp_shard or cp: drop it"
            )

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def data_parallel(self) -> int:
        """Number of ranks with batches of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def with_tokens(self) -> int:
        """Number of ranks with tokens of their own; losses and gradients are means over them."""
        return self.data_parallel * self.cp
