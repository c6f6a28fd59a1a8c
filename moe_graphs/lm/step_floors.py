"""The least that a step of our language model needs, by group, computed from its sizes.

T tokens of a step, D model, K top-k, F ffn.
"""

from __future__ import annotations

import torch
from torch import nn

from moe_graphs.layers import LanguageModel
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.layers.moe import MoELayer, moe_layers
from moe_graphs.layers.norm import RMSNorm
from moe_graphs.lm.optimizers import optimizer_choice
from moe_graphs.lm.options import TrainSettings
from moe_graphs.profiling.floors import Floor, bytes_of


def step_floors(
    model: LanguageModel, settings: TrainSettings, *, compute_dtype: torch.dtype, local: bool
) -> dict[str, Floor]:
    """Floors by group of ``kernel_groups``; groups whose least is not known are left out.

    A matrix product is counted once forward and twice backward. Attention is counted as half of the
    square, without computing anything again. Bytes are those of a kernel that reads its inputs and
    writes its results once; weights are read once per microbatch.

    Args:
        compute_dtype: dtype of matrix products and of their results; parameters and the residual
            stream keep their own dtype.
        local: whether all rows stay on this rank, so that the work of permuting them is known, too.
    """
    T, config = settings.tokens_per_step, model.config
    own, computed = model.head.weight.element_size(), compute_dtype.itemsize
    # A weight is read twice and its gradient is written.
    per_weight = settings.microbatches * (2 * computed + own)
    experts = moe_layers(model)
    of_experts = {id(p) for moe in experts for p in moe.experts.parameters()}
    dense = sum(
        p.numel()
        for p in model.parameters()
        if p.ndim >= 2 and id(p) not in of_experts and p is not model.embedding.weight
    )
    square = config.num_layers * config.num_heads * (config.head_size + config.value_head_size)
    floors = {
        "dense GEMM": Floor(6.0 * dense * T, dense * per_weight),
        "attention": Floor(3.0 * square * settings.sequence_length * T),
        "norms": Floor(bytes=_norm_bytes(model, T, own, computed)),
        "swiglu": Floor(bytes=8.0 * computed * _swiglu_columns(model, T)),
        # Logits are read forward, read again backward, and their gradient is written.
        "cross entropy": Floor(bytes=3.0 * T * config.vocab_size * computed),
    }
    passes = optimizer_choice(settings.optimizer).passes
    if passes is not None:
        trained = (p for p in model.parameters() if p.requires_grad)
        floors["optimizer"] = Floor(bytes=passes * bytes_of(trained))
    if experts:
        floors["grouped GEMM"] = _grouped(experts, T, per_weight)
    if experts and local:
        # Tokens go to rows and rows to tokens, forward and backward. Rows are read once more for
        # the gradient of their weights.
        rows = 4 * T + 5 * T * experts[0].config.top_k
        floors["permute"] = Floor(bytes=len(experts) * computed * config.hidden_size * rows)
    return floors


def _grouped(experts: list[MoELayer], tokens: int, per_weight: int) -> Floor:
    flops = moved = 0.0
    for moe in experts:
        weights = sum(p.numel() for p in moe.experts.parameters())
        flops += 6.0 * weights / len(moe.experts.local_experts) * tokens * moe.config.top_k
        moved += weights * per_weight
    return Floor(flops, moved)


def _swiglu_columns(model: nn.Module, tokens: int) -> float:
    """Columns of all SwiGLUs: one reads two numbers and writes one, and backward three and two."""
    total = 0.0
    for module in model.modules():
        if isinstance(module, SwiGLU):
            total += tokens * module.w2.weight.shape[1]
        elif isinstance(module, MoELayer):
            total += tokens * module.config.top_k * module.config.ffn_hidden_size
    return total


def _norm_bytes(model: LanguageModel, tokens: int, own: int, computed: int) -> float:
    """Bytes of the norms of the residual stream; in half of them a sum comes before the norm."""
    alone = 3 * own + 2 * computed  # read x, write y; read dy and x, write dx
    summed = 5 * own + 3 * computed  # also the sum, what is added, and the sum's gradient
    layers = model.config.num_layers
    assert isinstance(model.norm, RMSNorm)
    return float(tokens * model.config.hidden_size * ((layers + 1) * alone + layers * summed))
