"""Hugging Face transformers 5 on our kernels and graphs. Extra: ``moe_graphs[hf]``.

All that pays, in one call, for a model and a loop that are there::

    from moe_graphs.integrations.transformers import accelerate_model

    accelerated = accelerate_model(model)
    print(accelerated)
    for batch in batches:
        with accelerated.step():
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

The experts alone::

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_graphs")

Whole MoE blocks, so that the scopes ``moe_router``, ``moe_preprocess`` and ``moe`` can be chosen::

    print(swap_moe_layers(model))
    graphs = moe_graphs.graph(model, GraphConfig("moe_router,moe_preprocess"))

Weights, names and checkpoints stay Hugging Face's.
"""

from __future__ import annotations

from moe_graphs.integrations.transformers.accelerated import (
    Accelerated,
    accelerate_model,
    causal_lm_loss,
)
from moe_graphs.integrations.transformers.changes import Change, Changes
from moe_graphs.integrations.transformers.experts_interface import NAME, experts_forward, register
from moe_graphs.integrations.transformers.graph_callback import GraphCallback
from moe_graphs.integrations.transformers.packed_loading import ExpertsInFewBits
from moe_graphs.integrations.transformers.quantized_experts import (
    QuantizedExperts,
    adaptable_experts,
    quantize_experts,
)
from moe_graphs.integrations.transformers.static_masks import static_batch
from moe_graphs.integrations.transformers.swapped_layers import swap_moe_layers

__all__ = [
    "NAME",
    "Accelerated",
    "Change",
    "Changes",
    "ExpertsInFewBits",
    "GraphCallback",
    "QuantizedExperts",
    "accelerate_model",
    "adaptable_experts",
    "causal_lm_loss",
    "experts_forward",
    "quantize_experts",
    "register",
    "static_batch",
    "swap_moe_layers",
]
