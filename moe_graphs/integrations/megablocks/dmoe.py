"""MegaBlocks' ``dMoE`` layers as ``MoELayer`` and back: weights bit by bit, options by their names.

What the other side does not compute is refused. The router rounds differently: MegaBlocks computes
logits and scores in the dtype of the weights, ours are fp32. MegaBlocks' losses are collected in
globals (``batched_load_balancing_loss``, ``batched_router_zloss``), ours are in the output; the
coefficients are converted so that their sum over all layers is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moe_graphs.integrations.megablocks.glu_weights import load_stacked, stacked
from moe_graphs.integrations.megablocks.library import import_megablocks, swiglu_arguments
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.layers.model_config import MoEConfig
from moe_graphs.layers.moe import MoELayer


def from_megablocks(layer: nn.Module, experts: str = "moe_graphs") -> MoELayer:
    """A ``MoELayer`` with the weights of a ``megablocks.dMoE``, on its device and in its dtype.

    Args:
        experts: whose kernels it runs on, see ``MoEConfig``.

    Raises:
        ValueError: ``layer`` is no dMoE, or computes something else; says what.
    """
    theirs: Any = layer
    arguments, mlp = _read(theirs)
    _refuse(_not_ours(theirs, arguments), "MoELayer does not compute it")
    config = MoEConfig(
        num_experts=arguments.moe_num_experts,
        top_k=arguments.moe_top_k,
        ffn_hidden_size=arguments.ffn_hidden_size,
        normalize_top_k=bool(arguments.moe_normalize_expert_weights),
        input_jitter=arguments.moe_jitter_eps or 0.0,
        aux_loss_coef=arguments.moe_loss_weight / arguments.num_layers,
        z_loss_coef=arguments.moe_zloss_weight,
        shared_ffn_hidden_size=arguments.shared_expert_hidden_size if theirs.shared_expert else 0,
        experts=experts,
    )
    weight = mlp.w1
    with _same_random_numbers(weight.device):
        made = MoELayer(config, arguments.hidden_size, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        made.router.weight.copy_(theirs.router.layer.weight)
        made.experts.load_stacked_weights(*stacked(mlp, config.num_experts))
        if made.shared_expert is not None:
            shared = theirs.shared_expert
            gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
            made.shared_expert.w1.weight.copy_(gate_up)
            made.shared_expert.w2.weight.copy_(shared.down_proj.weight)
    return made.train(layer.training)


def to_megablocks(layer: MoELayer) -> Any:
    """A ``megablocks.dMoE`` (``mlp_impl="grouped"``) with the weights of ``layer``.

    Its output is the tensor alone: no bias, and losses where MegaBlocks collects them.

    Raises:
        ValueError: dMoE does not compute what ``layer`` does; says what.
        ImportError: megablocks is not installed.
    """
    _refuse(_not_theirs(layer), "megablocks' dMoE does not compute it")
    config, weight = layer.config, layer.router.weight
    w1_eD2F, w2_eFD = layer.experts.stacked_weights()
    library = import_megablocks("to_megablocks")
    arguments = swiglu_arguments(
        library,
        hidden_size=weight.shape[1],
        ffn_hidden_size=config.ffn_hidden_size,
        moe_num_experts=config.num_experts,
        moe_top_k=config.top_k,
        moe_normalize_expert_weights=1 if config.normalize_top_k else None,
        moe_jitter_eps=config.input_jitter or None,
        moe_loss_weight=config.aux_loss_coef,
        moe_lbl_in_fp32=True,
        moe_zloss_weight=config.z_loss_coef,
        moe_zloss_in_fp32=True,
        shared_expert=layer.shared_expert is not None,
        shared_expert_hidden_size=config.shared_ffn_hidden_size or None,
        fc_kwargs={"dtype": w1_eD2F.dtype},
        device=weight.device,
        dtype=w1_eD2F.dtype,
    )
    with _same_random_numbers(weight.device):
        made = library.dMoE(arguments)
    with torch.no_grad():
        made.router.layer.weight.copy_(weight)
        load_stacked(made.experts.mlp, config.num_experts, w1_eD2F, w2_eFD)
        if layer.shared_expert is not None:
            _load_shared(made.shared_expert, layer.shared_expert)
    return made.train(layer.training)


def _read(layer: Any) -> tuple[Any, Any]:
    """MegaBlocks' arguments and its expert network."""
    mlp = getattr(getattr(layer, "experts", None), "mlp", None)
    if not (hasattr(mlp, "v1") and hasattr(getattr(layer, "router", None), "layer")):
        raise ValueError(
            f"{type(layer).__name__} is no megablocks.dMoE with mlp_type='glu': MoE drops tokens "
            f"above a capacity, and experts without a gate are no SwiGLU"
        )
    return layer.experts.args, mlp


def _not_ours(layer: Any, arguments: Any) -> str | None:
    """Names what MoELayer does not compute, by the name of the argument that asks for it."""
    activation = arguments.activation_fn
    norm = arguments.moe_normalize_expert_weights
    dtypes = {parameter.dtype for parameter in layer.parameters()}
    shared = layer.shared_expert
    wrong = {
        "bias=True": arguments.bias,
        f"activation_fn={activation} (silu)": not (
            activation is functional.silu or isinstance(activation, nn.SiLU)
        ),
        f"moe_normalize_expert_weights={norm} (None or 1)": norm not in (None, 0, 1),
        "uniform_expert_assignment=True": arguments.uniform_expert_assignment,
        "moe_expert_model_parallelism=True": arguments.moe_expert_model_parallelism,
        f"moe_jitter_eps={arguments.moe_jitter_eps} (below 1)": (
            not 0 <= (arguments.moe_jitter_eps or 0) < 1
        ),
        f"parameters in {sorted(map(str, dtypes))} (one dtype)": len(dtypes) > 1,
    }
    if shared is not None:
        wrong["shared_expert_weighted_sum=True"] = arguments.shared_expert_weighted_sum
        wrong[f"fc_cls={arguments.fc_cls} (torch.nn.Linear)"] = (
            type(shared.up_proj) is not nn.Linear
        )
    return next((name for name, is_wrong in wrong.items() if is_wrong), None)


def _not_theirs(layer: MoELayer) -> str | None:
    config = layer.config
    wrong = {
        f"score_function={config.score_function!r}": config.score_function != "softmax",
        f"num_groups={config.num_groups}": config.num_groups is not None,
        f"scaling_factor={config.scaling_factor}": config.scaling_factor != 1,
        "expert_bias=True": config.expert_bias,
        "shared_gate=True": config.shared_gate,
        f"dispatcher={layer.dispatcher.name!r} ('local')": layer.dispatcher.name != "local",
    }
    return next((name for name, is_wrong in wrong.items() if is_wrong), None)


def _refuse(found: str | None, why: str) -> None:
    if found is not None:
        raise ValueError(f"{found}: {why}")


def _load_shared(theirs: Any, ours: SwiGLU) -> None:
    gate, up = ours.w1.weight.chunk(2)
    theirs.gate_proj.weight.copy_(gate)
    theirs.up_proj.weight.copy_(up)
    theirs.down_proj.weight.copy_(ours.w2.weight)


def _same_random_numbers(device: torch.device) -> Any:
    """A context from which the program's random numbers go on as before it."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
