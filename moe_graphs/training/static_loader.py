"""Batches in fixed device memory, copied there while the step before them still runs."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe_graphs.engine.tensors import ConstantSpec, Signature, dense_pair, same_value
from moe_graphs.engine.whole_step.recorded_step import input_name, structure_mismatch
from moe_graphs.errors import GraphError
from moe_graphs.training.batch_types import know_batches

BatchT = TypeVar("BatchT")


class StaticLoader(Generic[BatchT]):
    """Iterable over ``loader`` whose batches lie in fixed memory on ``device``.

    The loader is asked for a batch when that batch is handed out, never ahead. So its random
    numbers, its state for a checkpoint and its position after a ``break`` are as without this
    class. On a GPU the batch is copied through pinned memory on a stream of its own, while the step
    before still runs (unless the host has waited for that step). A batch is valid until ``held``
    more batches have been taken; work that reads it has to be enqueued before.

    From batch to batch only the values of tensors may change. The tensors have the strides of
    ``tensor.to(device)``, and memory of their own. Other leaves must stay equal, to the sign of a
    zero. Two loaders share no memory. A new ``iter()`` ends the iterator before.

    Args:
        loader: any iterable of pytrees, such as a ``DataLoader``; it need not pin memory. Batches
            of transformers' tokenizers and processors may be among them.
        held: how many batches in a row are valid at once: the number of microbatches, if they are
            taken together.
        on_mismatch: what happens to a batch that is built differently from the first (a smaller
            last one): "error" raises, "pass" hands it out in fresh memory, for an eager step. The
            loader goes on after it in both cases.
    """

    def __init__(
        self,
        loader: Iterable[BatchT],
        device: torch.device | str,
        *,
        held: int = 1,
        on_mismatch: str = "error",
    ) -> None:
        if held < 1:
            raise ValueError(f"held: got {held}, must be at least 1")
        if on_mismatch not in ("error", "pass"):
            raise ValueError(f"on_mismatch: got {on_mismatch!r}, accepted are 'error', 'pass'")
        self.loader, self.held, self.on_mismatch = loader, held, on_mismatch
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._signature: Signature | None = None
        self._slots: list[_Slot] = []
        self._turn = self._passes = 0

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # if it has one

    def __iter__(self) -> StaticBatches[BatchT]:
        self._passes += 1
        return StaticBatches(self, iter(self.loader), self._passes)

    # Training cannot use tensors that were made under inference_mode, so leave it here.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _place(self, batch: BatchT) -> BatchT:
        """Copy the batch into static memory, ready for the current stream.

        Raises:
            GraphError: the batch is built differently from the first.
        """
        if self._signature is None:
            know_batches()
        leaves, structure = pytree.tree_flatten(batch)
        _check_leaves(batch, leaves)
        layouts = [_Layout.of(leaf, self.device) if _is_tensor(leaf) else None for leaf in leaves]
        if self._signature is None:
            self._signature = Signature.of(batch, input_name)
            self._slots = [self._slot(layouts, structure) for _ in range(self.held + 1)]
        # The slot of the next turn. All work with its last batch has been enqueued by now.
        self._slots[(self._turn + 1) % len(self._slots)].give_back()
        slot = self._slots[self._turn % len(self._slots)]
        difference = self._difference(batch, leaves, layouts, structure)
        if difference is None:
            self._turn += 1
        elif self.on_mismatch == "pass":
            slot = self._slot(layouts, structure)
        else:
            raise GraphError(
                f"static loader: {difference}; give batches that are built alike "
                f"(drop_last=True), or on_mismatch='pass' to run such a batch eagerly"
            )
        return slot.fill(leaves)

    def _slot(self, layouts: Sequence[_Layout | None], structure: pytree.TreeSpec) -> _Slot:
        return _Slot(layouts, structure, self.device, self._stream)

    def _difference(
        self,
        batch: Any,
        leaves: Sequence[Any],
        layouts: Sequence[_Layout | None],
        structure: pytree.TreeSpec,
    ) -> str | None:
        """Describe how a batch differs from the first one, by the name of the leaf; or None."""
        assert self._signature is not None
        if structure != self._signature.structure:
            return structure_mismatch(self._signature, batch).message
        first = zip(self._signature.leaves, self._slots[0].layouts, strict=True)
        for (spec, was), leaf, now in zip(first, leaves, layouts, strict=True):
            if was is None:
                assert isinstance(spec, ConstantSpec)
                if not same_value(spec.value, leaf):
                    pair = reprlib.repr(spec.value), reprlib.repr(leaf)
                    return (
                        f"{spec.name} was {pair[0]} in the first batch and is {pair[1]} now, and "
                        f"only tensors may change: make it one"
                    )
            elif now is None:
                return f"{spec.name} was a tensor in the first batch and is {leaf!r} now"
            elif was != now:
                pair = was.beside(now), now.beside(was)
                return f"{spec.name} was {pair[0]} in the first batch and is {pair[1]} now"
        return None


class StaticBatches(Iterator[BatchT]):
    """One pass over a ``StaticLoader``. After an exception it may go on, if the loader can."""

    def __init__(self, owner: StaticLoader[BatchT], source: Iterator[BatchT], number: int) -> None:
        self.held = owner.held
        self._owner, self._source, self._number = owner, source, number

    def __next__(self) -> BatchT:
        if self._owner._passes != self._number:
            raise GraphError(
                "static loader: another iter() of it has begun, which uses the same memory: use "
                "one StaticLoader for each"
            )
        return self._owner._place(next(self._source))


class _Layout(NamedTuple):
    """Layout of a tensor; ``strides`` are those on the loader's device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Tensor, device: torch.device) -> _Layout:
        """Layout of ``leaf.to(device)``, which closes gaps between elements."""
        moves = leaf.device != device and not leaf.is_contiguous()
        strides = (torch.empty_like(leaf, device="meta") if moves else leaf).stride()
        return cls(tuple(leaf.shape), leaf.dtype, strides)

    def beside(self, other: _Layout) -> str:
        """Describe this layout next to ``other``; strides only if the shapes are equal."""
        text = f"{list(self.shape)} {self.dtype}"
        return text if self[:2] != other[:2] else f"{text} with strides {list(self.strides)}"


