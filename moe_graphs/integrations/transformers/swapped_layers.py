"""Whole MoE blocks of a transformers model, router to shared expert, on our stages.

Blocks are found by a table of the classes whose modeling files were read (transformers 5.17 and
5.23), and each kind is tried against transformers' own before it is replaced.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from moe_graphs.engine.guards.introspection import hooks_of
from moe_graphs.integrations.peft import SUMMED, innermost, why_summed, wrappers_around
from moe_graphs.integrations.transformers.changes import Change, Changes
from moe_graphs.integrations.transformers.experts_interface import is_swiglu
from moe_graphs.integrations.transformers.packing import dense_stand_in, packing_of
from moe_graphs.integrations.transformers.swapped_block import (
    BIAS,
    ROUTERS,
    SHARED,
    SHARED_GATE,
    SwappedMoE,
    jitter_of,
    settings_of,
)
from moe_graphs.integrations.transformers.tried_block import why_it_differs
from moe_graphs.layers import MoEConfig
from moe_graphs.layers.expert_layouts import NAMES

# Whether scores are sigmoids, and whether they are normalised where the router does not say.
_SOFTMAX, _SOFTMAX_AS_IT_IS, _SIGMOID = (False, True), (False, False), (True, True)
_KINDS = {
    "MixtralSparseMoeBlock": _SOFTMAX,
    "MiniMaxSparseMoeBlock": _SOFTMAX,
    "OlmoeSparseMoeBlock": _SOFTMAX,
    "FlexOlmoSparseMoeBlock": _SOFTMAX,
    "Qwen2MoeSparseMoeBlock": _SOFTMAX,
    "Qwen3MoeSparseMoeBlock": _SOFTMAX,
    "Qwen3NextSparseMoeBlock": _SOFTMAX,
    "Qwen3_5MoeSparseMoeBlock": _SOFTMAX,
    "Qwen3VLMoeTextSparseMoeBlock": _SOFTMAX,
    "Qwen3OmniMoeThinkerTextSparseMoeBlock": _SOFTMAX,
    "Qwen3OmniMoeTalkerTextSparseMoeBlock": _SOFTMAX,
    "MellumSparseMoeBlock": _SOFTMAX,
    "GraniteMoeMoE": _SOFTMAX,
    "GraniteMoeSharedMoE": _SOFTMAX,
    "GraniteMoeHybridMoE": _SOFTMAX,
    "Mistral4MoE": _SOFTMAX,
    "DeepseekV2Moe": _SOFTMAX_AS_IT_IS,
    "DeepseekV3MoE": _SIGMOID,
    "DeepseekV32MoE": _SIGMOID,
    "BailingHybridMoE": _SIGMOID,
    "Dots1MoE": _SIGMOID,
    "ExaoneMoeSparseMoEBlock": _SIGMOID,
    "Glm4MoeMoE": _SIGMOID,
    "Glm4MoeLiteMoE": _SIGMOID,
    "Glm4vMoeTextMoE": _SIGMOID,
    "GlmMoeDsaMoE": _SIGMOID,
    "KimiLinearMoE": _SIGMOID,
    "MiMoV2FlashMoE": _SIGMOID,
    "MiniMaxM2SparseMoeBlock": _SIGMOID,
    "SolarOpenMoE": _SIGMOID,
}
_PARTS = {*ROUTERS, *SHARED, SHARED_GATE, "experts"}


def swap_moe_layers(model: nn.Module) -> Changes:
    """Replaces the MoE blocks of a transformers model by ``Staged`` ones on our kernels, in place.

    Parameters, buffers, their names and so checkpoints stay: an optimizer may be made before or
    after. Weights have to be there: ``model.init_weights()`` does not know the new experts' class.
    The scopes ``moe_router``, ``moe_preprocess`` and ``moe`` of ``moe_graphs.graph`` work
    within the model then. Routers compute in fp32, whatever the dtype of the model; the shared
    expert stays transformers' module. Losses come from the model as before: with
    ``output_router_logits=True`` its router runs beside ours, and scopes that contain the router
    are an error then.

    A block is replaced if its class is among those that we have read, its parts and settings are
    those that we compute, and a copy of it, with random weights on the CPU in fp32, has the same
    outputs and gradients as ours to 1e-5. Sharded and quantised weights are left: swap before
    ``fully_shard``.

    Returns:
        What was replaced, and what was left and why; ``print`` it. ``undo()`` puts the blocks
        back, with the weights of now.
    """
    done = Changes(model)
    places = _places(model)
    outcomes: dict[tuple[str, str | None], list[nn.Module]] = {}
    tried: dict[Any, str | None] = {}
    for block in places:
        outcome = type(block).__name__, _reason_to_leave(block, tried)
        outcomes.setdefault(outcome, []).append(block)
    for (kind, reason), blocks in outcomes.items():
        if reason is not None:
            done.left("moe", kind, len(blocks), reason)
            continue
        swaps = [_swap(block, places[block]) for block in blocks]
        for swap in swaps:
            swap.do()
        note = "our stages, choice of experts and grouped GEMMs"
        done.changed("moe", kind, len(blocks), note, functools.partial(_undo, swaps))
        swapped = [swap.swapped for swap in swaps]
        done.watch(functools.partial(_own_choices, kind, swapped))
        done.watch(functools.partial(_summed_weights, kind, swapped))
    if not outcomes:
        done.left("moe", "none", 0, "the model has no blocks with experts")
    return done


@dataclass(frozen=True)
class _Swap:
    """A block and its replacement.

    Attributes:
        places: each parent that has the block, and its name there.
        experts: the block's own experts, within PEFT's wrappers if there are some.
    """

    block: Any
    swapped: SwappedMoE
    places: list[tuple[nn.Module, str]]
    experts: Any

    def do(self) -> None:
        wrappers = wrappers_around(self.block.experts)
        if wrappers:  # PEFT's stay, around ours
            wrappers[-1].base_layer = self.swapped.experts
            self.swapped.experts = self.block.experts
        for parent, name in self.places:
            setattr(parent, name, self.swapped)

    def undo(self) -> None:
        """Puts the block back with the tensors of now, which ``model.to()`` may have replaced."""
        block, swapped, experts = self.block, self.swapped, self.experts
        block._buffers.update(swapped._buffers)
        ours, wrappers = innermost(swapped.experts), wrappers_around(swapped.experts)
        experts._parameters.update(ours._parameters)
        experts.training = ours.training
        block._modules.update(swapped._modules)  # parts may have been wrapped since
        if wrappers:
            wrappers[-1].base_layer = experts
        else:
            block.experts = experts
        block.training = swapped.training
        for parent, name in self.places:
            setattr(parent, name, block)


def _own_choices(kind: str, blocks: list[SwappedMoE]) -> list[Change]:
    """Blocks whose routers were changed since."""
    reasons = Counter(reason for block in blocks if (reason := block.why_own()) is not None)
    note = "its own forward chooses experts"
    return [Change("moe", kind, n, False, f"{reason}: {note}") for reason, n in reasons.items()]


def _summed_weights(kind: str, blocks: list[SwappedMoE]) -> list[Change]:
    """Blocks whose LoRA on experts is computed by PEFT."""
    found = Counter(reason for block in blocks if (reason := why_summed(block.experts)) is not None)
    return [Change("moe", kind, n, False, f"{reason}: {SUMMED}") for reason, n in found.items()]


def _swap(block: Any, places: list[tuple[nn.Module, str]]) -> _Swap:
    bare = _without_wrappers(block)
    config = _config(_with_dense_experts(bare))
    return _Swap(block, SwappedMoE(bare, config), places, bare.experts)


def _without_wrappers(block: Any) -> Any:
    """The block, or a shallow copy of it whose experts have no wrappers of PEFT around them."""
    return _with_experts(block, innermost(block.experts))


def _with_dense_experts(block: Any) -> Any:
    """The block, or a shallow copy of it whose experts in few bits have stand-ins on no device."""
    packed = packing_of(block.experts) is not None
    return _with_experts(block, dense_stand_in(block.experts)) if packed else block


def _with_experts(block: Any, experts: nn.Module) -> Any:
    if experts is block.experts:
        return block
    bare = copy.copy(block)
    bare.__dict__["_modules"] = block._modules | {"experts": experts}
    return bare


def _undo(swaps: list[_Swap]) -> None:
    for swap in swaps:
        swap.undo()


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(getattr(child, "experts", None), nn.Module):
                found.setdefault(child, []).append((parent, name))
    return found


def _reason_to_leave(block: Any, tried: dict[Any, str | None]) -> str | None:
    """``tried``: what came out for blocks that differ in nothing but the values of weights."""
    if isinstance(block, SwappedMoE):
        return "are ours already"
    block = _without_wrappers(block)
    if type(block).__name__ not in _KINDS:
        part = _unknown_part(block)
        return f"its class is not one that we have read: {part}{_conversion(block)}"
    if type(block.experts).__name__ == "FP8Experts":
        return "its experts are FP8Experts"
    reason = _other_parts(block)
    if reason is None:  # what runs before experts in few bits is looked at as it is
        block = _with_dense_experts(block)
        reason = _other_experts(block.experts) or _other_weights(block)
    if reason is not None:
        return reason
    try:
        config = _config(block)
    except (AttributeError, ValueError) as error:
        return str(error)
    settings = [(name, type(module), settings_of(module)) for name, module in block.named_modules()]
    shapes = [p.shape for p in block.parameters()]
    kind = repr((config, settings, shapes))
    if kind not in tried:
        tried[kind] = why_it_differs(block, config)
    return tried[kind]


def _config(block: Any) -> MoEConfig:
    """Read off the router, which is what computes; a model's configuration may say other things."""
    sigmoid, normalize = _KINDS[type(block).__name__]
    router = _router(block)
    groups = getattr(router, "num_group", None) or 1
    return MoEConfig(
        num_experts=router.weight.shape[0],
        top_k=router.top_k,
        ffn_hidden_size=block.experts.down_proj.shape[2],
        score_function="sigmoid" if sigmoid else "softmax",
        normalize_top_k=getattr(router, "norm_topk_prob", normalize),
        num_groups=groups if groups > 1 else None,
        top_k_groups=router.topk_group if groups > 1 else None,
        scaling_factor=getattr(router, "routed_scaling_factor", 1.0),
        expert_bias=BIAS in {*router._buffers, *block._buffers},
    )


