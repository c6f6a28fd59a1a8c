"""A parallel layout of a model, as one of its ranks would hold it.

Shapes: B sequences of a rank in a microbatch, S sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

from moe_graphs.dispatch.local_rows import room_for_rows
from moe_graphs.kernels.availability import as_on_gpus
from moe_graphs.layers import HeadExchange, LanguageModel, MoELayer, TransformerConfig
from moe_graphs.parallel import (
    ParallelConfig,
    divide_sequences,
    make_mesh,
    parallelize,
    shard_experts,
    share_tensors,
)
from moe_graphs.planning.microbatch_memory import (
    DropoutOfGPUs,
    MicrobatchMemory,
    microbatch_memory,
    without_memory,
)
from moe_graphs.planning.stand_in_dispatcher import StandInDispatcher
from moe_graphs.planning.weights_around import WeightsAround, fsdp_parts, most_around
from moe_graphs.planning.wire_bytes import (
    ShardedWeights,
    dispatch_bytes,
    exchange_bytes,
    fsdp_bytes,
    peer_memory_bytes,
    tensor_bytes,
)

DISPATCHERS = ("all_to_all", "all_gather", "symmetric")
_SHARD_DIMS = ("dp_shard_cp", "efsdp")


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """What a step computes with.

    Attributes:
        sequences: of a rank (with ``cp``, of those that share them) in a microbatch.
        dtype: of the parameters.
        mixed_precision: FSDP2 gathers bf16 and reduces fp32 (``MixedPrecisionPolicy``), and the
            model computes in it; otherwise autocast to bf16, as ``moe-graphs train`` does.
        dispatcher, rows_factor: with expert parallelism, as of ``make_dispatcher``.
        on_gpus: what kernels keep on a GPU; False for the CPU, where nothing is cast.
    """

    sequences: int
    sequence_length: int
    microbatches: int = 1
    dtype: torch.dtype = torch.float32
    mixed_precision: bool = False
    dispatcher: str = "all_to_all"
    rows_factor: float | None = None
    on_gpus: bool = True

    def __post_init__(self) -> None:
        for name in ("sequences", "sequence_length", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.dispatcher not in DISPATCHERS:
            raise ValueError(
                f"dispatcher: {self.dispatcher!r} sends nothing to other ranks: choose one of "
                f"{', '.join(DISPATCHERS)}"
            )
        if self.rows_factor is not None and self.dispatcher == "all_to_all":
            raise ValueError(
                "rows_factor: all_to_all has room for what arrives: take all_gather or symmetric"
            )

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.mixed_precision or self.on_gpus else self.dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if not self.mixed_precision:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    @property
    def on_the_wire(self) -> tuple[int, int]:
        """Bytes of a number of a weight, and of its gradient."""
        gathered = self.policy.param_dtype or self.dtype
        return gathered.itemsize, (self.policy.reduce_dtype or gathered).itemsize


@dataclass(frozen=True)
class LayoutPlan:
    """Bytes of the rank with most (rank 0), by what they are for.

    Attributes:
        parameters: numbers of the whole model.
        padding: share of the rank's parameters that an equal division would not give it: FSDP2
            divides by the first dimension, of experts by their number.
        exact: what is there between two steps, and gradients.
        estimated: what comes and goes within a microbatch, each at its most.
        wire: received from other ranks in a step.
        within_graph: the most at once of gradients and ``estimated``, in a graph's pool if whole
            steps are graphs.
        memory: the most at once of all.
        expert_rows: rows of a layer that the experts of this rank have room for.
    """

    parameters: int
    padding: float
    exact: dict[str, int] = field(hash=False)
    estimated: dict[str, int] = field(hash=False)
    wire: dict[str, int] = field(hash=False)
    within_graph: int
    memory: int
    expert_rows: int

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def plan_layout(config: TransformerConfig, layout: ParallelConfig, step: PlannedStep) -> LayoutPlan:
    """What rank 0 of ``layout.world_size`` would hold and receive. Allocates nothing.

    The model is laid out by ``parallelize`` on the meta device, in a process group of ranks that
    are not there; activations and temporaries are those of a forward and backward on fake tensors.

    Raises:
        ValueError: a layout that the model cannot have, or this process is in a process group.
    """
    if step.sequence_length > config.max_sequence_length:
        raise ValueError(
            f"sequence_length: {step.sequence_length} is more than the "
            f"{config.max_sequence_length} positions that the model knows: lower it"
        )
    if layout.pp > 1:
        raise ValueError(
            f"pp: a plan counts all layers on every rank, and pp={layout.pp} divides them: plan "
            f"with pp=1 (--gpus of one stage's ranks) and divide by the stages"
        )
    if layout.tp > 1 and layout.cp > 1:
        raise ValueError(
            f"cp: a plan does not count heads that tp ({layout.tp}) and cp ({layout.cp}) share "
            f"both: plan with one of them"
        )
    if step.sequence_length % layout.cp:
        raise ValueError(
            f"sequence_length: {layout.cp} ranks (cp) cannot share {step.sequence_length} tokens "
            f"equally: choose a multiple"
        )
    # From here on a rank's own tokens.
    step = dataclasses.replace(step, sequence_length=step.sequence_length // layout.cp)
    model = LanguageModel(config, device="meta", dtype=step.dtype)
    parameters = model.num_parameters()
    weights: dict[str, ShardedWeights] = {}
    if layout.world_size > 1:
        with _as_rank_0(layout.world_size):
            options = {"dispatcher": step.dispatcher} if layout.ep > 1 else {}
            mesh = make_mesh(layout, "cpu")
            policy = step.policy if step.mixed_precision else None
            parallelize(model, layout, mesh, mixed_precision=policy, **options)
            if layout.with_tokens > 1:
                weights = _sharded(model, layout)
    exact = held_between_steps(model)
    parts = fsdp_parts(model, weights, *step.on_the_wire)
    held = _of_a_microbatch(config, layout, step, WeightsAround(parts, step.microbatches))
    estimated = {**most_around(parts), **_named(held)}
    shared = _shared_with_peers(config, layout, step)
    if shared:
        estimated["memory shared with peers"] = shared
    return LayoutPlan(
        parameters,
        max(0.0, 1 - _equal_share(model) / exact["parameters"]),
        exact,
        estimated,
        _wire(config, layout, step, weights),
        held.peak,
        sum(exact.values()) - exact["gradients"] + held.peak + shared,
        _expert_rows(config, layout, step),
    )


def held_between_steps(model: nn.Module) -> dict[str, int]:
    """Parameters, buffers, gradients and AdamW's state of a model that may be sharded: bytes of
    this rank, each in the dtype of the parameter."""
    parameters = list(model.parameters())
    own = sum(_local(parameter).nbytes for parameter in parameters)
    trained = [p for p in parameters if p.requires_grad]
    gradients = sum(_local(parameter).nbytes for parameter in trained)
    # The number of steps is an fp32 scalar of every parameter.
    state = 2 * gradients + 4 * len(trained)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return {"parameters": own, "gradients": gradients, "optimizer": state, "buffers": buffers}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _equal_share(model: nn.Module) -> float:
    """Bytes of the parameters if ranks that shard one had as much of it each."""
    total = 0.0
    for parameter in model.parameters():
        ranks = 1
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
            ranks = prod(mesh.size(dim) for dim, each in placements if not each.is_replicate())
        total += parameter.numel() * parameter.dtype.itemsize / ranks
    return total


@contextlib.contextmanager
def _as_rank_0(world_size: int) -> Iterator[None]:
    """A process group whose other ranks are not there: nothing arrives, and nobody waits."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("plan: this process is a rank of a process group: plan in another one")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sharded(model: LanguageModel, layout: ParallelConfig) -> dict[str, ShardedWeights]:
    # As `parallelize` says: the backward begins with them.
    stay = {id(p) for part in (model.norm, model.head) for p in part.parameters()}
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local, mesh, ranks, replicas = parameter.to_local(), parameter.device_mesh, 1, 1
        for dim, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
            size = mesh[dim].size()
            if isinstance(placement, Replicate):
                replicas *= size
            elif dim in _SHARD_DIMS:
                ranks *= size
        regathered = layout.reshard_after_forward and id(parameter) not in stay
        found[name] = ShardedWeights(local.numel(), ranks, replicas, regathered)
    return found


