"""Directories of transformers' tiny models, and the same model as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from hf_families import tiny, tokens
from moe_graphs.layers import LanguageModel

transformers.utils.logging.disable_progress_bar()
YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, beta_fast=32, beta_slow=1)
YARN |= dict(mscale=1.0, mscale_all_dim=0.7, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0)
LLAMA3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=32)
# Family and what its configuration differs in, by a name for the test.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3.1": ("llama", dict(rope_parameters=LLAMA3)),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", dict(norm_topk_prob=True)),
    "qwen3_moe-dense": ("qwen3_moe", dict(mlp_only_layers=[0])),
    "olmoe": ("olmoe", {}),
    "deepseek_v3": (
        "deepseek_v3",
        dict(first_k_dense_replace=1, n_group=4, topk_group=2, rope_parameters=YARN),
    ),
    "deepseek_v3-plain": ("deepseek_v3", dict(q_lora_rank=None, rope_interleave=False)),
}
FAMILIES = ["llama", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3"]


def theirs(case: str) -> nn.Module:
    """Make a model of transformers, in evaluation mode.

    Norms differ from one and scores from one another, so that exchanged weights show.
    """
    family, options = CASES[case]
    model = tiny(family, None, **options).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() > 1:
                tensor.mul_(6.0)
            elif "inv_freq" not in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.2)
    return model


def saved(case: str, directory: Path, **options: Any) -> tuple[Path, nn.Module]:
    """The directory that transformers writes, and its model."""
    model = theirs(case)
    model.save_pretrained(directory, **options)
    return directory, model


def logits(model: nn.Module) -> torch.Tensor:
    """Logits of ours or of transformers' model."""
    with torch.no_grad():
        output = model(tokens())
    return output.logits_BSV if isinstance(model, LanguageModel) else output.logits


def loss(model: nn.Module) -> torch.Tensor:
    output = model(tokens())
    found = output.logits_BSV if isinstance(model, LanguageModel) else output.logits
    return functional.cross_entropy(found[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return ((a - b).abs().max() / b.abs().max()).item()
