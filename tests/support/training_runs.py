"""Small models and short training runs that the engine's tests compare bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional

import moe_graphs
from moe_graphs.dispatch import Dispatcher
from moe_graphs.engine.backends.cpu import CpuRecorder
from moe_graphs.engine.backends.cuda import CudaGraphs
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.layers.model_config import Precision

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = {"dense": "none", "moe": "all", "mixed": (False, True)}
VOCABULARY, SEQUENCE = 64, 32


def device_backend(device: str) -> CpuRecorder | CudaGraphs:
    return CpuRecorder() if device == "cpu" else CudaGraphs(torch.device(device, 0))


def tiny_model(
    device: str,
    layers: str = "mixed",
    shared: bool = True,
    dispatcher: Dispatcher | None = None,
    dropout: float = 0.1,
    count: int = 2,
    dtype: torch.dtype | None = None,
    recompute: Literal["none", "experts"] = "none",
    precision: Precision = "weights",
) -> LanguageModel:
    """Make a model of a few layers, by default in fp32 on the CPU and in bf16 on a GPU.

    With experts in FP8 it is wider, as their blocks want it.

    It has every feature that could differ between a graph and eager: dropout, jitter, aux losses,
    expert bias.
    """
    torch.manual_seed(0)
    kind: Any = LAYERS[layers]
    moe = MoEConfig(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=16 if precision == "weights" else 128,
        aux_loss_coef=0.01,
        z_loss_coef=0.001,
        input_jitter=0.01,
        expert_bias=True,
        shared_ffn_hidden_size=16 if shared else 0,
        shared_gate=shared,
        recompute=recompute,
        precision=precision,
    )
    config = TransformerConfig(
        hidden_size=32 if precision == "weights" else 128,
        num_layers=count,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=48,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        qk_norm="head",
        attention_dropout=dropout,
        hidden_dropout=dropout,
        moe=moe,
        moe_layers=kind if isinstance(kind, str) else kind * (count // 2),
    )
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    return LanguageModel(config, dispatcher, device=device, dtype=dtype)


@dataclass
class Trace:
    """Everything a run produced, in order: bitwise equal traces mean equal training."""

    values: list[tuple[str, torch.Tensor | None]] = field(default_factory=list)

    def note(self, name: str, value: torch.Tensor | None) -> None:
        self.values.append((name, None if value is None else value.detach().cpu().clone()))

    def note_state(self, model: nn.Module, where: str) -> None:
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            self.note(f"{where} {name}", tensor)

    def assert_equal(self, other: Trace) -> None:
        assert [name for name, _ in self.values] == [name for name, _ in other.values]
        differing = [
            name
            for (name, a), (_, b) in zip(self.values, other.values, strict=True)
            if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))
        ]
        assert not differing, f"{len(differing)} of {len(self.values)} differ: {differing[:5]}"


def microbatches(device: str, steps: int, seed: int = 1) -> Iterable[list[torch.Tensor]]:
    """Two microbatches of tokens a step, new ones every step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield [
            torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator).to(device)
            for _ in range(2)
        ]


def loss_of(model: LanguageModel, tokens: torch.Tensor) -> tuple[torch.Tensor, object]:
    output = model(tokens[:, :-1])
    logits = output.logits_BSV.float().flatten(0, 1)
    loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
    return loss + output.aux_loss, output


def train(
    model: LanguageModel, graphs: moe_graphs.Graphs, device: str, steps: int = 7, seed: int = 1
) -> Trace:
    """Trains with two microbatches a step and notes outputs, losses, gradients and state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trace = Trace()
    for step, batches in enumerate(microbatches(device, steps, seed)):
        with graphs.step():
            for tokens in batches:
                loss, output = loss_of(model, tokens)
                loss.backward()
                trace.note(f"step {step} logits", output.logits_BSV)
                trace.note(f"step {step} loss", loss)
                trace.note(f"step {step} aux loss", output.aux_loss)
                trace.note(f"step {step} dropped", output.dropped_tokens)
        for name, parameter in model.named_parameters():
            trace.note(f"step {step} grad {name}", parameter.grad)
        trace.note_state(model, f"step {step} before update")
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias()
    trace.note_state(model, "end")
    trace.note("random number", torch.rand(1, device=device))
    return trace


def eager_trace(device: str, steps: int = 7, **model: object) -> Trace:
    made = tiny_model(device, **model)
    return train(made, moe_graphs.graph(made, moe_graphs.GraphConfig(impl="none")), device, steps)
