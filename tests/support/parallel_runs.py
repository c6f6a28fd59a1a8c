"""Short training runs of a small model in a parallel layout, whole steps graphed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from full_iterations import batches, optimizer_of
from moe_graphs.engine.whole_step.full_iteration import FullIteration
from moe_graphs.layers import LanguageModel, MoELayer
from moe_graphs.layers.router import Routing, TopKRouter
from moe_graphs.optim import AdamW
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize, vocabulary_cross_entropy
from moe_graphs.parallel.context_parallel import part_of_sequences
from moe_graphs.parallel.mesh import loss_mesh
from moe_graphs.parallel.vocabulary import vocabulary_group
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_norm import local_part
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
    """Lay out the tiny model, with a dispatcher of static shapes; return it and its loss mesh."""
    mesh = make_mesh(config, device)
    model = tiny_model(device, layers, dropout=dropout, count=count, dtype=dtype)
    if not dropout:
        without_noise(model)
    options: dict[str, Any] = {"dispatcher": "all_gather"} if config.ep > 1 else {}
    if mixed:
        options["mixed_precision"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return parallelize(model, config, mesh, **options), loss_mesh(mesh)


def own_part(model: LanguageModel, batch: dict[str, Any]) -> dict[str, Any]:
    """Part of this rank in a batch that is the same on all ranks that share its sequences."""
    exchange = model.layers[0].attention.exchange
    if exchange is None:
        return batch
    tokens = [part_of_sequences(each, exchange.group, overlap=1) for each in batch["tokens"]]
    return {**batch, "tokens": tokens}


def without_noise(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.router.config = replace(layer.router.config, input_jitter=0.0)


def loss_on(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Loss as in ``loss_of``, of a model whose vocabulary ranks may share."""
    output = model(tokens[:, :-1])
    logits, targets = output.logits_BSV.flatten(0, 1), tokens[:, 1:].flatten()
    return vocabulary_cross_entropy(logits, targets, vocabulary_group(model)) + output.aux_loss


def step_of(model: LanguageModel, update: DeviceStep, group: Any = None) -> Step:
    """All microbatches, then everything that follows the backward."""

    def step(batch: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
        losses = []
        for tokens in batch["tokens"]:
            loss = loss_on(model, tokens)
            update.scale(loss * batch["scale"]).backward()
            losses.append(loss.detach())
        norm = update().grad_norm
        model.update_expert_bias(group)
        return losses, norm

    return step


def optimizer_for(model: nn.Module, device: str, config: ParallelConfig) -> Any:
    """Make the optimizer; with ``tp`` parameters are on several meshes, or on none."""
    if config.tp > 1:
        return AdamW(model.parameters(), lr=torch.tensor(1e-2, device=device))
    return optimizer_of(model, device)


def routed_by_parts(model: nn.Module, cp: int, rows: int) -> None:
    """Make aux losses those of ``cp`` ranks: the mean of one for each part of the sequences."""

    def over_parts(router: TopKRouter) -> Callable[[torch.Tensor], Routing]:
        whole = router.forward

        def forward(hidden_TD: torch.Tensor) -> Routing:
            parts = hidden_TD.unflatten(0, (rows, -1)).chunk(cp, dim=1)
            found = [whole(part.flatten(0, 1)) for part in parts]
            per_token = ("weights_TK", "experts_TK")
            together = (
                torch.cat([getattr(each, name).unflatten(0, (rows, -1)) for each in found], dim=1)
                for name in per_token
            )
            aux_loss = torch.stack([each.aux_loss for each in found]).mean()
            counts_E = sum(each.tokens_per_expert_E for each in found)
            return Routing(*(each.flatten(0, 1) for each in together), aux_loss, counts_E)

        return forward

    for router in model.modules():
        if cp > 1 and isinstance(router, TopKRouter):
            router.forward = over_parts(router)


def train(
    rank: int, device: str, config: ParallelConfig, graphed: bool, steps: int, **options: Any
) -> Trace:
    """Train with two microbatches, clipping, dropout, a scaler and an expert bias."""
    model, with_tokens = laid_out(device, config, **options)
    group = with_tokens.get_group()
    optimizer = optimizer_for(model, device, config)
    scaler = GradScaler(device, init_scale=4.0, growth_interval=6)
    update = DeviceStep(
        optimizer, scaler=scaler, clip_norm=0.5, process_group=dist.group.WORLD, set_to_none=True
    )
    step: Any = step_of(model, update, group)
    if graphed:
        step = FullIteration(
            step, model=model, optimizer=optimizer, state=[update], on_mismatch="error"
        )
    part = with_tokens.get_local_rank()
    torch.manual_seed(part)
    trace = Trace()
    for index, batch in enumerate(batches(device, steps, 2, seed=10 + part // config.cp)):
        losses, norm = step(own_part(model, batch))
        trace.note(f"norm {index}", norm)
        for loss in losses:
            trace.note(f"loss {index}", loss)
    for name, tensor in local_state(model):
        trace.note(name, tensor)
    if graphed:
        report = step.report()
        assert (report.matched, report.state) == (steps - 3, "captured"), report
        step.release()
    return trace


def local_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, local_part(parameter)
    yield from model.named_buffers()


def compare(rank: int, world_size: int, device: str, layouts: list[dict], steps: int) -> list:
    """Compare graphed with eager, for each layout in turn; return the norms of each.

    A layout with "mixed" has weights in fp32 and computes in bf16.
    """
    norms = []
    for given in layouts:
        layout = dict(given)
        options = {"mixed": True, "dtype": torch.float32} if layout.pop("mixed", False) else {}
        config = ParallelConfig(**layout)
        expected = train(rank, device, config, False, steps, **options)
        train(rank, device, config, True, steps, **options).assert_equal(expected)
        norms.append([v.item() for name, v in expected.values if "norm " in name][:steps])
    return norms


def told(call: Callable[[], Any]) -> str:
    """Message with which ``call`` is refused."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def keep_losses_and_evaluate(rank: int, world_size: int, device: str) -> list[list[float]]:
    """Keep losses of eager steps alive, and evaluate between steps.

    The losses belong to the default stream, whose gradient accumulators a capture must not meet.
    Evaluations leave parameters gathered.
    """
    seen = []
    for graphed in (False, True):
        model, _ = laid_out(device, ParallelConfig(dp_shard=world_size), dropout=0.0)
        optimizer = optimizer_of(model, device)
        update = DeviceStep(optimizer, clip_norm=1.0, set_to_none=True)
        step = step_of(model, update)
        if graphed:
            options = {"model": model, "optimizer": optimizer, "state": [update]}
            step = FullIteration(step, on_mismatch="error", warmup_steps=1, **options)
        losses, held = [], []
        for index, batch in enumerate(batches(device, 6, 2, seed=rank)):
            if index == 0:
                held.append(loss_of(model, batch["tokens"][0])[0])
                held[0].backward(retain_graph=False)
                optimizer.zero_grad()
            losses.append(_evaluated(model, batch))
            step(batch)
            losses.append(_evaluated(model, batch))
        seen.append(losses)
        if graphed:
            assert step.report().matched == 5, step.report()
            step.release()
    return seen


def _evaluated(model, batch) -> float:
    with torch.no_grad():
        return loss_of(model, batch["tokens"][0])[0].item()
