"""Memory that graphs write and a caller may hold: who holds it, and how the engine gets it back.

A graph writes to the same memory at every replay. What it has written leaves the engine as a tensor
on that memory: an output of a scope, a gradient that autograd adds to a ``.grad``, a gradient that
becomes ``.grad``. One ``BufferLease`` stands for one such storage. Before a graph writes there
again, the engine reclaims the lease, and the graph runs only if the memory is its own again.

| state | who holds the memory | who decides that it comes to this |
|---|---|---|
| returned | the engine alone: its references are counted (``settle``), and there is no other |
``reclaim`` |
| leased | a caller may hold the tensor that it was given: an output (``CallSite.note_handed``), or
a gradient that autograd is adding (``Backwards.added``) | ``replay``; ``outgoing_gradients.lent`` |
| in place as ``.grad`` | the parameter, until a graph needs the memory (``Slot.in_place``), or
until the step drops it (a whole step, which puts it there after every replay) | ``reason_to_copy``
at the capture, ``outgoing_gradients.lent`` at a replay; ``StaticGradients`` |
| moved | the engine alone: the tensors that callers held have memory of their own now |
``reclaim``: every reference that is not the engine's is a tensor that was handed out |
| view held | somebody has a view, an alias or the storage itself, or has freed the memory |
``reclaim``: a graph that would write there is not replayed (``output_held``, ``gradient_held``,
``gradients_held``); that output is a copy from then on, and so is that gradient (``view_held``) |

After "moved" the lease is returned. After "view held" it is returned as soon as nobody else holds
the memory. References from numpy and DLPack are not counted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.engine.snapshot import no_garbage_collection
from moe_graphs.engine.tensors import is_wrapped, tensor_leaves, unwrap
from moe_graphs.engine.tracing import DispatchMode


class BufferLease:
    """The lease of one storage that graphs write.

    Args:
        static: a tensor of the engine that has this storage.
        outputs: the numbers of the outputs of a scope that lie on it.
        parameter: the weight whose gradient it is.
        reason: why this gradient must not become ``.grad``; None if it may.
        standing: whether the engine puts one tensor as ``.grad`` after every replay and keeps it,
            as a whole step does.

    Attributes:
        handed: the tensors that callers were given on it.
        standing: the tensor that stands as ``.grad`` after every replay.
        in_place: whether the gradient may become ``.grad``; never again once a view was held.
        can_be_added: whether autograd may add the gradient to a ``.grad``, as DTensors may not be.
        copied: why the gradient did not stay in place, and how often; once for a lasting reason.
    """

    def __init__(
        self,
        static: Tensor,
        *,
        outputs: Sequence[int] = (),
        parameter: Tensor | None = None,
        reason: str | None = None,
        standing: bool = False,
    ) -> None:
        self._static, self.outputs, self._parameter = static, tuple(outputs), parameter
        self._storage = unwrap(static).untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.handed: list[weakref.ref[Tensor]] = []
        self.in_place = parameter is not None and not standing and reason is None
        self.can_be_added = parameter is not None and not is_wrapped(parameter)
        self.copied = Counter[str]() if reason is None else Counter([reason])
        self.standing: Tensor | None = static.detach() if standing else None
        self._of_standing = 0 if self.standing is None else _holders(self.standing)
        self._known = self._references()

    # ---- handing out

    def hand_out(self) -> Tensor:
        """A new tensor on the memory, for a caller.

        It has a version of its own (``.data``): the next gradient in this memory changes nothing
        that autograd has saved of this one.
        """
        self.settle()
        tensor = self._static.data
        self.handed = [weakref.ref(tensor)]
        return tensor

    def note_handed(self, tensors: Iterable[Tensor]) -> None:
        """Notes the tensors that a caller was given on the memory just now."""
        self.handed = list(map(weakref.ref, tensors))

    def note_grad(self) -> None:
        """Notes the parameter's ``.grad`` if it lies on the memory: autograd has made another
        tensor of the one that it took."""
        gradient = self._parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if gradient.data_ptr() == self._static.data_ptr():
            self.handed = [*self.handed[:1], weakref.ref(gradient)]

    def output_of(self, tensor: Any) -> int | None:
        """The number of the output that a tensor is: the very object that was handed out."""
        for number, handed in zip(self.outputs, self.handed, strict=False):
            if handed() is tensor:
                return number
        return None

    # ---- counting

    def settle(self) -> int:
        """The number of references that are not the engine's. If references of the engine have
        gone, fewer are known from now on."""
        found = self._references()
        if found < self._known:
            self._known = found  # the difference was garbage of the engine's
        return found - self._known

    def is_held(self) -> bool:
        """Whether anybody but the engine holds the memory."""
        return self.settle() > 0 or (self.standing is not None and self._is_standing_held())

    def _references(self) -> int:
        """References of tensors to the storage, and of Python to the object that stands for it:
        whoever asks a tensor for its storage gets the same object."""
        return torch._C._storage_Use_Count(self._storage._cdata) + sys.getrefcount(self._storage)

    def _is_standing_held(self) -> bool:
        """Whether anything but ``.grad`` and the engine holds the standing tensor itself."""
        of_grad = _holders_of_grad() if self._parameter.grad is self.standing else 0
        return _holders(self.standing) > self._of_standing + of_grad

    # ---- reclaiming

    def reclaim(self) -> bool:
        """Whether a graph may write the memory now. Tensors that callers hold move away from it.

        They move together or not at all: what is written to one of them is seen in its views. What
        was handed out is forgotten, because the memory is about to have other values.
        """
        is_whole = self._storage.nbytes() == self._nbytes
        if is_whole and not self.is_held():
            self.handed.clear()
            return True
        if self.standing is None and self._parameter is not None:
            self.note_grad()
        free = is_whole and self._move()
        if self.in_place:
            self.copied["still_held" if free else "view_held"] += 1
            self.in_place = free
        return free

    def _move(self) -> bool:
        """Gives the tensors that callers hold memory of their own, unless a view is held, too."""
        found = {id(tensor): tensor for ref in self.handed if (tensor := ref()) is not None}
        alive = list(filter(self._has, found.values()))  # the others have moved by themselves
        del found
        if self.settle() != len(alive):
            return False
        if alive:
            _move_together(alive, self._storage.clone())
        if self.standing is not None and self._is_standing_held():
            _move_alone(self.standing)
            self.standing = self._static.detach()
        self.handed.clear()
        return True

    def _has(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and (
            tensor.untyped_storage()._cdata == self._storage._cdata
        )


class Leases:
    """Leases that are out, each with the position in a slot's order of the graph that wrote it."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, BufferLease]] = []

    def __iter__(self) -> Iterator[BufferLease]:
        return (lease for _, lease in self._rows)

    def add(self, leases: Iterable[BufferLease], position: int = 0) -> None:
        self._rows += zip(itertools.repeat(position), leases)

    def reclaim(self, first: int = 0) -> bool:
        """Reclaims all that a graph at a position may write: the memory of the graphs that were
        captured there or later. False if some of that is still held; then it stays out."""
        if not self._rows:
            return True
        self._rows = [row for row in self._rows if row[0] < first or not row[1].reclaim()]
        return not self._rows or all(position < first for position, _ in self._rows)


