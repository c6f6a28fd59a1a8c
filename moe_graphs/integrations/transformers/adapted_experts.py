"""PEFT's LoRA on experts that stay transformers' modules, such as gpt-oss's.

PEFT's outermost wrapper gets a forward that hands the factors to our experts' function, and no
summed weight is made. PEFT has to be applied before: later wrappers keep their own forward.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import Tensor, nn

from moe_graphs.errors import GraphWarning
from moe_graphs.integrations.peft import SUMMED, innermost, lora_of, why_summed, wrappers_around
from moe_graphs.integrations.transformers.changes import Change, Changes
from moe_graphs.integrations.transformers.experts_interface import (
    NAME,
    experts_with_lora,
    why_no_lora,
)
from moe_graphs.integrations.transformers.packing import packing_of, refuse_summed


def multiply_rows(model: nn.Module, done: Changes) -> None:
    """Lets experts with PEFT's wrappers multiply their rows. ``done`` takes the changes."""
    found = outermost(model)
    note = "on experts: factors multiply the rows"
    done.changed_unless("lora", found, _why_not, multiplying_rows, note, SUMMED)
    done.watch(functools.partial(_later, model, set(map(id, found))))


def _why_not(module: nn.Module) -> str | None:
    return why_no_lora(innermost(module))


def outermost(model: nn.Module) -> list[nn.Module]:
    """The outermost of PEFT's wrappers around each of transformers' experts modules."""
    found, inside = [], set[int]()
    for module in model.modules():
        wrappers = wrappers_around(module)
        is_outermost = bool(wrappers) and id(module) not in inside
        if is_outermost and hasattr(type(innermost(module)), "_apply_gate"):
            found.append(module)
        inside.update(map(id, wrappers))
    return found


def _later(model: nn.Module, known: set[int]) -> list[Change]:
    """Wrappers that PEFT has put around experts since."""
    count = sum(id(module) not in known for module in outermost(model))
    note = f"apply PEFT before accelerate_model: {SUMMED}"
    return [Change("lora", "ParamWrapper", count, False, note)] if count else []


def multiplying_rows(kind: type[Any]) -> Any:
    """The forward of PEFT's outermost wrapper around experts that multiplies their rows."""
    forward = kind.forward

    @functools.wraps(forward)
    def multiplying(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        base = innermost(self)
        is_packed = packing_of(base) is not None
        if not is_packed and (
            kwargs or len(args) != 3 or base.config._experts_implementation != NAME
        ):
            return forward(self, *args, **kwargs)
        reason = why_summed(self)
        if is_packed:
            refuse_summed(reason)
        elif reason is not None:
            warnings.warn(f"{reason}: {SUMMED}", GraphWarning, stacklevel=2)
            return forward(self, *args)
        return experts_with_lora(base, *args, **{**kwargs, "lora": lora_of(self)})

    return multiplying
