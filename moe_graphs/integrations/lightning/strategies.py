"""Lightning's strategies: which of them whole steps run under, and what DDP's wrapper adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_graphs.integrations.lightning.names import pl
from moe_graphs.integrations.lightning.obstacles import is_lightnings_own

_KNOWN = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
# The arguments of DDP that change nothing that runs in a step but its buckets and buffers.
_OF_DDP = (
    *("gradient_as_bucket_view", "bucket_cap_mb", "broadcast_buffers", "init_sync"),
    *("process_group", "dim"),
)


def unknown(trainer: pl.Trainer) -> str | None:
    """The reason for no graphs under this strategy, on all ranks alike, or None."""
    if is_lightnings_own(trainer.strategy, *_KNOWN):
        return None
    return (
        f"{type(trainer.strategy).__name__} has no graphs: take DDPStrategy, or "
        f"ModelParallelStrategy with fully_shard in configure_model"
    )


def obstacle_of_strategy(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Settings of the strategy that whole steps do not go with."""
    strategy: Any = trainer.strategy
    wrapper = replicas(strategy)
    if strategy.model is not module and (wrapper is None or wrapper.module is not module):
        return f"{type(strategy.model).__name__} around the module: leave it to Lightning"
    if wrapper is not None:
        return _obstacle_of_ddp(wrapper, strategy._ddp_kwargs)
    if is_lightnings_own(strategy, "ModelParallelStrategy"):
        return _obstacle_of_shards(strategy, module)
    return None


def _obstacle_of_ddp(wrapper: DistributedDataParallel, arguments: dict[str, Any]) -> str | None:
    for name, value in arguments.items():
        if value and name not in _OF_DDP:
            return f"DDPStrategy({name}={value!r}) is nothing that a graph can hold: leave it out"
    if wrapper._comm_hooks:
        return "DDPStrategy(ddp_comm_hook=...) runs Python between buckets: leave it out"
    if any(isinstance(each, nn.SyncBatchNorm) for each in wrapper.modules()):
        return "SyncBatchNorm reads on the host how many rows ranks have: sync_batchnorm=False"
    return None


def _obstacle_of_shards(strategy: Any, module: pl.LightningModule) -> str | None:
    size = strategy.device_mesh["tensor_parallel"].size()
    if size > 1:
        return (
            f"ModelParallelStrategy(tensor_parallel_size={size}): take "
            f"data_parallel_size={strategy.world_size}, tensor_parallel_size=1"
        )
    kinds = {parameter.device.type for parameter in module.parameters()}
    if kinds - {strategy.root_device.type}:
        return "parameters are offloaded to the host: fully_shard without an offload_policy"
    return None


def replicas(strategy: Any) -> DistributedDataParallel | None:
    wrapper = strategy.model
    return wrapper if isinstance(wrapper, DistributedDataParallel) else None


def built_on(stream: torch.cuda.Stream, strategy: Any) -> Any:
    """DDPStrategy's ``_setup_model``, on a stream that is known.

    Gradients are accumulated there, so that it has to be the stream of the captures.
    """

    def _setup_model(model: nn.Module) -> DistributedDataParallel:
        ids = strategy.determine_ddp_device_ids()
        with torch.cuda.stream(stream):
            return DistributedDataParallel(model, device_ids=ids, **strategy._ddp_kwargs)

    return _setup_model


class Forward:
    """``training_step`` as the strategy calls it: past DDP's wrapper, if there is one.

    What a forward of DDP notes for the next one, whether buffers are sent before it, is a part of
    what a graph depends on (``kind``), and is where it was when the step ends: a step is captured
    by running it several times. ``went`` notes it for a replay.
    """

    def __init__(self, strategy: Any, module: pl.LightningModule) -> None:
        self._module, self._wrapper = module, replicas(strategy)

    def kind(self) -> tuple[bool, bool]:
        """Tells of the coming step whether gradients are reduced, and buffers sent."""
        if self._wrapper is None:
            return True, False
        sends = self._wrapper.will_sync_module_buffers()
        self._wrapper.require_forward_param_sync = sends  # without buffers it is all the same
        return self._wrapper.require_backward_grad_sync, sends

    def went(self) -> None:
        if self._wrapper is not None:
            self._wrapper.require_forward_param_sync = self._wrapper.require_backward_grad_sync

    def __call__(self, batch: Any, *index: Any) -> Any:
        module, wrapper = self._module, self._wrapper
        if wrapper is None:
            return module.training_step(batch, *index)

        def forward(*batch: Any) -> Any:
            put_back(module, "forward", usual)  # training_step may call it
            return module.training_step(*batch, *index)

        usual, before = vars(module).get("forward"), wrapper.require_forward_param_sync
        vars(module)["forward"] = forward
        try:
            return wrapper(batch)  # which looks into what it is given: not at the index
        finally:
            put_back(module, "forward", usual)
            wrapper.require_forward_param_sync = before


def put_back(owner: Any, name: str, before: Any) -> None:
    """An attribute of the instance as it was, None: not there."""
    if before is not None:
        vars(owner)[name] = before
    else:
        vars(owner).pop(name, None)
