"""How many ranks share what: the degrees of a parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, fields

_NOT_BUILT = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "pp": "pipeline parallelism",
}


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism, named and multiplied as in torchtitan.

    Attributes:
        dp_replicate: copies of the sharded model (HSDP).
        dp_shard: ranks over which FSDP2 shards parameters, gradients and optimizer state.
        tp, cp, pp: tensor, context and pipeline parallelism.
        ep: ranks that share the experts of a layer. They are taken out of ``dp_shard``: what is
            left of it, ``dp_shard / ep`` ranks, shards the experts further by FSDP2.
        reshard_after_forward: frees gathered parameters between forward and backward, as
            ``fully_shard`` does by default: less memory, one more all-gather.

    Raises:
        ValueError: a degree that does not fit, or that is not built yet.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if field.name == "reshard_after_forward":
                continue
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{field.name}: got {degree!r}, must be a whole number from 1 on")
            if field.name in _NOT_BUILT and degree > 1:
                raise ValueError(
                    f"{field.name}: {_NOT_BUILT[field.name]} is not built yet: pass "
                    f"{field.name}=1, and shard by dp_shard and ep"
                )
        if self.dp_shard % self.ep:
            raise ValueError(
                f"ep ({self.ep}) must divide dp_shard ({self.dp_shard}): expert-parallel ranks "
                f"are taken out of it"
            )

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def data_parallel(self) -> int:
        """Ranks with batches of their own."""
        return self.dp_replicate * self.dp_shard
