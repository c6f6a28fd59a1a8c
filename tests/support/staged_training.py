"""Short training runs of a small model divided into pipeline stages, or whole in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import moe_graphs
from moe_graphs import FullIteration, GraphConfig
from moe_graphs.engine.report import Report
from moe_graphs.layers import LanguageModel
from moe_graphs.parallel import (
    ParallelConfig,
    Pipeline,
    make_mesh,
    parallelize,
    pipeline_stages,
    vocabulary_cross_entropy,
)
from moe_graphs.parallel.context_parallel import part_of_sequences
from moe_graphs.parallel.mesh import data_mesh, loss_mesh
from moe_graphs.parallel.vocabulary import vocabulary_group
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_norm import clip_grad_norm, local_part
from moe_graphs.training.grad_scaler import GradScaler
from parallel_runs import local_state, optimizer_for, routed_by_parts, without_noise
from tensor_parallel_runs import whole
from training_runs import SEQUENCE, VOCABULARY, Trace, tiny_model

MICROBATCHES, ROWS = 4, 2  # of a rank; a layout may say fewer


@dataclass(frozen=True)
class Laid:
    """The model of a rank, divided, and what runs it."""

    model: LanguageModel
    pipeline: Pipeline
    config: ParallelConfig
    mesh: DeviceMesh

    @property
    def stage_group(self) -> dist.ProcessGroup:
        return self.mesh["pp"].get_group()

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """The ranks with tokens of their own."""
        return loss_mesh(self.mesh).get_group()

    def tokens(self, step: int) -> Tensor:
        """Part of this rank in its batch."""
        every = tokens_of(step, self.config.data_parallel, self.mesh.device_type)
        mine = every[data_mesh(self.mesh).get_local_rank()][: self.pipeline.microbatches * ROWS]
        return part_of_sequences(mine, self.mesh["cp"].get_group(), overlap=1)

    def seed(self) -> None:
        """Seed the generators, ranks of ``tp`` alike."""
        number = self.mesh["pp"].get_local_rank() * self.config.with_tokens
        torch.manual_seed(number + loss_mesh(self.mesh).get_local_rank())


def cross_entropy(
    logits_BSV: Tensor, targets_BS: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    return vocabulary_cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), group)


def divided(
    device: str,
    layout: dict[str, Any],
    *,
    layers: int,
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    scale: Callable[[Tensor], Tensor] | None = None,
) -> Laid:
    """Divide a model into stages.

    Args:
        layout: fields of ``ParallelConfig``, and "schedule", "stages" per rank, "kind" of layers
            and "microbatches"; with "whole_logits" a loss function takes the logits.
    """
    degrees = dict(layout)
    kind = degrees.pop("kind", "mixed")
    schedule, stages_per_rank = degrees.pop("schedule", "1f1b"), degrees.pop("stages", 1)
    microbatches = degrees.pop("microbatches", MICROBATCHES)
    whole_logits = degrees.pop("whole_logits", False)
    config = ParallelConfig(**degrees)
    mesh = make_mesh(config, device)
    model = tiny_model(device, kind, dropout=dropout, count=layers, dtype=dtype)
    if not dropout:
        without_noise(model)
    stages = pipeline_stages(
        model, config, mesh, stages_per_rank=stages_per_rank, autocast=partial(autocast, device)
    )
    options: dict[str, Any] = {"dispatcher": "all_gather"} if config.ep > 1 else {}
    for stage in stages:
        parallelize(stage, config, mesh, **options)
    pipeline = Pipeline(
        stages,
        mesh,
        partial(cross_entropy, group=vocabulary_group(stages[-1])) if whole_logits else None,
        microbatches=microbatches,
        microbatch_shape=(ROWS, SEQUENCE // config.cp),
        schedule=schedule,
        scale=scale,
    )
    return Laid(model, pipeline, config, mesh)


def autocast(device: str) -> torch.autocast:
    """Autocast to bf16, on GPUs alone, where experts compute in bf16."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False)


def tokens_of(step: int, data_ranks: int, device: str) -> Tensor:
    """The whole batch: ranks, then microbatches, then rows."""
    generator = torch.Generator().manual_seed(step)
    shape = (data_ranks, MICROBATCHES * ROWS, SEQUENCE + 1)
    return torch.randint(VOCABULARY, shape, generator=generator).to(device)


