"""Memory that graphs write and a caller may hold: who holds it, and how the engine gets it back.

A graph writes to the same memory at every replay. Results leave the engine as tensors on that
memory: an output of a scope, a gradient that autograd adds to a ``.grad``, a gradient that becomes
``.grad``. One ``BufferLease`` stands for one such storage. Before a graph writes there again, the
engine reclaims the lease. The graph runs only if nobody else uses the memory then.

| state | who holds the memory | who decides this |
|---|---|---|
| returned | the engine alone, as its counted references show | ``reclaim``, ``settle`` |
| leased | a caller: an output, or a gradient that autograd adds | ``note_handed``, ``hand_out`` |
| in place as ``.grad`` | the parameter, until a graph needs the memory | see below |
| moved | the engine: callers' tensors have memory of their own now | ``reclaim`` |
| view held | somebody has a view, an alias or the storage itself | ``reclaim`` |

- **Leased**: ``CallSite.note_handed`` leases outputs. ``leased`` in ``partial/graphed_scope.py``
  leases gradients; ``BackwardPool.added`` has those that autograd is adding.
- **In place as .grad**: at the capture ``reason_to_copy`` decides whether a gradient may become
  ``.grad``, and at a replay ``leased`` does. ``Slot.in_place`` has these leases. A whole step puts
  its gradients there after every replay (``StaticGradients``), until the step drops them.
- **Moved**: every reference that is not the engine's is a tensor that was handed out. Afterwards
  the lease is returned.
- **View held**: the graph that would write there is not replayed (``output_held``,
  ``gradient_held``, ``gradients_held``). From then on that output or gradient is a copy
  (``view_held``). The lease is returned as soon as nobody else holds the memory. A storage that
  somebody has freed counts as held.

References from numpy and DLPack are not counted.
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
from torch.utils._python_dispatch import _disable_current_modes

from moe_graphs.engine.snapshot import no_garbage_collection
from moe_graphs.engine.tensors import is_wrapped, storage_of, tensor_leaves, unwrap
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
        can_be_added: whether autograd may add the gradient to a ``.grad``; it must not for a
            DTensor.
        copied: why the gradient did not stay in place, and how often; a lasting reason counts once.
    """

    def __init__(
        self,
        static: Tensor,
        *,
        outputs: Sequence[int] = (),
        parameter: Any = None,
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
        self.standing: Any = static.detach() if standing else None
        self._of_standing = 0 if self.standing is None else _holders(self.standing)
        self._known = self._references()

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self._storage.device

    # ---- handing out

    def hand_out(self) -> Tensor:
        """A new tensor on the memory, for a caller.

        It has a version counter of its own (``.data``). So the next gradient in this memory does
        not change the version of a tensor that autograd has saved.
        """
        self.settle()
        tensor = self._static.data
        self.handed = [weakref.ref(tensor)]
        return tensor

    def note_handed(self, tensors: Iterable[Tensor]) -> None:
        """Notes the tensors that a caller was given on the memory just now."""
        self.handed = list(map(weakref.ref, tensors))

    def note_grad(self) -> None:
        """Notes the parameter's ``.grad`` if it lies on the memory.

        Autograd makes another tensor of the one that it was given.
        """
        gradient = self._parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if gradient.data_ptr() == self._static.data_ptr():
            self.handed = [*self.handed[:1], weakref.ref(gradient)]

    def output_of(self, tensor: Any) -> int | None:
        """The number of the output that a tensor is, or None; only the object handed out counts."""
        for number, handed in zip(self.outputs, self.handed, strict=False):
            if handed() is tensor:
                return number
        return None

    # ---- counting

    def settle(self) -> int:
        """The number of references that are not the engine's.

        If references of the engine have gone, the engine counts fewer as its own from now on.
        """
        found = self._references()
        if found < self._known:
            self._known = found  # the missing references were garbage of the engine
        return found - self._known

    def is_held(self) -> bool:
        """Whether anybody but the engine holds the memory."""
        return self.settle() > 0 or (self.standing is not None and self._is_standing_held())

    def _references(self) -> int:
        """References of tensors to the storage, and of Python to the object that stands for it.

        Whoever asks a tensor for its storage gets the same object.
        """
        return torch._C._storage_Use_Count(self._storage._cdata) + sys.getrefcount(self._storage)

    def _is_standing_held(self) -> bool:
        """Whether anything but ``.grad`` and the engine holds the standing tensor itself."""
        of_grad = _holders_of_grad() if self._parameter.grad is self.standing else 0
        return _holders(self.standing) > self._of_standing + of_grad

    # ---- reclaiming

    def reclaim(self) -> bool:
        """Whether a graph may write the memory now. Tensors that callers hold move away from it.

        They move together or not at all, because a write to one of them shows in its views. The
        lease forgets the tensors that were handed out, because the memory is about to get other
        values.
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
        """Gives tensors that callers hold memory of their own, unless a view is held as well."""
        found = {id(tensor): tensor for ref in self.handed if (tensor := ref()) is not None}
        alive = list(filter(self._has, found.values()))  # the others have already moved
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
    """Leases that are out, each with the position of its graph in a slot's order."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, BufferLease]] = []

    def __iter__(self) -> Iterator[BufferLease]:
        return (lease for _, lease in self._rows)

    def add(self, leases: Iterable[BufferLease], position: int = 0) -> None:
        self._rows += zip(itertools.repeat(position), leases)

    def reclaim(self, first: int = 0) -> bool:
        """Reclaims all memory that the graph at a position may write.

        That is the memory of graphs that were captured there or later. False if some of it is still
        held; the lease of that memory stays out.
        """
        out, is_free = [], True
        for position, lease in self._rows:
            if position < first:
                out.append((position, lease))
            elif not lease.reclaim():
                out.append((position, lease))
                is_free = False
        self._rows = out
        return is_free


@contextlib.contextmanager
def references_of_the_engine(leases: Sequence[BufferLease]) -> Iterator[None]:
    """Context within which references that come and go are the engine's, and not a caller's.

    The garbage collector must not free a caller's reference meanwhile.
    """
    with no_garbage_collection():
        before = [lease._references() for lease in leases]
        try:
            yield
        finally:
            for device in {lease.device for lease in leases}:
                wait_for_autograd(device)
            for lease, count in zip(leases, before, strict=True):
                lease._known += lease._references() - count


def wait_for_autograd(device: torch.device) -> None:
    """Waits until autograd's thread of a GPU has let go of its last backward.

    The thread holds that backward's graph for a moment after ``backward()`` has returned. A
    reference that is counted as the engine's and then goes would hide one of a caller.
    """
    if device.type != "cuda":
        return
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty((), device=device, requires_grad=True)
        torch.autograd.grad(leaf.view_as(leaf), leaf, torch.empty_like(leaf))


def _move_together(tensors: Sequence[Tensor], storage: torch.UntypedStorage) -> None:
    """Puts tensors of one storage on a copy of it."""
    for tensor in tensors:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        where = (tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = empty.set_(storage, *where)


def _move_alone(tensor: Tensor) -> None:
    """Gives a tensor memory of its own; for a wrapper, its inner tensor is replaced."""
    part = unwrap(tensor)
    if part is tensor:
        tensor.data = tensor.detach().clone()
        return
    holder: Any = tensor
    while (inner := getattr(holder, name := holder.__tensor_flatten__()[0][0])) is not part:
        holder = inner
    setattr(holder, name, part.detach().clone())


def _holders(tensor: Tensor) -> int:
    """References to a tensor, of Python and, if this torch tells them, of C++."""
    count = getattr(tensor, "_use_count", None)
    return sys.getrefcount(tensor) + (0 if count is None else count())


@functools.cache
def _holders_of_grad() -> int:
    """Number of references that a ``.grad`` has to its tensor, as ``_holders`` counts them.

    Newer versions of torch count one reference of Python for all of C++.
    """
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

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = set(map(storage_of, tensor_leaves((args, kwargs))))
        out = func(*args, **kwargs)
        self._made |= set(map(storage_of, tensor_leaves(out))) - given
        return out

    def made(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._made


def reason_to_copy(
    parameter: Tensor, gradient: Tensor, gradients: Sequence[Tensor | None], made: Allocations
) -> str | None:
    """The reason why a gradient of a recorded backward cannot become ``.grad``, or None.

    Args:
        gradients: all gradients of the backward.
    """
    if type(gradient) is not Tensor or type(parameter) not in (Tensor, nn.Parameter):
        return "other_type"
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    if any(getattr(hook, "frees_gradient", False) for hook in hooks.values()):
        return "freed_in_backward"
    shared = [each for each in gradients if each is not None and _on_one_memory(each, gradient)]
    whole = gradient.untyped_storage().nbytes() == gradient.nbytes
    if not made.made(gradient) or len(shared) > 1 or not whole:
        return "shared_memory"
    alike = gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype
    return None if alike else "other_layout"


def _on_one_memory(a: Tensor, b: Tensor) -> bool:
    return a.layout is torch.strided and storage_of(a) == storage_of(b)
