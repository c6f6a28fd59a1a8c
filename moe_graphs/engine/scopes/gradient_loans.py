"""Static memory of weights' gradients, which autograd may take as ``.grad`` without a copy."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.engine.scopes.loans import Loan
from moe_graphs.engine.signature import tensor_leaves
from moe_graphs.engine.stand_for import local, stands_for_another
from moe_graphs.engine.tracing import DispatchMode


class GradientLoan(Loan):
    """The memory of the gradient of one use of a weight.

    It is lent to be added to a ``.grad``, or it becomes ``.grad`` itself: then it is the user's
    until the next microbatch needs the memory of the slot.

    Args:
        reason: why it must not become ``.grad``, None if it may.

    Attributes:
        is_in_place: whether it may.
        is_plain: whether it may be added to a ``.grad``. That of a DTensor is one, too.
        copied: why it did not, and how often; once for a reason that always holds.
    """

    def __init__(self, parameter: Tensor, gradient: Tensor, reason: str | None) -> None:
        super().__init__(gradient.untyped_storage())
        self._parameter, self._gradient = parameter, gradient
        self._address = gradient.data_ptr()
        self._was_lent = False
        self.is_in_place = reason is None
        self.is_plain = not stands_for_another(parameter)
        self.copied = Counter[str]() if reason is None else Counter([reason])

    def lend(self) -> Tensor:
        """Nobody has it just now; whatever still seems to hold it is the engine's own.

        ``.data``, since a version shared with the next gradient would tell of changes to that one.
        """
        if not self._was_lent:
            self._was_lent = True
            self.nothing_more_is_out()
        lent = self._gradient.data
        self.handed = [weakref.ref(lent)]
        return lent

    def note_holder(self) -> None:
        """Who keeps this ``.grad`` when it is None again can be found from now on."""
        gradient = self._parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if gradient.data_ptr() == self._address:
            self.handed = [*self.handed[:1], weakref.ref(gradient)]

    def call_in(self) -> bool:
        if self.is_free:
            return True
        self.note_holder()
        free = super().call_in()
        if self.is_in_place:
            self.copied["still_held" if free else "view_held"] += 1
            self.is_in_place = free
        return free

    def _may_move(self, alive: int) -> bool:
        """A ``.grad`` stays with its views: what is added to it is seen in them."""
        return self._others() == alive


class Allocations(DispatchMode):
    """A context that notes the memory that operations inside have made."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()

    def see(self, func: Any, args: tuple, kwargs: dict) -> Any:
        given = set(map(_storage_of, tensor_leaves((args, kwargs))))
        out = func(*args, **kwargs)
        self._made |= set(map(_storage_of, tensor_leaves(out))) - given
        return out

    def made(self, tensor: Tensor) -> bool:
        return _storage_of(tensor) in self._made


def reason_to_copy(
    parameter: Tensor, gradient: Tensor, gradients: Sequence[Tensor | None], made: Allocations
) -> str | None:
    """Why a gradient of a recorded backward cannot become ``.grad``, or None.

    gradients: all of the backward's.
    """
    if type(gradient) is not Tensor or type(parameter) not in (Tensor, nn.Parameter):
        return "other_type"
    shared = [each for each in gradients if each is not None and _on_one_memory(each, gradient)]
    whole = gradient.untyped_storage().nbytes() == gradient.nbytes
    if not made.made(gradient) or len(shared) > 1 or not whole:
        return "shared_memory"
    alike = gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype
    return None if alike else "other_layout"


def _storage_of(tensor: Tensor) -> int:
    tensor = local(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _on_one_memory(a: Tensor, b: Tensor) -> bool:
    return a.layout is torch.strided and _storage_of(a) == _storage_of(b)
