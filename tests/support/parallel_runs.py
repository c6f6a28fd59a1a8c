"""Short training runs of a small model in a parallel layout, whole steps graphed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from full_iterations import batches, optimizer_of
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.layers import LanguageModel, MoELayer
from moe_graphs.parallel import ParallelConfig, data_mesh, make_mesh, parallelize
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler
from training_runs import Trace, loss_of, tiny_model

Step = Callable[[dict[str, Any]], tuple[list[torch.Tensor], torch.Tensor]]


def laid_out(
    device: str,
    config: ParallelConfig,
    *,
    layers: str = "moe",
    dropout: float = 0.1,
    count: int = 1,
    dtype: torch.dtype | None = None,
    mixed: bool = False,
) -> tuple[LanguageModel, Any]:
    """The tiny model in that layout, experts exchanged in static shapes; and its data mesh."""
    mesh = make_mesh(config, device)
    model = tiny_model(device, layers, dropout=dropout, count=count, dtype=dtype)
    if not dropout:
        without_noise(model)
    options: dict[str, Any] = {"dispatcher": "all_gather"} if config.ep > 1 else {}
    if mixed:
        options["mixed_precision"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return parallelize(model, config, mesh, **options), data_mesh(mesh)


def without_noise(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.router.config = replace(layer.router.config, input_jitter=0.0)


def step_of(model: LanguageModel, update: DeviceStep, group: Any = None) -> Step:
    """All microbatches, then everything that follows the backward."""

    def step(batch: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
        losses = []
        for tokens in batch["tokens"]:
            loss = loss_of(model, tokens)[0]
            update.scale(loss * batch["scale"]).backward()
            losses.append(loss.detach())
        norm = update().grad_norm
        model.update_expert_bias(group)
        return losses, norm

    return step


def train(
    rank: int, device: str, config: ParallelConfig, graphed: bool, steps: int, **options: Any
) -> Trace:
    """With clipping, dropout, a scaler, expert bias; two microbatches."""
    model, data = laid_out(device, config, **options)
    group = data.get_group()
    optimizer = optimizer_of(model, device)
    scaler = GradScaler(device, init_scale=4.0, growth_interval=6)
    update = DeviceStep(
        optimizer, scaler=scaler, clip_norm=0.5, process_group=group, set_to_none=True
    )
    step: Any = step_of(model, update, group)
    if graphed:
        step = FullIteration(
            step, model=model, optimizer=optimizer, state=[update], on_mismatch="error"
        )
    torch.manual_seed(rank)
    trace = Trace()
    for index, batch in enumerate(batches(device, steps, 2, seed=10 + rank)):
        losses, norm = step(batch)
        trace.note(f"norm {index}", norm)
        for loss in losses:
            trace.note(f"loss {index}", loss)
    for name, tensor in local_state(model):
        trace.note(name, tensor)
    if graphed:
        report = step.report()
        assert (report.replayed, report.state) == (steps - 3, "captured"), report
        step.release()
    return trace


def local_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.to_local()
    yield from model.named_buffers()


def compare(rank: int, world_size: int, device: str, layouts: list[dict], steps: int) -> list:
    """Graphed against eager, for each layout in turn; the norms of each. "mixed" in a layout:
    weights in fp32, computed with in bf16."""
    norms = []
    for given in layouts:
        layout = dict(given)
        options = {"mixed": True, "dtype": torch.float32} if layout.pop("mixed", False) else {}
        config = ParallelConfig(**layout)
        expected = train(rank, device, config, False, steps, **options)
        train(rank, device, config, True, steps, **options).assert_equal(expected)
        norms.append([v.item() for name, v in expected.values if "norm " in name][:steps])
    return norms
