"""Where torch keeps hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optim_globals

OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
OF_ALL_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def hooks_of(module: nn.Module) -> list[dict]:
    return [getattr(module, kind) for kind in OF_MODULES]


def shown_hooks(dicts: Iterable[dict]) -> str:
    """Words for messages: which hooks, and whose they are."""
    found = [hook for hooks in dicts for hook in hooks.values()]
    named = [f"{_home(hook)}.{_name(hook)}" for hook in found[:3]]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"hooks ({', '.join(named)}{more})"


def _home(hook: Any) -> str:
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def hooks_of_modules(modules: Iterable[nn.Module]) -> list[dict]:
    """Hooks of these modules and of all that are in them."""
    return [hooks for root in modules for module in root.modules() for hooks in hooks_of(module)]


def forward_hooks_of(module: nn.Module) -> dict:
    """For code within a scope: if that named the attribute itself, graphs would depend on the hooks
    of the scope's own module, which run outside of them."""
    return module._forward_hooks


def tensor_hooks_of(tensors: Iterable[Tensor]) -> list[Callable[..., Any]]:
    """What tensors call when they get a gradient."""
    dicts = [getattr(tensor, kind) or {} for tensor in tensors for kind in OF_TENSORS]
    return [hook for hooks in dicts for hook in hooks.values()]


def hooks_of_updates(optimizers: Iterable[Optimizer]) -> list[dict]:
    """Those of the optimizers, and of all optimizers."""
    own = [getattr(each, kind) for each in optimizers for kind in OF_OPTIMIZERS]
    return own + [getattr(optim_globals, kind) for kind in OF_ALL_OPTIMIZERS]


def are_of_fsdp(hooks: dict) -> bool:
    """Those by which ``fully_shard`` gathers parameters: what they do on the device is recorded
    with the step, what they keep in Python ``whole_step/fsdp.py`` looks after."""
    homes = (str(getattr(hook, "__module__", "")) for hook in hooks.values())
    return all(home.startswith("torch.distributed.fsdp") for home in homes)
