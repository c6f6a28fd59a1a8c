"""Time, host time, GPU idle share and memory of a training step, eager and as one graph.

    python benchmarks/full_iteration.py --compile --out benchmarks/results/full_iteration_h200.jsonl

Six models: the two of `partial_graphs.py`, the dense one of `examples/full_iteration_llama.py` and
the UNet of `examples/diffusion_lightning.py`, and the GPU-bound one with experts that are chosen
evenly and by Zipf's law (`load` is the fullest expert's over the mean; AdamW's rate is zero there,
so that training does not change it). For each eager, its scopes, forward and backward as one graph,
the same with the optimizer (torch's fused AdamW, and ours), the GPU-bound ones with experts and all
projections in FP8, and `torch.compile(mode="reduce-overhead")`. `README.md` beside this says how it
measures and what the columns mean.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

import phases
from contenders import EAGER, Contender, Setting, gpu_bound, launch_bound
from denoiser import DenoiserSetting
from moe_graphs.layers import TransformerConfig
from partial_graphs import show

FULL = Contender("full iteration", full_iteration=True)
FULL_OPTIMIZER = Contender(
    "full iteration, optimizer", full_iteration=True, optimizer_in_graph=True
)
OUR_ADAMW = replace(FULL_OPTIMIZER, name="full iteration, our AdamW", our_adamw=True)
OF_8_BITS = replace(
    OUR_ADAMW, name="full iteration, our AdamW, 8-bit states", state_dtype=torch.uint8
)
IN_FP8 = replace(OUR_ADAMW, name="full iteration, our AdamW, FP8", precision="fp8")
IN_FP8_AND_8_BITS = replace(
    OF_8_BITS, name="full iteration, our AdamW, FP8, 8-bit states", precision="fp8"
)
IN_FP8_ROWS = replace(
    IN_FP8, name="full iteration, our AdamW, FP8 but gradients of weights", precision="fp8_rows"
)
COMPILED = Contender("torch.compile", compiled=True)
SCOPES = {
    "launch_bound": "attn,moe",
    "gpu_bound": "attn,moe",
    "gpu_bound_even": "attn,moe",
    "gpu_bound_zipf": "attn,moe",
    "llama": "attn,mlp",
    "diffusion": "down.*,middle*,up.*",
}


def llama() -> Setting:
    """The example's model, on its two microbatches at once."""
    config = TransformerConfig(
        hidden_size=512,
        num_layers=12,
        num_heads=8,
        num_kv_heads=2,
        ffn_hidden_size=1408,
        vocab_size=256,
        max_sequence_length=256,
    )
    return Setting("llama", config, 8, torch.bfloat16, rounds=7, steps=20)


def settings() -> dict[str, Setting | DenoiserSetting]:
    """Settings by name, with half of the GPU-bound model's tokens.

    Whole steps hold all activations between replays, and five contenders have to fit beside each
    other.
    """
    smaller = replace(gpu_bound(), batch_size=2)
    routed = [replace(smaller, name=f"gpu_bound_{r}", routing=r) for r in ("even", "zipf")]
    return {s.name: s for s in (launch_bound(), llama(), DenoiserSetting(), smaller, *routed)}


def contenders(model: str, compiled: bool) -> list[Contender]:
    scopes = Contender(SCOPES[model], SCOPES[model])
    whole = [FULL, FULL_OPTIMIZER, OUR_ADAMW, *([OF_8_BITS] if "_bound" in model else [])]
    fp8 = [IN_FP8, IN_FP8_ROWS, IN_FP8_AND_8_BITS] if model.startswith("gpu_bound") else []
    return [EAGER, scopes, *whole, *fp8, *([COMPILED] if compiled else [])]


def main(arguments: list[str] | None = None) -> None:
    known = settings()
    made = phases.parser(__doc__.splitlines()[0], list(known))
    options = phases.parse(made, list(known), arguments)
    plan = [(known[m], contenders(m, options.compile)) for m in options.models.split(",")]
    benchmark = phases.Benchmark("full_iteration", plan, options, phases.console_for(options))
    show(benchmark.run(), benchmark)


if __name__ == "__main__":
    sys.exit(main())
