"""Settings of a plan besides the model and the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from moe_graphs.dispatch.dispatcher import DispatchCosts, PlannedExchange
from moe_graphs.kernels.local_part import local_part
from moe_graphs.layers import TransformerConfig
from moe_graphs.parallel.parallelize import MIXED_PRECISION
from moe_graphs.registry import DISPATCHERS


class OptimizerCosts(NamedTuple):
    """Bytes of a rank's optimizer: its states, and the bytes received in an update."""

    states: int
    received: int = 0


def of_torchs_adamw(model: nn.Module) -> OptimizerCosts:
    """Costs of torch's AdamW: two averages in the parameter's dtype, and an fp32 step counter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return OptimizerCosts(sum(2 * local_part(parameter).nbytes + 4 for parameter in trained))


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """Sizes, precisions and options of a step.

    Attributes:
        sequences: number of a rank's sequences in a microbatch; with ``cp``, number of the
            sequences that the ranks share.
        dtype: dtype of the parameters.
        mixed_precision: whether FSDP2 gathers bf16 and reduces fp32 (``MixedPrecisionPolicy``) and
            the model computes in bf16. Otherwise autocast to bf16, as in ``moe-graphs train``.
        dispatcher, rows_factor: arguments of ``make_dispatcher``, for expert parallelism.
        schedule, stages_per_rank: arguments of ``Pipeline``.
        optimizer: computes the costs of a rank's optimizer from its part of the model, which is on
            the meta device.
        on_gpus: whether to plan for GPUs; False plans for CPUs, where nothing is cast.
    """

    sequences: int
    sequence_length: int
    microbatches: int = 1
    dtype: torch.dtype = torch.float32
    mixed_precision: bool = False
    dispatcher: str = "all_to_all"
    rows_factor: float | None = None
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    optimizer: Callable[[nn.Module], OptimizerCosts] = of_torchs_adamw
    on_gpus: bool = True

    def __post_init__(self) -> None:
        for name in ("sequences", "sequence_length", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        kind = DISPATCHERS[self.dispatcher]
        if not kind.between_ranks:
            others = DISPATCHERS.words(lambda each: each.between_ranks)
            raise ValueError(
                f"dispatcher: {self.dispatcher!r} sends nothing to other ranks: choose {others}"
            )
        if self.rows_factor is not None and "rows_factor" not in kind.options():
            others = DISPATCHERS.words(lambda each: "rows_factor" in each.options())
            raise ValueError(
                f"rows_factor: {self.dispatcher} has room for what arrives: take {others}"
            )

    def dispatch_costs(self, config: TransformerConfig, ranks: int) -> DispatchCosts | None:
        """Costs of the dispatcher in one layer; None if no ranks share experts."""
        if config.moe is None or ranks == 1:
            return None
        return DISPATCHERS[self.dispatcher].costs(
            PlannedExchange(
                tokens=self.tokens,
                ranks=ranks,
                hidden_size=config.hidden_size,
                top_k=config.moe.top_k,
                num_experts=config.moe.num_experts,
                itemsize=self.compute_dtype.itemsize,
                rows_factor=self.rows_factor,
            )
        )

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.mixed_precision or self.on_gpus else self.dtype

    @property
    def held_dtype(self) -> torch.dtype:
        """Dtype of gathered weights, and of hidden states between stages."""
        return torch.bfloat16 if self.mixed_precision else self.dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MIXED_PRECISION if self.mixed_precision else MixedPrecisionPolicy()

    @property
    def on_the_wire(self) -> tuple[int, int]:
        """Bytes per element of a gathered weight, and of a reduced gradient."""
        return self.held_dtype.itemsize, (self.policy.reduce_dtype or self.dtype).itemsize
