"""Models laid out as plans say, and what runs a planned step on them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.lm.trainer import autocast_of
from moe_graphs.parallel import (
    ParallelConfig,
    Pipeline,
    make_mesh,
    parallelize,
    pipeline_stages,
)
from moe_graphs.planning.planned_step import PlannedStep

MOE = TransformerConfig(
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    vocab_size=96,
    max_sequence_length=32,
    qk_norm="head",
    moe=MoEConfig(
        num_experts=8, top_k=2, ffn_hidden_size=24, aux_loss_coef=0.01, shared_ffn_hidden_size=16
    ),
    moe_layers=(False, True, True),
)

# Files of a Hugging Face directory.
LLAMA_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Laid:
    """A laid-out model with its step.

    Attributes:
        run: runs a step's forwards and backwards, on the tokens of all microbatches of this rank.
        tokens: shape of these tokens.
    """

    run: Callable[[Tensor], None]
    tokens: tuple[int, int]
    mesh: DeviceMesh | None
    pipeline: Pipeline | None


def laid_out(model: LanguageModel, device: str, layout: ParallelConfig, step: PlannedStep) -> Laid:
    context: Callable[[], Any] = functools.partial(autocast_of, torch.device(device))
    mesh = make_mesh(layout, device) if layout.world_size > 1 else None
    options: dict[str, Any] = {"dispatcher": step.dispatcher} if layout.ep > 1 else {}
    if step.mixed_precision:
        context, options["mixed_precision"] = contextlib.nullcontext, step.policy
    shape = step.sequences, step.sequence_length // layout.cp
    tokens = step.microbatches * shape[0], shape[1]
    if layout.pp > 1:
        of_a_rank = {"stages_per_rank": step.stages_per_rank, "autocast": context}
        of_a_rank["hidden_dtype"] = step.held_dtype
        stages = pipeline_stages(model, layout, mesh, **of_a_rank)
        for stage in stages:
            parallelize(stage, layout, mesh, **options)
        pipeline = Pipeline(
            stages,
            mesh,
            microbatches=step.microbatches,
            microbatch_shape=shape,
            schedule=step.schedule,
        )

        def run_pipeline(tokens_BS: Tensor) -> None:
            pipeline.forward_backward(tokens_BS, tokens_BS)

        return Laid(run_pipeline, tokens, mesh, pipeline)
    if mesh is not None:
        parallelize(model, layout, mesh, **options)

    def run(tokens_BS: Tensor) -> None:
        for part_BS in tokens_BS.chunk(step.microbatches):
            with context():
                output = model(part_BS, part_BS)
            (output.loss + output.aux_loss).backward()

    return Laid(run, tokens, mesh, None)
