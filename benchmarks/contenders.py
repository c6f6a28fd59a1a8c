"""What is compared: two models, and the ways to run a training step of them.

Shapes: B sequences, S sequence length, V vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from moe_graphs import GraphConfig, Graphs, graph
from moe_graphs.dispatch import make_dispatcher
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.layers.presets import qwen3_30b_a3b

WARMUP_STEPS = 3


@dataclass(frozen=True)
class Setting:
    """A model, its batch, and how often its step is repeated.

    Attributes:
        rounds: in each, every contender has one turn, in shuffled order.
        steps: timed steps of a turn; a step before them is not timed.
        host_steps: steps of a turn whose host time is taken, each after a synchronisation.
    """

    name: str
    config: TransformerConfig
    batch_size: int
    dtype: torch.dtype
    rounds: int
    steps: int
    host_steps: int = 3
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.batch_size * self.config.max_sequence_length

    def describe(self) -> str:
        config, moe = self.config, self.config.moe
        return (
            f"{config.num_layers} layers, hidden {config.hidden_size}, {moe.num_experts} experts "
            f"of {moe.ffn_hidden_size}, top-{moe.top_k}, {self.tokens:,} tokens "
            f"({self.batch_size}x{config.max_sequence_length}), vocabulary "
            f"{config.vocab_size:,}, {str(self.dtype).removeprefix('torch.')}"
        )


def launch_bound() -> Setting:
    """Small kernels: the host cannot launch them as fast as the GPU runs them."""
    config = TransformerConfig(
        hidden_size=1024,
        num_layers=12,
        num_heads=16,
        num_kv_heads=4,
        vocab_size=32_768,
        max_sequence_length=1024,
        moe=MoEConfig(num_experts=32, top_k=4, ffn_hidden_size=512, aux_loss_coef=0.01),
    )
    return Setting("launch_bound", config, 2, torch.bfloat16, rounds=7, steps=10)


def gpu_bound() -> Setting:
    """Qwen3-30B-A3B's layers at 16k tokens: the GPU is the slower of the two.

    Three layers and a smaller vocabulary, so that four contenders fit beside each other in
    139 GiB. Parameters and both Adam states are 6 bytes a parameter (2.0 B parameters: 12 GB a
    contender, 48 GB), gradients 4 GB, activations about 2.5 GB a layer and 8 GB around the logits,
    all of which only the running contender holds; and the graphs' pools, which stay: about 15 GB
    for `attn,moe`, 25 GB in all. Together about 95 GB.
    """
    config = qwen3_30b_a3b(num_layers=3, vocab_size=32_768, max_sequence_length=4096)
    return Setting("gpu_bound", config, 4, torch.bfloat16, rounds=5, steps=4, host_steps=2)


def tiny(setting: Setting, device: torch.device) -> Setting:
    """The same kind of model in a size for the CPU, to test the benchmark."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    moe = replace(setting.config.moe, num_experts=4, top_k=2, ffn_hidden_size=16)
    config = replace(
        setting.config,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=64,
        max_sequence_length=8,
        moe=moe,
    )
    return replace(setting, config=config, batch_size=2, dtype=dtype, rounds=2, steps=2)


def settings() -> dict[str, Setting]:
    return {setting.name: setting for setting in (launch_bound(), gpu_bound())}


@dataclass(frozen=True)
class Contender:
    """A way to run the step: eager without ``scopes``, whose graphs they name, or compiled."""

    name: str
    scopes: str | None = None
    compiled: bool = False


EAGER = Contender("eager")


def contenders(compiled: bool) -> list[Contender]:
    """Eager first: the others are compared with it."""
    scopes = ("attn", "attn,moe_router,moe_preprocess", "attn,moe")
    extra = [Contender("torch.compile", compiled=True)] if compiled else []
    return [EAGER, *(Contender(s, s) for s in scopes), *extra]


class Run:
    """A model with its optimizer and graphs, and the next batch of random tokens.

    Two runs of one setting start from the same weights and see the same batches, a new one every
    step. Batches are made beforehand, so that making them is not part of a step.
    """

    batches = 64

    def __init__(
        self, setting: Setting, contender: Contender, dispatcher: str, device: torch.device
    ) -> None:
        torch.manual_seed(setting.seed)
        self.contender, self.device = contender, device
        self.model = LanguageModel(
            setting.config, make_dispatcher(dispatcher), device=device, dtype=setting.dtype
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.graphs: Graphs | None = None
        if contender.scopes is not None:
            # A benchmark must not fall back to eager calls unnoticed.
            config = GraphConfig(contender.scopes, warmup_steps=WARMUP_STEPS, on_mismatch="error")
            self.graphs = graph(self.model, config)
        self._forward = self.model
        if contender.compiled:
            self._forward = torch.compile(self.model, mode="reduce-overhead")
        shape = (self.batches, setting.batch_size, setting.config.max_sequence_length + 1)
        self._tokens = torch.randint(setting.config.vocab_size, shape, device=device)
        self._next = 0

    def step(self) -> Tensor:
        """Forward, losses, backward, optimizer. Returns the loss; does not synchronise."""
        tokens = self._tokens[self._next % self.batches]
        self._next += 1
        if self.contender.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        with self.graphs.step() if self.graphs is not None else contextlib.nullcontext():
            output = self._forward(tokens[:, :-1])
            logits_TV = output.logits_BSV.flatten(0, 1).float()
            loss = functional.cross_entropy(logits_TV, tokens[:, 1:].flatten())
            loss = loss + output.aux_loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def warm_up(self) -> None:
        """Until graphs are captured and every path has run twice."""
        for _ in range(WARMUP_STEPS + 2):
            self.step()
        synchronize(self.device)

    def release(self) -> None:
        """Gives the memory back; the run is of no use afterwards."""
        if self.graphs is not None:
            self.graphs.release()
        self._forward = self.model = self.optimizer = self.graphs = self._tokens = None
        if self.contender.compiled:
            torch.compiler.reset()
        free_memory(self.device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