class _Slot:
    """Memory of one batch, and events that say when it may be read and written."""

    def __init__(
        self,
        layouts: Sequence[_Layout | None],
        structure: pytree.TreeSpec,
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.layouts = layouts
        self._structure, self._device, self._stream = structure, device, stream
        self._tensors = {
            index: torch.empty_strided(at.shape, at.strides, dtype=at.dtype, device=device)
            for index, at in enumerate(layouts)
            if at is not None
        }
        self._pinned: dict[int, Tensor] = {}
        if stream is not None:
            self._written, self._released = torch.cuda.Event(), torch.cuda.Event()
            for tensor in self._tensors.values():
                tensor.record_stream(stream)
            self.give_back()

    def give_back(self) -> None:
        """Let the next batch wait for all work that the caller has enqueued until now."""
        if self._stream is not None:
            self._released.record(torch.cuda.current_stream(self._device))

    def fill(self, leaves: Sequence[Any]) -> Any:
        """Copy the leaves into this memory and return the batch, ready for the current stream."""
        sources = {index: leaves[index] for index in self._tensors}
        stream = self._stream
        if stream is None:
            self._copy(sources)
        else:
            # The device has read the pinned memory's present values some steps ago.
            self._written.synchronize()
            sources = {index: self._staged(index, leaf, stream) for index, leaf in sources.items()}
            with torch.cuda.stream(stream):
                stream.wait_event(self._released)
                self._copy(sources)
                self._written.record(stream)
            torch.cuda.current_stream(self._device).wait_event(self._written)
        placed = [self._tensors.get(index, leaf) for index, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(placed, self._structure)

    def _copy(self, sources: Mapping[int, Tensor]) -> None:
        on_stream = self._stream is not None
        for index, source in sources.items():
            target, value = dense_pair(self._tensors[index], source)
            target.copy_(value, non_blocking=on_stream)

    def _staged(self, index: int, leaf: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """Copy the leaf to pinned memory of this slot, where the copy stream may read it later.

        A leaf on a device is returned itself, marked as used by the copy stream.
        """
        if leaf.device.type != "cpu":
            stream.wait_stream(torch.cuda.current_stream(leaf.device))
            leaf.record_stream(stream)
            return leaf
        if index not in self._pinned:
            self._pinned[index] = torch.empty_like(
                self._tensors[index], device="cpu", pin_memory=True
            )
        return self._pinned[index].copy_(leaf)


def _check_leaves(batch: Any, leaves: Sequence[Any]) -> None:
    """Check that a copy changes the kind of no leaf.

    Raises:
        GraphError: a copy would silently change the kind of a leaf.
    """
    reasons = map(_unfit, leaves)
    for index, reason in enumerate(reasons):
        if reason is not None:
            path, _ = pytree.tree_flatten_with_path(batch)[0][index]
            raise GraphError(f"static loader: {input_name(path)} {reason}")


def _unfit(leaf: Any) -> str | None:
    kind = type(leaf).__name__
    if not _is_tensor(leaf):
        if not _holds_tensors(leaf):
            return None
        return (
            f"is a {kind}, whose tensors torch does not see: let the collate_fn return them in a "
            f"dict, list or tuple, or register the class with "
            f"torch.utils._pytree.register_pytree_node"
        )
    if leaf.requires_grad:
        return "requires grad, and no gradient would come back to the loader's tensor: detach it"
    if type(leaf) not in (Tensor, nn.Parameter):
        return f"is a {kind}, and would come as a plain tensor: give it as one"
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        return "is sparse, nested or quantized: only dense tensors have fixed memory"
    return None


def _holds_tensors(leaf: Any, depth: int = 3) -> bool:
    """Whether tensors hide in a container that is no pytree: a dataclass, a ``UserDict``."""
    inside = [*getattr(leaf, "__dict__", {}).values()]
    inside += [getattr(leaf, name, None) for name in getattr(leaf, "__slots__", ())]
    if isinstance(leaf, Mapping):
        inside += leaf.values()
    elif isinstance(leaf, (tuple, list, set, frozenset)):
        inside += leaf
    found = pytree.tree_leaves(inside)
    return any(_is_tensor(each) or (depth and _holds_tensors(each, depth - 1)) for each in found)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
