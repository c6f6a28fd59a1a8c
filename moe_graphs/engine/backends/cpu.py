"""CUDA-graph semantics on a machine without a GPU: a tape of ATen calls, run again in place.

A recording executes the block and notes its ATen calls. A replay runs the same calls on the same
tensors and writes their results into the same storages. Python is not run again, so branches and
numbers are frozen and addresses are static, as in a CUDA graph. The recorder does not simulate a
memory pool (every intermediate keeps its own memory), and it gains no speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from moe_graphs.engine.backends.backend import Backend, Graph, MemoryMeter, RecordedDraws
from moe_graphs.engine.tensors import (
    arrived,
    communicates,
    detached,
    namespace_of,
    noting_resizes,
    per_operation,
    returns_work,
    sends,
    tensor_leaves,
    wait,
)
from moe_graphs.engine.tracing import DispatchMode, listeners
from moe_graphs.errors import CaptureError

_Call = tuple[tuple[bool, bool], Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor], bool]


class Tape(Graph):
    """The recorded calls.

    Each is a tuple of modes, op, arguments, keyword arguments, tensors that receive the results,
    and whether a replay has to wait for the results. The modes are those of ``_modes``: kernels of
    recurrent layers ask for them.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._grown: set[int] = set()

    @property
    def kernels(self) -> int:
        return len(self.calls)

    @torch.no_grad()
    def replay(self) -> None:
        # The casts are on the tape: the caller's autocast must not cast again.
        with torch.autocast("cpu", enabled=False), contextlib.ExitStack() as at_the_end:
            now = _modes()
            for modes, func, args, kwargs, outputs, is_work in self.calls:
                grad, inference = modes
                if modes == now:
                    under: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
                else:
                    under = torch.inference_mode() if inference else torch.set_grad_enabled(grad)
                with under:
                    if is_work:
                        results = _communicate(func, args, kwargs, at_the_end)
                    else:
                        results = func(*args, **kwargs)
                    for output, result in zip(outputs, tensor_leaves(results), strict=True):
                        if output.data_ptr() != result.data_ptr():
                            output.copy_(result)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Notes a ``resize_`` for the replays: tensors of the tape's calls lie on this storage."""
        self.calls.append((_modes(), _resize, (storage, nbytes), {}, [], False))
        if nbytes:
            self._grown.add(storage._cdata)

    def check_memory(self) -> None:
        """Checks that no replay writes to memory that was freed.

        Raises:
            CaptureError: if memory was freed that a replay writes to without allocating it.
        """
        written = (output for call in self.calls for output in call[4] if output.numel())
        storages = (output.untyped_storage() for output in written)
        if any(not each.nbytes() and each._cdata not in self._grown for each in storages):
            raise CaptureError("it frees the storage of a tensor (resize_(0)): drop the tensor")

    def release(self) -> None:
        self.calls.clear()


def _modes() -> tuple[bool, bool]:
    """The modes of autograd that kernels ask for: recording of gradients, and inference."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _communicate(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    at_the_end: contextlib.ExitStack,
) -> Any:
    """Runs an operation that communicates, and waits for it: for one that sends, at the end."""
    if sends(func):
        # Arguments are copied, because the caller may write to them before communication has ended.
        args = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, args)
    results = func(*args, **kwargs)
    if sends(func):
        at_the_end.callback(_wait_with, results, args)
    elif communicates(func):
        wait(results)
    arrived(func, results)
    return results


def _wait_with(results: Any, _sent: Any) -> None:
    wait(results)


def _resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    storage.resize_(nbytes)


class _Recorder(DispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if _is_view(func) or namespace_of(func) == "profiler":
            return out  # a view of static memory needs no call in a replay
        # Arguments are detached: the tape must hold neither the autograd graph nor its saved
        # tensors.
        args, kwargs = detached((args, kwargs))
        outputs = [t.detach() for t in tensor_leaves(out)]
        self.tape.calls.append((_modes(), func, args, kwargs, outputs, returns_work(func)))
        return out


@per_operation
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


class TapeDraws(RecordedDraws):
    """States of the CPU's generator, which every replay of a tape notes anew."""

    tape: Tape

    def __init__(self, begins: Sequence[int | None]) -> None:
        super().__init__(begins)
        self._states: dict[Any, Tensor] = {}

    def note(self, number: int) -> None:
        super().note(number)
        if self.begins[number] is not None:
            self._do(self._keep, number)

    @contextlib.contextmanager
    def again(self, number: int) -> Iterator[None]:
        if self.begins[number] is None:
            yield
            return
        around = ("around", number)
        self._do(self._keep, around)
        self._do(self._return_to, number)
        try:
            yield
        finally:
            self._do(self._return_to, around)

    def _do(self, function: Any, name: Any) -> None:
        function(name)
        self.tape.calls.append((_modes(), function, (name,), {}, [], False))

    def _keep(self, name: Any) -> None:
        self._states[name] = torch.get_rng_state()

    def _return_to(self, name: Any) -> None:
        torch.set_rng_state(self._states[name])


class StorageMeter(MemoryMeter):
    """Follows the storages of what the operations of trial runs return.

    Allocations inside of an operation are not seen.
    """

    _peak: int
    _at_most: int

    def __enter__(self) -> StorageMeter:
        self.restart()
        listeners.append(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        listeners.remove(self._note)

    def _note(self, given: Any, out: Any) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in tensor_leaves(given)}
        for tensor in tensor_leaves(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self._at_most += storage.nbytes()
        if self._at_most > self._peak:  # some of it may have gone since it was counted
            self._at_most = self.alive()
            self._peak = max(self._peak, self._at_most)

    def peak(self) -> int:
        return self._peak

    def restart(self) -> None:
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak, self._at_most = 0, 0

    def alive(self) -> int:
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())


class CpuRecorder(Backend):
    """The backend for models on the CPU."""

    name = "cpu recorder"

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self.device = torch.device("cpu")
        self.generators = tuple(generators)

    def make_room(self) -> None:
        pass

    def cache_piece(self, nbytes: int) -> None:
        pass

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        yield

    def new_pool(self, nbytes: int = 0) -> None:
        return None

    def new_draws(self, begins: Sequence[int | None]) -> TapeDraws:
        return TapeDraws(begins)

    @contextlib.contextmanager
    def record(self, pool: None, draws: RecordedDraws | None = None) -> Iterator[list[Graph]]:
        tape = Tape()
        if isinstance(draws, TapeDraws):
            draws.tape = tape
        graphs: list[Graph] = []
        with noting_resizes(tape.resized), _Recorder(tape):
            yield graphs
        tape.check_memory()
        graphs.append(tape)

    def random_position(self) -> Any:
        return torch.get_rng_state(), [g.get_state() for g in self.generators]

    def return_to(self, position: Any) -> None:
        default, others = position
        torch.set_rng_state(default)
        for generator, state in zip(self.generators, others, strict=True):
            generator.set_state(state)

    def current_stream(self) -> None:
        return None

    def wait_for(self, stream: None) -> None:
        pass

    def meter(self) -> StorageMeter:
        return StorageMeter()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def pool_bytes(self, pool: None) -> int:
        return 0

    def release(self) -> None:
        pass
