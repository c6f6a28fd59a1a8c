"""Torch ops that cost little to call.

``torch.library.custom_op`` checks arguments and aliases in Python on every call: 35 us, and 100
where autograd is registered with it. A graph hides that, a small layer that runs eagerly does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CHECKPOINT = "torch.utils.checkpoint"


def define_op(*, device: str = "cpu", mutates_args: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Makes an annotated function the op ``moe_graphs::name``, and itself its kernel on ``device``.

    ``torch.library.impl`` adds kernels and ``torch.library.register_fake`` shapes. The op has no
    autograd: an ``autograd.Function`` calls it.

    Example: ``@define_op()`` on ``def twice(x: Tensor) -> Tensor`` leaves ``twice`` as the op.
    """

    def define(function: Callable[..., Any]) -> Any:
        name = f"moe_graphs::{function.__name__}"
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, device)(function)
        return getattr(torch.ops.moe_graphs, function.__name__).default

    return define


def wants_gradient(ctx: Any, index: int) -> bool:
    """Whether a backward is asked for the gradient of tensor input ``index`` just now.

    Zero-bubble schedules run a node once for its inputs and later for its weights;
    ``ctx.needs_input_grad`` says yes to both both times.
    """
    if not ctx.needs_input_grad[index] or torch.compiler.is_compiling():
        return ctx.needs_input_grad[index]
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[index][0])
    except RuntimeError:  # a leaf in torch.autograd.grad()
        return True


def is_made_again() -> bool:
    """Whether torch's checkpoint drops what autograd saves now, and makes it for each backward.

    Then a backward that unpacks a tensor is the only one that has it, and may overwrite it.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None or torch.compiler.is_compiling():
        return False
    hooks = top(True)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return hooks[0].__module__ == _CHECKPOINT if name.startswith("_checkpoint_hook.") else False