def _named(held: MicrobatchMemory) -> dict[str, int]:
    return {
        "activations": held.activations - held.logits,
        "logits": held.logits,
        "copies of weights (autocast)": held.weight_copies,
        "temporaries": held.temporaries,
    }


def _of_a_microbatch(
    config: TransformerConfig, layout: ParallelConfig, step: PlannedStep, around: WeightsAround
) -> MicrobatchMemory:
    dtype = torch.bfloat16 if step.mixed_precision else step.dtype
    model = LanguageModel(config, device="meta", dtype=dtype)
    if layout.cp > 1:
        divide_sequences(model, HeadExchange(rank=0, ranks=layout.cp))
    if layout.ep > 1:
        gathers = step.dispatcher != "all_to_all"
        stand_in = StandInDispatcher(layout.ep, gathers, step.rows_factor)
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                shard_experts(layer, stand_in)
    with contextlib.ExitStack() as stack:
        if layout.tp > 1:
            stack.enter_context(_as_rank_0(layout.tp))
            share_tensors(model, make_mesh(ParallelConfig(tp=layout.tp), "cpu")["tp"])
            _make_plain(model)
        stack.enter_context(FakeTensorMode())
        if step.on_gpus:
            stack.enter_context(as_on_gpus())
            stack.enter_context(DropoutOfGPUs())
        without_memory(model, "cpu")
        tokens_BS = torch.empty(step.sequences, step.sequence_length, dtype=torch.int64)
        cast_to = torch.bfloat16 if step.on_gpus else None
        return microbatch_memory(model, tokens_BS, cast_to, around)


