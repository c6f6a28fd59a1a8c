"""PEFT's LoRA on linear layers as one op: rows stay in the dtype of the frozen weight.

PEFT's ``Linear`` modules get a forward of ours. Their names, files, adapters and switches stay
PEFT's. PEFT has to be applied before: modules that come later keep their own forward.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.engine.guards.introspection import is_intercepted
from moe_graphs.errors import GraphWarning
from moe_graphs.integrations.transformers.changes import Change, Changes, makers_of
from moe_graphs.integrations.transformers.decoding import theirs_in_decoding
from moe_graphs.kernels.lora_linear import lora_linear

OWN = "PEFT's own forward casts rows to the dtype of the factors"


def adapt_projections(model: nn.Module, done: Changes) -> None:
    """Lets PEFT's linear layers multiply in the dtype of their weights. ``done`` takes changes."""
    found = _projections(model)
    note = "on linear layers: one op in their dtype"
    done.changed_unless("lora", found, _why_own, _one_op, note, OWN)
    done.watch(functools.partial(_later, model, set(map(id, found))))


def _projections(model: nn.Module) -> list[nn.Module]:
    """PEFT's linear layers but that of the head, whose logits come chunk by chunk."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return [module for module in model.modules() if _is_peft_linear(module) and module is not head]


def _is_peft_linear(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ == "Linear"


def _later(model: nn.Module, known: set[int]) -> list[Change]:
    """Adapters that PEFT has put around linear layers since."""
    since = [m for m in _projections(model) if id(m) not in known and not makers_of(type(m))]
    note = f"apply PEFT before accelerate_model: {OWN}"
    return [Change("lora", "Linear", len(since), False, note)] if since else []


def _why_own(module: Any) -> str | None:
    """The reason why PEFT's own forward has to run for the active adapters, or None."""
    base = module.base_layer
    if type(base) is not nn.Linear or any(each.requires_grad for each in base.parameters()):
        return "the layer within is no frozen nn.Linear"
    if any(type(each) is not nn.Parameter for each in base.parameters()):
        return "weights that are no plain tensors"
    active = _active(module)
    if len(active) > 1 and any(_drops(module, name) for name in active):
        return "several adapters with dropout"
    for name in active:
        a, b = module.lora_A[name], module.lora_B[name]
        if name in module.lora_variant:
            return "DoRA or another variant of LoRA"
        if type(a) is not nn.Linear or type(b) is not nn.Linear or b.bias is not None:
            return "factors that are no plain matrices"
        if any(map(is_intercepted, (base, a, b))):
            return "hooks or a forward on the layer within or on a factor"
    return None


def _active(module: Any) -> list[str]:
    return [name for name in module.active_adapters if name in module.lora_A]


def _drops(module: Any, name: str) -> bool:
    return module.training and not isinstance(module.lora_dropout[name], nn.Identity)


@theirs_in_decoding
def _one_op(kind: type[Any]) -> Any:
    forward = kind.forward

    @functools.wraps(forward)
    def multiplying(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        active = _active(self)
        if args or kwargs or self.disable_adapters or self.merged or not active:
            return forward(self, x, *args, **kwargs)
        base, reason = self.base_layer, _why_own(self)
        if reason is None and not _fits(x, base.weight):
            reason = f"rows are {x.dtype}, the weight is {base.weight.dtype}"
        if reason is not None:
            warnings.warn(f"{reason}: {OWN}", GraphWarning, stacklevel=2)
            return forward(self, x)
        a, b, scale = _factors(self, active)
        dropped = self.lora_dropout[active[0]](x) if _drops(self, active[0]) else None
        return lora_linear(x, base.weight, base.bias, a, b, scale, dropped)

    return multiplying


def _fits(x: Tensor, weight: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type) or x.dtype == weight.dtype


def _factors(module: Any, active: list[str]) -> tuple[Tensor, Tensor, float]:
    """A, B and their scale; those of several adapters side by side, with the scales in B."""
    pairs = [(module.lora_A[n].weight, module.lora_B[n].weight, module.scaling[n]) for n in active]
    if len(pairs) == 1:
        return pairs[0]
    a = torch.cat([a for a, _, _ in pairs])
    return a, torch.cat([b * scale for _, b, scale in pairs], dim=1), 1.0