def _unknown_part(block: Any) -> str:
    """Names the part of a block of another class that is not ours, as far as one can see."""
    if not any(hasattr(block, name) for name in ROUTERS):
        names = ", ".join(name for name, _ in block.named_children())
        return f"it has {names}, and no router named {' or '.join(ROUTERS)}"
    router = _router(block)
    if not _has_weight(router):
        return f"its router ({type(router).__name__}) has no weight of its own"
    reason = _other_experts(block.experts) or _other_parts(block)
    return reason or f"its router ({type(router).__name__})"


def _conversion(block: Any) -> str:
    """Names the call that makes a layer of ours from a block, if its experts are SwiGLU."""
    experts, router = block.experts, next((n for n in ROUTERS if hasattr(block, n)), None)
    if isinstance(experts, nn.ModuleList):
        one = experts[0] if len(experts) else None
        fits = any(all(hasattr(one, name) for name in names) for names in NAMES)
    else:
        fits = _other_experts(experts) is None
    if router is None or not fits or not _has_weight(getattr(block, router)):
        return ""
    shared = any(hasattr(block, name) for name in SHARED)
    return (
        f". If its router takes the best of a softmax or of sigmoids, MoELayer.from_experts("
        f"block.experts, block.{router}, top_k=...) makes a layer of its weights"
        f"{', without the shared expert' if shared else ''} (docs/own_block.md)"
    )