def _make_plain(model: nn.Module) -> None:
    """What a rank has of DTensors, in their place."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                own = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
                module.register_parameter(name, own)


def _expert_rows(config: TransformerConfig, layout: ParallelConfig, step: PlannedStep) -> int:
    if config.moe is None:
        return 0
    if layout.ep == 1 or step.dispatcher == "all_to_all":
        return step.tokens * config.moe.top_k
    local = range(config.moe.num_experts // layout.ep)
    return room_for_rows(step.tokens, config.moe.top_k, local, layout.ep, step.rows_factor)


def _shared_with_peers(config: TransformerConfig, layout: ParallelConfig, step: PlannedStep) -> int:
    if config.moe is None or layout.ep == 1 or step.dispatcher != "symmetric":
        return 0
    itemsize = step.compute_dtype.itemsize
    return peer_memory_bytes(config.moe, config.hidden_size, step.tokens, layout.ep, itemsize)


def _wire(
    config: TransformerConfig,
    layout: ParallelConfig,
    step: PlannedStep,
    weights: dict[str, ShardedWeights],
) -> dict[str, int]:
    found = fsdp_bytes(weights.values(), *step.on_the_wire, step.microbatches)
    if layout.cp > 1:
        layer = exchange_bytes(config, step.tokens, layout.cp, step.compute_dtype.itemsize)
        found["context exchange"] = layer * config.num_layers * step.microbatches
    if layout.tp > 1:
        itemsize, weights_itemsize = step.compute_dtype.itemsize, step.on_the_wire[0]
        each = tensor_bytes(config, step.tokens, layout.tp, itemsize, weights_itemsize)
        found["tensor parallelism"] = round(each * step.microbatches)
    if config.moe is not None and layout.ep > 1:
        layers = sum(config.is_moe_layer(index) for index in range(config.num_layers))
        parts = dispatch_bytes(
            step.dispatcher,
            config.moe,
            config.hidden_size,
            step.tokens,
            layout.ep,
            step.compute_dtype.itemsize,
        )
        for name, each in zip(("expert dispatch", "expert combine"), parts, strict=True):
            found[name] = round(each * layers * step.microbatches)
    return found
