"""Models that are compared, and the ways to run a training step of them.

Shapes: B sequences, S sequence length, V vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs import FullIteration, GraphConfig, Graphs, graph
from moe_graphs.dispatch import make_dispatcher
from moe_graphs.engine.report import Report
from moe_graphs.engine.whole_step.full_iteration import FullIterationReport
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig, unchanged_weights
from moe_graphs.layers.architectures import qwen3_30b_a3b
from moe_graphs.layers.experts import GroupedExperts
from moe_graphs.layers.model_config import Precision
from moe_graphs.layers.router import TopKRouter
from moe_graphs.optim import AdamW
from moe_graphs.training.update_in_backward import UpdateInBackward

WARMUP_STEPS = 3
BATCHES = 64
READ = 64  # columns of the embeddings that routers read, where choices are to be even


@dataclass(frozen=True)
class Setting:
    """A model, its batch, and how often its step is repeated.

    Attributes:
        rounds: number of rounds; in each, every contender has one turn, in shuffled order.
        steps: number of timed steps of a turn; a step before them is not timed.
        host_steps: number of steps of a turn whose host time is taken, each after a
            synchronisation.
        microbatches: number of batches of a step, whose gradients are accumulated.
        routing: how tokens spread over experts: as the untrained model has it, "even" or "zipf".
    """

    name: str
    config: TransformerConfig
    batch_size: int
    dtype: torch.dtype
    rounds: int
    steps: int
    host_steps: int = 3
    seed: int = 0
    microbatches: int = 1
    routing: str = "untrained"

    @property
    def tokens(self) -> int:
        """Number of tokens of a step."""
        return self.microbatches * self.batch_size * self.config.max_sequence_length

    def describe(self) -> str:
        config, moe = self.config, self.config.moe
        mlp = f"dense of {config.ffn_hidden_size}"
        if moe is not None:
            mlp = f"{moe.num_experts} experts of {moe.ffn_hidden_size}, top-{moe.top_k}"
            mlp += "" if self.routing == "untrained" else f", routing {self.routing}"
        batch = f"{self.batch_size}x{config.max_sequence_length}"
        if self.microbatches > 1:
            batch = f"{self.microbatches} microbatches of {batch}"
        return (
            f"{config.num_layers} layers, hidden {config.hidden_size}, {mlp}, {self.tokens:,} "
            f"tokens ({batch}), vocabulary {config.vocab_size:,}, "
            f"{str(self.dtype).removeprefix('torch.')}"
        )

    def tiny(self, device: torch.device) -> Setting:
        """Smaller setting of the same kind for the CPU, to test the benchmark.

        Blocks of FP8 bound the sizes from below.
        """
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        moe = self.config.moe
        if moe is not None:
            moe = replace(moe, num_experts=4, top_k=2, ffn_hidden_size=128)
        config = replace(
            self.config,
            hidden_size=128,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            ffn_hidden_size=128,
            vocab_size=64,
            max_sequence_length=8,
            moe=moe,
        )
        return replace(self, config=config, batch_size=2, dtype=dtype, rounds=2, steps=2)

    def run(self, contender: Contender, dispatcher: str, device: torch.device) -> Run:
        return LanguageRun(self, contender, dispatcher, device)


def launch_bound() -> Setting:
    """Setting with small kernels, which the host launches more slowly than the GPU runs them."""
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
    """Setting with Qwen3-30B-A3B's layers at 16k tokens, in which the GPU is the slower one.

    Three layers and a smaller vocabulary let four contenders fit beside each other in 139 GiB.
    Parameters and both Adam states take 6 bytes per parameter (2.0 B parameters: 12 GB for each
    contender, 48 GB in all). Only the running contender holds gradients (4 GB), activations (about
    2.5 GB per layer) and the tensors around the logits (2 GB). The graphs' pools stay: about 15 GB
    for `attn,moe`, 25 GB in all. Together these are about 89 GB.
    """
    config = qwen3_30b_a3b(num_layers=3, vocab_size=32_768, max_sequence_length=4096)
    return Setting("gpu_bound", config, 4, torch.bfloat16, rounds=5, steps=4, host_steps=2)


def settings() -> dict[str, Setting]:
    return {setting.name: setting for setting in (launch_bound(), gpu_bound())}


@dataclass(frozen=True)
class Contender:
    """A way to run the step; the default is eager.

    Attributes:
        scopes: the parts that are graphs.
        full_iteration: whether forward and backward are one graph; with ``optimizer_in_graph`` the
            graph has the update, too.
        experts: the implementation of the experts in a model of transformers.
        our_adamw: whether the update is `moe_graphs.optim.AdamW` instead of torch's fused one.
        in_backward: whether that updates each weight within the backward, and frees its gradient.
        state_dtype: dtype of the optimizer's states, if it is not that of the parameters.
        precision: of experts and of the projections of all layers, as `MoEConfig` has it.
        audit_every: how often a call runs eagerly in place of its replay, to compare it.
    """

    name: str
    scopes: str | None = None
    compiled: bool = False
    full_iteration: bool = False
    optimizer_in_graph: bool = False
    experts: str = ""
    our_adamw: bool = False
    in_backward: bool = False
    state_dtype: torch.dtype | None = None
    precision: Precision = "weights"
    audit_every: int | str | None = None

    @property
    def rounds_otherwise(self) -> bool:
        in_fp8 = self.precision != "weights"
        return self.compiled or bool(self.experts) or self.our_adamw or in_fp8


EAGER = Contender("eager")


def contenders(compiled: bool) -> list[Contender]:
    """All contenders; the first is eager, with which the others are compared."""
    scopes = ("attn", "attn,moe_router,moe_preprocess", "attn,moe")
    extra = [Contender("torch.compile", compiled=True)] if compiled else []
    return [EAGER, *(Contender(s, s) for s in scopes), *extra]


class Run:
    """A model with its optimizer and graphs, and the next batch of random data.

    Two runs of one setting start from the same weights and see the same batches, a new one every
    step. Batches are made beforehand, so that making them is not part of a step.

    Args:
        state: what a whole step reads or changes besides model and optimizer.
        microbatches: batches of a step, whose gradients are accumulated.
    """

    def __init__(
        self,
        contender: Contender,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Tensor,
        state: Sequence[Any] = (),
        microbatches: int = 1,
    ) -> None:
        self.contender, self.model, self.optimizer = contender, model, optimizer
        self.microbatches = microbatches
        self.load: float | None = None
        self.device = batches.device
        self.graphs: Graphs | None = None
        self.full_iteration: FullIteration | None = None
        if contender.in_backward:
            state = [*state, UpdateInBackward(optimizer)]
        # A benchmark must not fall back to eager calls unnoticed.
        if contender.scopes is not None:
            config = GraphConfig(
                contender.scopes,
                warmup_steps=WARMUP_STEPS,
                on_mismatch="error",
                audit_every=contender.audit_every,
            )
            self.graphs = graph(model, config)
        if contender.full_iteration:
            within = contender.optimizer_in_graph
            self.full_iteration = FullIteration(
                self.whole_step if within else self.microbatches_of_step,
                model=model,
                optimizer=optimizer if within else None,
                state=state,
                warmup_steps=WARMUP_STEPS,
                audit_every=contender.audit_every,
            )
        self.forward = model
        if contender.compiled:
            self.forward = torch.compile(model, mode="reduce-overhead")
        self._batches = batches
        self._next = 0

    def forward_backward(self, batch: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def microbatches_of_step(self, batches: Sequence[Tensor]) -> Tensor:
        """Forward and backward of all batches of a step. Returns the last loss."""
        with unchanged_weights() if len(batches) > 1 else contextlib.nullcontext():
            for batch in batches:
                loss = self.forward_backward(batch)
        return loss

    def whole_step(self, batches: Sequence[Tensor]) -> Tensor:
        loss = self.microbatches_of_step(batches)
        self.update()
        return loss

    def step(self) -> Tensor:
        """Forward, loss, backward, optimizer. Returns the last loss; does not synchronise."""
        if self.contender.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        batches = [self._batch() for _ in range(self.microbatches)]
        if self.full_iteration is not None:
            loss = self.full_iteration(batches)
        else:
            with self.graphs.step() if self.graphs is not None else contextlib.nullcontext():
                loss = self.microbatches_of_step(batches)
        if not self.contender.optimizer_in_graph:
            self.update()
        return loss

    def _batch(self) -> Tensor:
        """The next batch."""
        self._next += 1
        return self._batches[(self._next - 1) % len(self._batches)]

    def warm_up(self) -> None:
        """Run steps until graphs are captured and every path has run twice."""
        for _ in range(WARMUP_STEPS + 2):
            self.step()
        synchronize(self.device)

    def report(self) -> Report | FullIterationReport | None:
        engine = self.full_iteration or self.graphs
        return engine.report() if engine is not None else None

    def release(self) -> None:
        """Gives the memory back; the run is of no use afterwards."""
        for engine in (self.graphs, self.full_iteration):
            if engine is not None:
                engine.release()
        device, compiled = self.device, self.contender.compiled
        vars(self).clear()
        if compiled:
            torch.compiler.reset()
        free_memory(device)


class LanguageRun(Run):
    """Random tokens through a language model in the setting's dtype."""

    def __init__(
        self, setting: Setting, contender: Contender, dispatcher: str, device: torch.device
    ) -> None:
        torch.manual_seed(setting.seed)
        config = in_precision(setting.config, contender.precision)
        model = LanguageModel(
            config, make_dispatcher(dispatcher), device=device, dtype=setting.dtype
        )
        shape = (BATCHES, setting.batch_size, setting.config.max_sequence_length + 1)
        options = {"state_dtype": contender.state_dtype} if contender.state_dtype else {}
        rate = learning_rate(setting.routing)
        optimizer = adamw(model, contender.our_adamw, rate, **options)
        tokens = torch.randint(setting.config.vocab_size, shape, device=device)
        if setting.routing != "untrained":
            route_by_embeddings(model, setting.routing)
        load = fullest(model, tokens[0, :, :-1])
        super().__init__(contender, model, optimizer, tokens, microbatches=setting.microbatches)
        self.load = load

    def forward_backward(self, batch: Tensor) -> Tensor:
        output = self.forward(batch[:, :-1], batch[:, 1:])
        loss = output.loss + output.aux_loss
        loss.backward()
        return loss.detach()


