"""PEFT's LoRA on experts (``target_parameters``): factors multiply rows, no summed weight is made.

PEFT adds ``B @ A`` to the weights of all experts at every forward, and keeps the sum for the
backward. Experts of ``swap_moe_layers`` multiply their rows by the factors instead, with PEFT's own
modules and parameters: names, files, adapters and their switches stay PEFT's.

Rounding: the factors are rounded to the dtype of the experts, as by PEFT, and products are summed
in fp32. The scale is multiplied into one factor before that is rounded.

Source: ``ParamWrapper`` in ``peft/tuners/lora/layer.py`` (0.18 and 0.21). Shapes: E experts, M and
N the dimensions of a parameter ``[E, M, N]``, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moe_graphs.engine.guards.introspection import is_intercepted
from moe_graphs.kernels.routed_experts.lora import LoRA

SUMMED = "PEFT adds its factors to the weights of all experts at every forward"


def wrappers_around(experts: Any) -> list[Any]:
    """PEFT's wrappers of parameters around a module, the outermost first."""
    found = []
    while type(experts).__name__ == "ParamWrapper" and type(experts).__module__.startswith("peft."):
        found.append(experts)
        experts = experts.base_layer
    return found


def innermost(experts: Any) -> Any:
    """The module within PEFT's wrappers."""
    wrappers = wrappers_around(experts)
    return wrappers[-1].base_layer if wrappers else experts


def why_summed(experts: nn.Module) -> str | None:
    """The reason why PEFT's own forward has to run; None if ``lora_of`` has all that it does."""
    wrappers = wrappers_around(experts)
    if not wrappers:
        return None
    base = wrappers[-1].base_layer
    for module in (*wrappers, base):
        if is_intercepted(module):
            return "there are hooks or a forward on experts with LoRA"
    for wrapper in wrappers:
        weight = getattr(base, wrapper.parameter_name, None)  # none, or no parameter, in few bits
        is_trained = weight is not None and weight.requires_grad
        if wrapper.disable_adapters:
            if wrapper.merged:
                return "merged LoRA on experts is disabled"
        elif not wrapper.merged and is_trained and torch.is_grad_enabled():
            return "experts with LoRA require gradients themselves"
        if wrapper.num_experts == 1:
            return "there is LoRA on one expert"
    return None


def lora_of(experts: nn.Module) -> dict[str, LoRA]:
    """The factors that are added to each parameter now, by its name and in its layout."""
    found = {}
    for wrapper in wrappers_around(experts):
        if wrapper.disable_adapters or wrapper.merged:
            continue
        pairs = [
            _factors(wrapper, each) for each in wrapper.active_adapters if each in wrapper.lora_A
        ]
        if len(pairs) == 1:
            found[wrapper.parameter_name] = pairs[0]
        elif pairs:
            lefts, rights = ([pair.a_EMr for pair in pairs], [p.b_ErN * p.scale for p in pairs])
            found[wrapper.parameter_name] = LoRA(torch.cat(lefts, 2), torch.cat(rights, 1))
    return found


def beside_products(
    lora: Mapping[str, LoRA], *, is_transposed: bool
) -> tuple[LoRA | None, LoRA | None]:
    """The factors of both products of experts, from those in the layout of their parameters.

    Args:
        is_transposed: whether the parameters are ``[E, in, out]``, as the products read them, and
            not ``[E, out, in]``.
    """
    found = (lora.get(name) for name in ("gate_up_proj", "down_proj"))
    first, second = (f if f is None or is_transposed else f.transposed() for f in found)
    return first, second


def _factors(wrapper: Any, adapter: str) -> LoRA:
    """``[E, M, r]`` and ``[E, r, N]``, whose scaled product PEFT adds to the parameter."""
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    a_ErX = a.reshape(wrapper.num_experts, -1, a.shape[1])
    b_EYr = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    scale = float(wrapper.scaling[adapter])
    # Before 0.19 PEFT takes the first dimension of a parameter for the input in any layout.
    if getattr(wrapper, "_did_swap_in_out_features", False):
        return LoRA(b_EYr, a_ErX, scale)
    return LoRA(a_ErX.mT, b_EYr.mT, scale)
