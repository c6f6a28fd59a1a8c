"""Hugging Face transformers 5: its experts on our kernels. Extra: ``moe_graphs[hf]``.

    from moe_graphs.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_graphs")

Weights, checkpoints and the rest of the model stay Hugging Face's. Of a model that is there
already: ``model.set_experts_implementation("moe_graphs")``.
"""

from __future__ import annotations

from moe_graphs.integrations.transformers.experts_interface import NAME, experts_forward, register

__all__ = ["NAME", "experts_forward", "register"]