def _has_weight(router: Any) -> bool:
    return isinstance(getattr(router, "weight", None), nn.Parameter)


def _router(block: Any) -> Any:
    return next(getattr(block, name) for name in ROUTERS if hasattr(block, name))


def _other_parts(block: Any) -> str | None:
    others = {name for name, _ in block.named_children()} - _PARTS
    others |= {name for name, _ in block.named_parameters(recurse=False)}
    others |= {name for name, _ in block.named_buffers(recurse=False)} - {BIAS}
    if others:
        return f"has {', '.join(sorted(others))} besides"
    router = _router(block)
    others = {name for name, _ in router.named_parameters()} - {"weight"}
    others |= {name for name, _ in router.named_buffers()} - {BIAS}
    if others:
        return f"its router has {', '.join(sorted(others))} besides"
    name = jitter_of(block) or jitter_of(router)
    if name is not None:
        return f"{name} is not zero, and the noise is not ours"
    parts = {"it": block, "its router": router, "its experts": block.experts}
    for name, module in parts.items():
        before, after, *backward = hooks_of(module)
        bypassed = before or any(backward) or (after and module is not router)
        if bypassed or "forward" in vars(module):
            return f"ours would not run the hooks or the forward set on {name}"
    return None


def _other_experts(experts: Any) -> str | None:
    if not hasattr(type(experts), "_apply_gate"):
        return "its experts are none of transformers' interface"
    if experts.has_bias:
        return "its experts have biases"
    if experts.is_transposed or not experts.is_concatenated:
        return "its experts' weights lie in memory in another way"
    if not is_swiglu(experts):
        name = type(getattr(experts, "act_fn", None)).__name__
        own_gate = name == "NoneType" or name.startswith("SiLU")
        return f"its experts are no SwiGLU: {'a gate of their own' if own_gate else name}"
    if {name for name, _ in experts.named_parameters()} != {"gate_up_proj", "down_proj"}:
        return "its experts have other parameters"
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    return None


def _other_weights(block: Any) -> str | None:
    for weight in (_router(block).weight, *block.experts.parameters()):
        if type(weight) is not nn.Parameter or not weight.is_floating_point():
            return f"a weight is a {type(weight).__name__} of {weight.dtype}"
    return None
