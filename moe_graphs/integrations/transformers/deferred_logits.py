"""Logits that are made only where somebody reads them.

In training, a causal language model of transformers computes its logits and hands them to its loss
function and to its caller. The loss needs no whole logits (``kernels.linear_cross_entropy``), and
most callers never look at them. So the output head returns ``DeferredLogits``, a tensor that knows
its shape and how to make its values. The loss function takes hidden states and weight from it. Any
operation of torch makes the values first, so that every reader finds what it would have found.
Three operations are deferred, too, since models scale and cap their logits by them: a product with
a number, a quotient by one, and ``tanh``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from moe_graphs.integrations.transformers.changes import Change, Changes
from moe_graphs.kernels import LossRule

_ABOUT_SHAPE = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta",
                 "requires_grad", "is_leaf", "is_sparse", "is_quantized", "is_nested")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex,
     Tensor.element_size, Tensor.__len__}  # fmt: skip


_SCALE_OR_CAP = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div,
                 Tensor.__truediv__, torch.div, Tensor.tanh, torch.tanh}  # fmt: skip


class DeferredLogits(Tensor):
    """Logits ``[..., V]`` of hidden states ``[..., D]`` and a weight ``[V, D]``.

    Attributes:
        hidden, weight: what the logits are made of.
        made_by: functions that were asked for values, by name; the output head counts them.
        rule: how the logits are scaled and capped.
    """

    hidden: Tensor
    weight: Tensor
    made_by: dict[str, int]
    rule: LossRule
    _autocast: bool
    _whole: Tensor | None
    _before: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None

    @staticmethod
    def __new__(cls, hidden: Tensor, weight: Tensor, made_by: dict[str, int]) -> DeferredLogits:
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
        return cls._of(hidden, weight, made_by, dtype, autocast)

    @classmethod
    def _of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        made_by: dict[str, int],
        dtype: torch.dtype,
        autocast: bool,
    ) -> DeferredLogits:
        self = Tensor._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], weight.shape[0]),
            dtype=dtype,
            device=hidden.device,
            requires_grad=hidden.requires_grad or weight.requires_grad,
        )
        self.hidden, self.weight, self.made_by = hidden, weight, made_by
        self.rule, self._autocast, self._whole, self._before = LossRule(), autocast, None, None
        return self

    def then(self, rule: LossRule, operation: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """The logits after ``operation``, which has made their rule this one."""
        after = self._of(self.hidden, self.weight, self.made_by, self.dtype, self._autocast)
        after.rule, after._before = rule, (self, operation)
        return after

    def whole(self, asked_by: str) -> Tensor:
        """The logits themselves, made at the first call."""
        if self._whole is None:
            self.made_by[asked_by] = self.made_by.get(asked_by, 0) + 1
            self._whole = self._made()
        return self._whole

    def _made(self) -> Tensor:
        if self._before is not None:
            logits, operation = self._before
            with torch.enable_grad():
                return operation(logits._made() if logits._whole is None else logits._whole)
        kind = self.device.type
        with torch.autocast(kind, self.dtype, self._autocast), torch.enable_grad():
            return functional.linear(self.hidden, self.weight)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (
            func in _SCALE_OR_CAP
            and (deferred := _scaled_or_capped(func, args, kwargs)) is not None
        ):
            return deferred
        name = getattr(func, "__name__", str(func))
        args, kwargs = pytree.tree_map_only(
            DeferredLogits, lambda logits: logits.whole(name), (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is declared as an instance's
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} reached logits that are not made yet")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole("pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.whole("deepcopy").__deepcopy__(memo)


def _scaled_or_capped(func: Any, args: Any, kwargs: Any) -> DeferredLogits | None:
    """The result, deferred, if a ``LossRule`` has it: logits times or over a number, or capped."""
    if kwargs or not isinstance(args[0], DeferredLogits) or not torch.is_grad_enabled():
        return None
    logits, name = args[0], func.__name__.strip("_")
    scale, cap = logits.rule.logit_scale, logits.rule.logit_cap
    if name == "tanh":
        rule = LossRule(scale, 1.0) if cap is None else None
    else:
        number = args[1]
        if type(number) not in (int, float) or not 0 < number < math.inf:
            return None
        factor = number if "mul" in name else 1 / number
        rule = LossRule(scale * factor, None if cap is None else cap * factor)
    return None if rule is None else logits.then(rule, lambda x: func(x, *args[1:]))


def defer_logits(head: Any, done: Changes) -> None:
    """Lets an output head defer its logits in training, if it is a plain one without a bias."""
    if type(head) is not nn.Linear or head.bias is not None or "forward" in vars(head):
        done.left("logits", type(head).__name__, 1, "is no plain head: its logits are whole")
        return
    head.made_by = {}
    note = "in training logits are made only where somebody reads them"
    done.changed_classes("logits", [head], _deferring, note)
    done.on_undo(functools.partial(vars(head).pop, "made_by", None))
    done.watch(functools.partial(_made, head))


def _made(head: Any) -> list[Change]:
    """The functions that have asked for whole logits, and how often."""
    note = "asked for whole logits, which take memory"
    made_by = vars(head).get("made_by", {})
    return [Change("logits", name, count, False, note) for name, count in made_by.items()]


def _deferring(kind: type[Any]) -> Callable[..., Tensor]:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and "made_by" in vars(self):
            return DeferredLogits(hidden, self.weight, self.made_by)
        return kind.forward(self, hidden)

    return forward
