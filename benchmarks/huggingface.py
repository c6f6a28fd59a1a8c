"""Time, host time, GPU idle share and memory of a training step of Hugging Face's Qwen3-MoE.

    python benchmarks/huggingface.py --out benchmarks/results/huggingface_h200.jsonl

As it comes (experts by `torch.nn.functional.grouped_mm`), with experts on our kernels, with all
that `accelerate_model` changes, with `moe_graphs.optim.AdamW` besides, and that with its layers as
graphs and as whole steps. Losses of the first steps are those of the model as it comes, to
rounding; graphs change no bit of them (`tests/integrations/`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import phases
from contenders import BATCHES, EAGER, Contender, Run, adamw, learning_rate
from fine_tuning import load_of, route_evenly
from moe_graphs.integrations.transformers import NAME, accelerate_model, register
from partial_graphs import show

EXPERTS = Contender("our experts", experts=NAME)
GRAPHS = Contender("graphs", "model.layers.*")
BOTH = Contender("our experts, graphs", "model.layers.*", experts=NAME)
ALL = Contender("accelerate_model", experts="all")
OURS = dict(experts="all", our_adamw=True)
ALL_ADAMW = Contender("with AdamW", **OURS)
ALL_GRAPHS = Contender("with AdamW, graphs", "model.layers.*", **OURS)
WHOLE = Contender("with AdamW, whole steps", full_iteration=True, optimizer_in_graph=True, **OURS)


@dataclass(frozen=True)
class HuggingFaceSetting:
    """Qwen3-MoE in the sizes of 30B-A3B, if nothing else is said, with a smaller vocabulary."""

    name: str
    batch_size: int
    num_layers: int = 3
    hidden_size: int = 2048
    num_heads: int = 32
    num_experts: int = 128
    top_k: int = 8
    ffn_hidden_size: int = 768
    sequence: int = 4096
    vocab_size: int = 32_768
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 5
    steps: int = 5
    host_steps: int = 2
    seed: int = 0
    routing: str = "untrained"

    @property
    def tokens(self) -> int:
        return self.batch_size * self.sequence

    @property
    def num_kv_heads(self) -> int:
        return max(1, self.num_heads // 8)

    @property
    def head_dim(self) -> int:
        return self.hidden_size * 2 // self.num_heads

    def describe(self) -> str:
        return (
            f"transformers' Qwen3-MoE, {self.num_layers} layers, hidden {self.hidden_size}, "
            f"{self.num_experts} experts of {self.ffn_hidden_size}, top-{self.top_k}, "
            f"{self.tokens:,} tokens, vocabulary {self.vocab_size:,}, bfloat16"
            f"{'' if self.routing == 'untrained' else f', routing {self.routing}'}"
        )

    def run(self, contender: Contender, dispatcher: str, device: torch.device) -> HuggingFaceRun:
        return HuggingFaceRun(self, contender, device)

    def tiny(self, device: torch.device) -> HuggingFaceSetting:
        sizes = dict(num_layers=2, hidden_size=64, num_heads=4, num_experts=8, ffn_hidden_size=64)
        sizes |= dict(batch_size=2, sequence=16, vocab_size=64, top_k=2, rounds=2, steps=2)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return replace(self, dtype=dtype, **sizes)


class HuggingFaceRun(Run):
    """Loss by the model itself, on random tokens."""

    def __init__(
        self, setting: HuggingFaceSetting, contender: Contender, device: torch.device
    ) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        register()
        config = Qwen3MoeConfig(
            hidden_size=setting.hidden_size,
            num_hidden_layers=setting.num_layers,
            num_attention_heads=setting.num_heads,
            num_key_value_heads=setting.num_kv_heads,
            head_dim=setting.head_dim,
            num_experts=setting.num_experts,
            num_experts_per_tok=setting.top_k,
            moe_intermediate_size=setting.ffn_hidden_size,
            vocab_size=setting.vocab_size,
            max_position_embeddings=setting.sequence,
            experts_implementation=NAME if contender.experts == NAME else "grouped_mm",
            dtype=setting.dtype,
            use_cache=False,
        )
        torch.manual_seed(setting.seed)
        with device:
            model = Qwen3MoeForCausalLM(config).to(setting.dtype).train()
        shape = (BATCHES, setting.batch_size, setting.sequence)
        tokens = torch.randint(setting.vocab_size, shape, device=device)
        if setting.routing == "even":
            route_evenly(model)
        load = load_of(model, tokens[0])
        if contender.experts == "all":
            accelerate_model(model, graphs=False, whole_steps=contender.full_iteration)
        optimizer = adamw(model, contender.our_adamw, learning_rate(setting.routing))
        super().__init__(contender, model, optimizer, tokens)
        self.load = load

    def forward_backward(self, batch: Tensor) -> Tensor:
        loss = self.forward(input_ids=batch, labels=batch).loss
        loss.backward()
        return loss.detach()


def settings() -> dict[str, HuggingFaceSetting]:
    small = HuggingFaceSetting(
        "hf_launch_bound",
        batch_size=2,
        num_layers=12,
        hidden_size=1024,
        num_heads=16,
        num_experts=32,
        top_k=4,
        ffn_hidden_size=512,
        sequence=1024,
    )
    large = HuggingFaceSetting("hf_4k", 1), HuggingFaceSetting("hf_16k", 4)
    even = [replace(each, name=f"{each.name}_even", routing="even") for each in large]
    found = small, *large, *even
    return {setting.name: setting for setting in found}


def contenders(setting: HuggingFaceSetting) -> list[Contender]:
    """Contenders; for large models only as many as fit beside each other."""
    small = setting.hidden_size < 2048
    return [EAGER, EXPERTS, *([GRAPHS, BOTH] if small else []), ALL, ALL_ADAMW, ALL_GRAPHS, WHOLE]


def main(arguments: list[str] | None = None) -> None:
    known = settings()
    made = phases.parser(__doc__.splitlines()[0], list(known))
    options = phases.parse(made, list(known), arguments)
    plan = [(known[m], contenders(known[m])) for m in options.models.split(",")]
    benchmark = phases.Benchmark("huggingface", plan, options, phases.console_for(options))
    show(benchmark.run(), benchmark)


if __name__ == "__main__":
    sys.exit(main())