@dataclass
class Record:
    """Results of a few steps, of this rank's stages or of all.

    These are losses, norms, gradients of the first step, and parameters and expert biases after the
    last one.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def train_divided(device: str, layout: dict[str, Any], layers: int, steps: int = 3) -> Record:
    """Train divided into stages, by SGD, in which a small difference stays small."""
    laid = divided(device, layout, layers=layers, dtype=torch.float32)
    model, found = laid.model, Record([], [], {}, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    for step in range(steps):
        tokens = laid.tokens(step)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        before = laid.pipeline.evaluate(inputs, targets)  # which leaves nothing behind
        loss, dropped = laid.pipeline.forward_backward(inputs, targets)
        # Without a loss function `evaluate` sums over targets, with one over microbatches.
        count = MICROBATCHES if layout.get("whole_logits") else targets.numel()
        torch.testing.assert_close(before / count, loss, rtol=1e-4, atol=1e-4)
        assert dropped.item() == 0
        dist.all_reduce(loss)
        found.losses.append(loss.item() * laid.config.pp / laid.config.world_size)
        if step == 0:
            named = [(name, cast(Tensor, p.grad)) for name, p in model.named_parameters()]
            found.gradients = {n: grad.clone() for n, grad in whole(model, named).items()}
        norm = clip_grad_norm(model.parameters(), 0.2, laid.stage_group)
        found.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias(laid.loss_group)
    found.state = whole(model, model.state_dict().items())
    return found


def train_whole(device: str, data_ranks: int, layers: int, steps: int = 3, cp: int = 1) -> Record:
    """Train on all ranks' microbatches in this process, with the aux losses of ``cp`` ranks."""
    model = tiny_model(device, "mixed", dropout=0.0, count=layers, dtype=torch.float32)
    without_noise(model)
    routed_by_parts(model, cp, ROWS)
    found, count = Record([], [], {}, {}), MICROBATCHES * data_ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(steps):
        losses = []
        for tokens in tokens_of(step, data_ranks, device).flatten(0, 1).chunk(count):
            with autocast(device):
                output = model(tokens[:, :-1])
            loss = cross_entropy(output.logits_BSV, tokens[:, 1:])
            ((loss + output.aux_loss) / count).backward()
            losses.append(loss.item())
        found.losses.append(sum(losses) / count)
        if step == 0:
            found.gradients = {name: p.grad.cpu().clone() for name, p in model.named_parameters()}
        found.norms.append(clip_grad_norm(model.parameters(), 0.2).item())
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias()
    found.state = whole(model, model.state_dict().items())
    return found


def _named(record: Record, names: Record) -> dict[str, Tensor]:
    """All of ``record`` that ``names`` has as well."""
    return {
        "losses": torch.tensor(record.losses),
        "norms": torch.tensor(record.norms),
        **{f"gradient {name}": record.gradients[name] for name in names.gradients},
        **{name: record.state[name] for name in names.state},
    }


def furthest(found: Record, expected: Record) -> float:
    """The largest difference, of what this rank has."""
    pairs = zip(_named(found, found).values(), _named(expected, found).values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def furthest_relative(found: Record, expected: Record) -> dict[str, float]:
    """The largest difference of each, relative to the largest number in it."""
    ours, theirs = _named(found, found), _named(expected, found)
    return {
        name: ((ours[name].double() - value).abs().max() / value.abs().max().clamp(1e-6)).item()
        for name, value in theirs.items()
    }


def train_graphed(
    rank: int, device: str, layout: dict[str, Any], layers: int, config: GraphConfig, steps: int
) -> tuple[Trace, Report]:
    """Train with dropout, jitter, a scaler and clipping; rank 0 has an infinite gradient once."""
    scaler = GradScaler(device, init_scale=4.0, growth_interval=3)
    laid = divided(device, layout, layers=layers, dropout=0.1, scale=scaler.scale)
    model, trace = laid.model, Trace()
    graphs = moe_graphs.graph(model, config)
    update = DeviceStep(
        optimizer_for(model, device, laid.config),
        scaler=scaler,
        clip_norm=0.5,
        process_group=dist.group.WORLD,
        stage_group=laid.stage_group,
        set_to_none=laid.config.tp > 1,  # torch zeroes no mixture of DTensors and others
    )
    laid.seed()
    for step in range(steps):
        tokens = laid.tokens(step)
        with graphs.step():
            loss, _ = laid.pipeline.forward_backward(tokens[:, :-1], tokens[:, 1:])
        trace.note(f"loss {step}", loss)
        for name, parameter in model.named_parameters():
            trace.note(f"gradient {name} {step}", local_part(parameter.grad))
        if step == steps - 2 and rank == 0:
            local_part(next(model.parameters()).grad).view(-1)[0] = torch.inf
        result = update()
        assert bool(result.found_inf) == (step == steps - 2), (rank, step)
        trace.note(f"norm {step}", result.grad_norm)
        model.update_expert_bias(laid.loss_group)
        for name, tensor in local_state(model):
            trace.note(f"step {step} {name}", tensor)
    report = graphs.report()
    graphs.release()
    return trace, report


def train_in_whole_steps(
    rank: int, device: str, layout: dict[str, Any], layers: int, graphed: bool, steps: int
) -> Trace:
    """Train with dropout, jitter and clipping; communication and update are in the graph."""
    laid = divided(device, layout, layers=layers, dropout=0.1)
    model, trace = laid.model, Trace()
    optimizer = optimizer_for(model, device, laid.config)
    update = DeviceStep(optimizer, clip_norm=0.5, stage_group=laid.stage_group)
    with_tokens = laid.loss_group

    def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
        loss, _ = laid.pipeline.forward_backward(tokens[:, :-1], tokens[:, 1:])
        norm = update().grad_norm
        model.update_expert_bias(with_tokens)
        return loss, norm

    run: Any = step
    if graphed:
        state = [update, laid.pipeline.memory]
        options = {"optimizer": optimizer, "state": state, "warmup_steps": 2}
        run = FullIteration(step, model=model, on_mismatch="error", **options)
    laid.seed()
    for index in range(steps):
        loss, norm = run(laid.tokens(index))
        trace.note(f"loss {index}", loss)
        trace.note(f"norm {index}", norm)
    for name, value in model.state_dict().items():
        trace.note(name, local_part(value))
    if graphed:
        report = run.report()
        assert (report.matched, report.state) == (steps - 2, "captured"), report
        run.release()
    return trace
