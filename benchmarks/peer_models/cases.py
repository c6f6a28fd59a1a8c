"""The models that peers train, their tokens, and the weights that all of them start from.

Shapes: N batches, B sequences, S sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contenders import route_by_embeddings
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.layers.architectures import mixtral_8x7b, qwen3_30b_a3b

BATCHES = 64
VOCABULARY = 32_768
ROUTINGS = ("untrained", "even", "zipf")


@dataclass(frozen=True)
class Case:
    """A model without auxiliary losses, its batch, and how often its step is repeated.

    Attributes:
        rounds: each begins with a step that is not timed.
        steps: timed back to back in a round.
        host_steps: of a round, each after a synchronisation.
        trace: whether some steps are profiled in the end.
        routing: of `ROUTINGS`: as the untrained model has it, or by `route_by_embeddings`.
    """

    name: str
    config: TransformerConfig
    batch_size: int
    rounds: int = 4
    steps: int = 8
    host_steps: int = 2
    trace: bool = True
    routing: str = "untrained"

    @property
    def tokens(self) -> int:
        return self.batch_size * self.config.max_sequence_length

    def describe(self) -> str:
        config, moe = self.config, self.config.moe
        assert moe is not None
        routing = "" if self.routing == "untrained" else f", routing {self.routing}"
        return (
            f"{config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads of "
            f"{config.head_size} ({config.kv_heads} kv), {moe.num_experts} experts of "
            f"{moe.ffn_hidden_size}, top-{moe.top_k}, {self.tokens:,} tokens "
            f"({self.batch_size}x{config.max_sequence_length}), vocabulary {config.vocab_size:,}"
            f"{routing}"
        )

    def traced(self, trace: bool) -> Case:
        return replace(self, trace=trace)

    def smoke(self, trace: bool = False) -> Case:
        """Smallest case of the same kind, to find whether a contender starts.

        FP8 by blocks and MegaBlocks' blocks of 128 bound the sizes from below.
        """
        assert self.config.moe is not None
        moe = replace(self.config.moe, num_experts=8, top_k=2, ffn_hidden_size=128)
        config = replace(
            self.config, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
            vocab_size=512, max_sequence_length=128, moe=moe,
        )  # fmt: skip
        few = dict(rounds=1, steps=2, host_steps=1)
        return replace(self, config=config, batch_size=2, trace=trace, **few)

    def batches(self, device: torch.device) -> Tensor:
        """Random tokens [N, B, S + 1], the same for all contenders."""
        generator = torch.Generator().manual_seed(0)
        shape = (BATCHES, self.batch_size, self.config.max_sequence_length + 1)
        return torch.randint(self.config.vocab_size, shape, generator=generator).to(device)


def cases() -> dict[str, Case]:
    launch_bound = TransformerConfig(
        hidden_size=1024, num_layers=12, num_heads=16, num_kv_heads=2, head_dim=128,
        vocab_size=VOCABULARY, max_sequence_length=1024, qk_norm="head", norm_eps=1e-6,
        moe=MoEConfig(num_experts=32, top_k=4, ffn_hidden_size=512),
    )  # fmt: skip
    sizes = dict(vocab_size=VOCABULARY, max_sequence_length=4096)
    qwen3 = _without_losses(qwen3_30b_a3b(num_layers=3, **sizes))
    mixtral = mixtral_8x7b(num_layers=2, vocab_size=32_000, max_sequence_length=4096)
    found = (
        Case("launch_bound", launch_bound, 2),
        Case("qwen3_30b_4k", qwen3, 1),
        Case("qwen3_30b_16k", qwen3, 4, rounds=3, steps=5),
        Case("mixtral", _without_losses(mixtral), 2, rounds=3, steps=5),
    )
    return {case.name: case for case in found}


def initial_model(case: Case, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """A model whose weights are drawn from one seed: every contender copies them.

    Its weights alone decide the routing, so it is the same for all contenders.
    """
    torch.manual_seed(0)
    model = LanguageModel(case.config, device=device, dtype=dtype)
    if case.routing != "untrained":
        route_by_embeddings(model, case.routing)
    return model


def _without_losses(config: TransformerConfig) -> TransformerConfig:
    """Remove the aux losses from a configuration.

    Each library defines the balance in its own way, and MegaBlocks and Megatron leave it out of
    the loss that they return, so no contender computes it here.
    """
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, aux_loss_coef=0.0))
