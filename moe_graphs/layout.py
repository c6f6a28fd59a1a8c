"""A parallel layout: the degrees of parallelism together. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from moe_graphs.option_tree import option
from moe_graphs.registry import DEGREES

# Options of FSDP2, which are for layouts that shard weights.
OF_FSDP = ("reshard_after_forward", "layers_per_group")


def _degree(help: str) -> Any:
    return option(1, help, of="layout")


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism, named and multiplied as in torchtitan.

    The facts of a degree stand on its class in ``registry.DEGREES``; the fields here are the
    options of ``moe-graphs train`` and ``plan``, too. A degree of your own is a class of
    ``parallel.degrees.Degree`` under a name of its own (``DEGREES.add``), and a field of that name
    in a subclass.

    FSDP2 shards over ``dp_shard`` x ``cp`` ranks. The ranks of ``ep`` are taken out of these; what
    is left of them shards the experts further by FSDP2. More ``layers_per_group`` mean fewer and
    larger collectives and copies, but the weights and gradients of all these layers are in memory
    at once.

    Raises:
        ValueError: degrees that do not fit together; the message says which.
    """

    dp_replicate: int = _degree("Number of copies of the sharded model (HSDP).")
    dp_shard: int = _degree(
        "Number of ranks that FSDP2 shards parameters, gradients and optimizer state over. "
        "(default: all that are left)"
    )
    tp: int = _degree("Number of ranks that share heads, feed-forward networks and the vocabulary.")
    cp: int = _degree("Number of ranks that share every sequence, a contiguous part each.")
    ep: int = _degree("Number of ranks that share the experts, out of dp-shard x cp.")
    pp: int = _degree("Number of ranks of a pipeline, each with stages of the model.")
    reshard_after_forward: bool = option(
        True,
        "FSDP2 frees gathered weights until the backward: less memory, one more all-gather.",
        flags="--reshard-after-forward/--no-reshard-after-forward",
        of="layout",
    )
    layers_per_group: int = _degree("Number of layers that FSDP2 gathers and reduces together.")

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
        for name in OF_FSDP:
            value = getattr(self, name)
            if self.with_tokens == 1 and value != getattr(ParallelConfig, name):
                raise ValueError(
                    f"{name} ({value}): of FSDP2, which shards nothing without dp_replicate, "
                    f"dp_shard or cp: drop it"
                )

    def degrees(self, fact: str | None = None) -> dict[str, int]:
        """Degrees by name in the registry's order, all or those whose class has this fact."""
        names = [name for name in DEGREES if hasattr(self, name)]
        return {n: getattr(self, n) for n in names if fact is None or getattr(DEGREES[n], fact)}

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees("is_factor").values())

    @property
    def data_parallel(self) -> int:
        """Number of ranks with batches of their own."""
        return math.prod(self.degrees("has_batches").values())

    @property
    def with_tokens(self) -> int:
        """Number of ranks with tokens of their own; losses and gradients are means over them."""
        return math.prod(self.degrees("has_tokens").values())