def in_precision(config: TransformerConfig, precision: Precision) -> TransformerConfig:
    """The configuration with experts and the projections of all layers in a precision."""
    if precision == "weights":
        return config
    moe = replace(config.moe, precision=precision) if config.moe is not None else None
    return replace(config, moe=moe, precision=(precision,) * config.num_layers)


@torch.no_grad()
def route_by_embeddings(model: LanguageModel, routing: str) -> None:
    """Let routers read columns of the embeddings that layers do not write: choices are even.

    Without that, tokens of an untrained model are alike behind the first layer, and half of the
    experts get none. By Zipf's law, one of the columns is a constant.
    """
    columns, embedding_VD = slice(0, READ), model.embedding.weight
    for layer in model.layers:
        layer.attention.out.weight[columns] = 0
        for router in (each for each in layer.modules() if isinstance(each, TopKRouter)):
            scale = (router.weight.shape[1] / READ) ** 0.5
            router.weight[:, columns] *= scale
            router.weight[:, READ:] = 0
            if routing == "zipf":
                draw = torch.Generator().manual_seed(0)
                ranks_E = torch.randperm(len(router.weight), generator=draw) + 1
                router.weight[:, 0] = -ranks_E.log().to(router.weight) / 3
        for experts in (each for each in layer.modules() if isinstance(each, GroupedExperts)):
            experts.w2[..., columns] = 0
    if routing == "zipf":
        embedding_VD[:, 0] = 3 * embedding_VD[:, 1:].std()


@torch.no_grad()
def fullest(model: nn.Module, tokens_BS: Tensor) -> float | None:
    """The fullest expert's tokens over the mean, in the layer with the most; None if dense."""
    counts: list[Tensor] = []
    routers = [each for each in model.modules() if isinstance(each, TopKRouter)]
    hooks = [
        router.register_forward_hook(lambda *given: counts.append(given[2].tokens_per_expert_E))
        for router in routers
    ]
    if routers:
        model(tokens_BS)
    for hook in hooks:
        hook.remove()
    return max((float(each.max() / each.float().mean()) for each in counts), default=None)


def learning_rate(routing: str) -> float:
    """Zero where choices are even or by Zipf's law: training would change them within ten steps."""
    return 1e-4 if routing == "untrained" else 0.0


def adamw(
    model: nn.Module, ours: bool = False, rate: float = 1e-4, **options: Any
) -> torch.optim.AdamW:
    kind = AdamW if ours else torch.optim.AdamW
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in model.parameters():  # torch's kernel takes DTensors or others at a time
        groups.setdefault(hasattr(parameter, "to_local"), []).append(parameter)
    given = [{"params": parameters} for parameters in groups.values()]
    return kind(given, lr=rate, fused=True, capturable=True, **options)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
