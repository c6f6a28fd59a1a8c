"""One rank of a pipeline, driven through its order alone, with made-up messages.

A message depends on step, chunk and microbatch only, so eager and graphed runs get the same ones.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class

import moe_graphs
from moe_graphs.layers import MoEConfig, TransformerConfig, TransformerLayer
from moe_graphs.pipelines.builders import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zero_bubble,
)
from moe_graphs.pipelines.formats import from_torch
from moe_graphs.pipelines.schedule import Schedule
from training_runs import Trace

WIDTH, SEQUENCE = 16, 8


def torch_schedule(name: str, pp: int, chunks: int, microbatches: int) -> Any:
    """Construct torch's schedule without processes: it only asks its stages for their numbers."""
    in_a_v = name in ("ZBVZeroBubble", "DualPipeV")
    indices = [0, 2 * pp - 1] if in_a_v else range(0, pp * chunks, pp)
    numbers = {"num_stages": pp * chunks, "group_size": pp, "group_rank": 0, "submod": None}
    stages = [types.SimpleNamespace(stage_index=index, **numbers) for index in indices]
    given = stages[0] if name in ("GPipe", "1F1B") else stages
    return get_schedule_class(name)(given, microbatches, loss_fn=lambda *_: None)


def make_schedule(name: str, pp: int, microbatches: int) -> Schedule:
    """Make a schedule by its name, ours or torch's; several chunks are two per rank."""
    if name in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        return {
            "gpipe": lambda: gpipe(pp, microbatches),
            "1f1b": lambda: one_f_one_b(pp, microbatches),
            "interleaved": lambda: interleaved_1f1b(pp, 2, microbatches),
            "zero_bubble": lambda: zero_bubble(pp, microbatches),
        }[name]()
    return from_torch(torch_schedule(name, pp, 2, microbatches))


class Layers(nn.Module):
    """A chunk of a language model, with dense and MoE layers in turn.

    The layers have every feature that could differ between a graph and eager. The chunk returns the
    hidden states and the sum of the aux losses.
    """

    def __init__(self, count: int, device: str) -> None:
        super().__init__()
        moe = MoEConfig(
            num_experts=4,
            top_k=2,
            ffn_hidden_size=16,
            aux_loss_coef=0.01,
            input_jitter=0.01,
            expert_bias=True,
        )
        config = TransformerConfig(
            hidden_size=WIDTH,
            num_layers=count,
            num_heads=2,
            ffn_hidden_size=24,
            vocab_size=1,
            max_sequence_length=SEQUENCE,
            attention_dropout=0.1,
            hidden_dropout=0.1,
            moe=moe,
            moe_layers=tuple((count - i) % 2 == 1 for i in range(count)),
        )
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.layers = nn.ModuleList(
            TransformerLayer(config, i, device=device, dtype=dtype) for i in range(count)
        )
        for layer in self.layers:
            layer.init_weights(0.2, 0.2)

    def forward(self, hidden_BSD: Tensor) -> tuple[Tensor, Tensor]:
        aux_loss = torch.zeros((), device=hidden_BSD.device)
        for layer in self.layers:
            output = layer(hidden_BSD)
            hidden_BSD = output.hidden_BSD
            if layer.is_moe:
                aux_loss = aux_loss + output.aux_loss
        return hidden_BSD, aux_loss


def make_chunks(kind: str, count: int, device: str, layers: int = 2) -> nn.ModuleList:
    """``count`` chunks, "layers" of ours or a "plain" ``nn.Sequential``."""
    torch.manual_seed(0)
    if kind == "layers":
        return nn.ModuleList(Layers(layers, device) for _ in range(count))
    return nn.ModuleList(_plain().to(device) for _ in range(count))


def _plain() -> nn.Sequential:
    up, down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
    return nn.Sequential(up, nn.GELU(), nn.Dropout(0.1), down, nn.LayerNorm(WIDTH))


def run_rank(
    schedule: Schedule,
    rank: int,
    chunks: nn.ModuleList,
    graphs: moe_graphs.Graphs,
    steps: int,
    split: bool = False,
) -> Trace:
    """Trains ``rank``'s chunks; notes what it sends, gradients and state after every step.

    split: B leaves the gradients of weights to ``graphs.backward_weight()`` at its W. Otherwise
        B is the whole backward, and W nothing.
    """
    optimizer = torch.optim.AdamW(chunks.parameters(), lr=1e-2)
    trace = Trace()
    for step in range(steps):
        with graphs.step():
            _run_step(schedule, rank, chunks, graphs, split, step, trace)
        for name, parameter in chunks.named_parameters():
            trace.note(f"step {step} grad {name}", parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        for module in chunks.modules():
            if hasattr(module, "update_expert_bias"):
                module.update_expert_bias()
        trace.note_state(chunks, f"step {step}")
    trace.note("random number", torch.rand(1, device=next(chunks.parameters()).device))
    return trace


def _run_step(schedule, rank, chunks, graphs, split, step, trace) -> None:
    globally, order = schedule.chunks(rank), schedule.local_order(rank)
    has_weights_apart = {(a.chunk, a.microbatch) for a in order if split and a.kind == "W"}
    in_flight: dict[tuple[int, int], tuple[Tensor, tuple[Tensor, ...]]] = {}
    for action in order:
        chunk = chunks[action.chunk]
        microbatch = action.chunk, action.microbatch
        if action.kind == "F":
            received = _received(chunk, step, *microbatch)
            received.requires_grad_(globally[action.chunk] > 0)  # the first one gets data
            outputs = chunk(received)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            trace.note(f"step {step} {action}", outputs[0])
            in_flight[microbatch] = received, outputs
        elif action.kind == "B":
            received, (hidden, *losses) = in_flight.pop(microbatch)
            gradient = _received(chunk, step, *microbatch, backward=True)
            ones = [torch.ones_like(loss) for loss in losses]
            apart = microbatch in has_weights_apart
            with graphs.delayed_weights() if apart else contextlib.nullcontext():
                torch.autograd.backward([hidden, *losses], [gradient, *ones])
            trace.note(f"step {step} {action}", received.grad)
        elif split:
            graphs.backward_weight()


def _received(
    chunk: nn.Module, step: int, number: int, microbatch: int, backward: bool = False
) -> Tensor:
    like = next(chunk.parameters())
    seed = ((2 * step + backward) * 64 + number) * 1024 + microbatch
    made = torch.randn(2, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(seed))
    return made.to(like.device, like.dtype)


def eager_rank(
    schedule: Schedule, rank: int, kind: str, device: str, steps: int, layers: int = 2
) -> Trace:
    chunks = make_chunks(kind, len(schedule.chunks(rank)), device, layers)
    off = moe_graphs.graph(chunks, moe_graphs.GraphConfig(impl="none"))
    return run_rank(schedule, rank, chunks, off, steps)