@contextlib.contextmanager
def references_of_the_engine(leases: Sequence[BufferLease]) -> Iterator[None]:
    """A context within which references that come and go are the engine's, and not a caller's.

    No reference of a caller may go by being collected meanwhile.
    """
    with no_garbage_collection():
        before = [lease._references() for lease in leases]
        try:
            yield
        finally:
            for lease, count in zip(leases, before, strict=True):
                lease._known += lease._references() - count


def _move_together(tensors: Sequence[Tensor], storage: torch.UntypedStorage) -> None:
    """Puts tensors of one storage on a copy of it."""
    for tensor in tensors:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        where = (tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = empty.set_(storage, *where)


def _move_alone(tensor: Tensor) -> None:
    """Gives a tensor memory of its own. A tensor that stands for another one is given another to
    stand for."""
    part = unwrap(tensor)
    if part is tensor:
        tensor.data = tensor.detach().clone()
        return
    holder: Tensor = tensor
    while (inner := getattr(holder, name := holder.__tensor_flatten__()[0][0])) is not part:
        holder = inner
    setattr(holder, name, part.detach().clone())


def _holders(tensor: Tensor) -> int:
    """References to a tensor, of Python and, where torch tells, of C++."""
    count = getattr(tensor, "_use_count", None)
    return sys.getrefcount(tensor) + (0 if count is None else count())


@functools.cache
def _holders_of_grad() -> int:
    """Number of references that a ``.grad`` has to its tensor, as ``_holders`` counts them: newer
    versions of torch count one of Python for all of C++."""
    parameter, gradient = nn.Parameter(torch.empty(0)), torch.empty(0)
    before = _holders(gradient)
    parameter.grad = gradient
    return _holders(gradient) - before


# ---- which gradients may become ``.grad``


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
    """The reason why a gradient of a recorded backward cannot become ``.grad``, or None.

    gradients: all gradients of the backward.
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
    tensor = unwrap(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _on_one_memory(a: Tensor, b: Tensor) -> bool:
    return a.layout is torch.strided and _storage_of(a) == _storage_of(b)
