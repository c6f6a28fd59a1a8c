"""CUDA graphs, driven through ``capture_begin`` and ``capture_end``.

``torch.cuda.graph`` is not used. It synchronises and empties the cache once per graph, and up to
torch 2.14 it leaves the capture stream current when a capture fails. Here one session holds the
stream for all captures, and every exit is in a ``finally``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from moe_graphs.engine.backends.backend import Backend, Graph, MemoryMeter, RecordedDraws
from moe_graphs.engine.snapshot import no_garbage_collection
from moe_graphs.engine.tensors import span_bytes
from moe_graphs.weight_codes import made_apart

_LARGE_POOL = 64 << 20


class CudaGraph(Graph):
    def __init__(self, graph: torch.cuda.CUDAGraph, draws: GeneratorDraws | None = None) -> None:
        self.graph: torch.cuda.CUDAGraph | None = graph
        self._draws = draws

    @functools.cached_property
    def kernels(self) -> int | None:
        return None if self.graph is None else _count_kernels(self.graph)

    def replay(self) -> None:
        assert self.graph is not None
        if self._draws is not None:
            self._draws.follow()
        self.graph.replay()

    def release(self) -> None:
        if self.graph is not None:
            self.graph.reset()
            self.graph = None


class GeneratorDraws(RecordedDraws):
    """Generators of recomputations: each begins where the default one was before their forward.

    A graph adds what it has drawn so far to the offset that a generator has when it is replayed. No
    recorded operation can go back, so each recomputation draws from a generator of its own, by
    torch's ``graphsafe_set_state``.
    """

    def __init__(self, default: torch.Generator, begins: Sequence[int | None]) -> None:
        super().__init__(begins)
        self._default = default
        self.generators = {
            number: torch.Generator(default.device)
            for number, begin in enumerate(begins)
            if begin is not None
        }

    @contextlib.contextmanager
    def again(self, number: int) -> Iterator[None]:
        if number not in self.generators:
            yield
            return
        around = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self.generators[number])
        try:
            yield
        finally:
            self._default.graphsafe_set_state(around)

    def follow(self) -> None:
        """Places all generators by the default one, before a replay."""
        seed, offset = self._default.initial_seed(), self._default.get_offset()
        for number, generator in self.generators.items():
            generator.manual_seed(seed)
            generator.set_offset(offset + (self.begins[number] or 0))


class AllocatorMeter(MemoryMeter):
    """Reads the allocator, so memory that operations allocate inside counts, too.

    ``torch.cuda``'s peak statistics begin anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> AllocatorMeter:
        self.restart()
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def alive(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def restart(self) -> None:
        self._before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)


class CudaGraphs(Backend):
    """The backend for models on a CUDA device."""

    name = "cuda graphs"

    def __init__(
        self,
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.device = device
        self.generators = tuple(generators)
        # All captures of an engine use one stream: the allocator reuses blocks within a stream
        # only.
        self.stream = stream or torch.cuda.Stream(device)
        self._workspaces: list[Graph] = []  # these graphs keep a pool alive that has nothing else
        self._pool_of_workspaces: Any = None
        self._pieces: dict[Any, int] = {}  # bytes of pools in which nothing was captured yet

    def make_room(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def memory_of_its_own(self) -> Iterator[None]:
        torch.cuda.empty_cache()  # what is free may have to become other segments
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(), self.device):
            yield

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def new_pool(self, nbytes: int = 0) -> Any:
        """A pool that begins with one piece, if ``nbytes`` is large.

        Small tensors (below 1 MiB) do not lie in such a piece, so a small pool could take twice as
        much.
        """
        pool = torch.cuda.graph_pool_handle()
        self._pieces[pool] = nbytes
        return pool

    def new_draws(self, begins: Sequence[int | None]) -> GeneratorDraws:
        return GeneratorDraws(self._default_generator, begins)

    @contextlib.contextmanager
    def record(self, pool: Any, draws: RecordedDraws | None = None) -> Iterator[list[Graph]]:
        self._make_workspaces()
        with made_apart(), self._record(pool, draws) as graphs:
            self.cache_piece(self._pieces.pop(pool, 0))  # it stays with the pool
            yield graphs

    def cache_piece(self, nbytes: int) -> None:
        if nbytes < _LARGE_POOL or _pieces_are_not_split():
            return
        # Without memory for one piece the allocator takes several. A tensor might be filled.
        with contextlib.suppress(torch.OutOfMemoryError):
            piece = torch.cuda.caching_allocator_alloc(nbytes)
            torch.cuda.caching_allocator_delete(piece)

    def _make_workspaces(self) -> None:
        """Makes cuBLAS's workspace for this thread and stream.

        The first product on a thread and stream makes a workspace, and recorded products write to
        it. If it were made outside of a capture, it would be unmapped when somebody clears
        workspaces. If it lay in a pool of other captures, they would get its memory after that. The
        thread's handle cannot be made in a capture, and no product may have run yet.
        """
        torch.cuda.current_blas_handle()
        torch._C._cuda_clearCublasWorkspaces()
        before = self._workspaces
        if not before:
            self._pool_of_workspaces = self.new_pool()
        with _disable_current_modes(), self._record(self._pool_of_workspaces) as self._workspaces:
            _multiply(self.device)
        for graph in before:
            graph.release()

    @contextlib.contextmanager
    def _record(self, pool: Any, draws: RecordedDraws | None = None) -> Iterator[list[Graph]]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graphs: list[Graph] = []
        own = draws if isinstance(draws, GeneratorDraws) else None
        for generator in (*self.generators, *(own.generators.values() if own else ())):
            graph.register_generator_state(generator)
        with no_garbage_collection(), self.on_stream():
            # The mode is thread_local because a data loader's or NCCL's thread may call CUDA during
            # the capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield graphs
            except BaseException:
                self._abort(graph, pool)
                raise
            graph.capture_end()
        graph.instantiate()
        graphs.append(CudaGraph(graph, own))

    def random_position(self) -> Any:
        generators = (self._default_generator, *self.generators)
        return [(generator.initial_seed(), generator.get_offset()) for generator in generators]

    def return_to(self, position: Any) -> None:
        generators = (self._default_generator, *self.generators)
        for generator, (seed, offset) in zip(generators, position, strict=True):
            generator.manual_seed(seed)
            generator.set_offset(offset)

    @property
    def _default_generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index or 0]

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def wait_for(self, stream: Any) -> None:
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _abort(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Ends a capture that failed, also one that CUDA has invalidated.

        ``capture_end`` raises for an invalidated capture before it tells the allocator and the
        random number generator that the capture is over (torch 2.11). So this function tells the
        allocator directly, and the generator by an empty capture that succeeds.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
            try:
                graph.capture_end()
            except RuntimeError:
                index = self.device.index or 0
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
                empty = torch.cuda.CUDAGraph()
                empty.capture_begin(capture_error_mode="thread_local")
                empty.capture_end()
                empty.reset()
        graph.reset()

    def meter(self) -> AllocatorMeter:
        return AllocatorMeter(self.device)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = torch._C._construct_storage_from_data_pointer(
            tensor.data_ptr(), tensor.device, span_bytes(tensor)
        )
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, 0, tensor.shape, tensor.stride())

    def pool_bytes(self, pool: Any) -> int:
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(pool)
        )

    def release(self) -> None:
        for graph in self._workspaces:
            graph.release()
        self._workspaces = []
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _pieces_are_not_split() -> bool:
    """Whether the user's options forbid the allocator to split blocks."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    given = " ".join(os.environ.get(name, "") for name in names)
    return "max_split_size_mb" in given or "cudaMallocAsync" in given


def _multiply(device: torch.device) -> None:
    """Runs one product by each of cuBLAS's two libraries."""
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        torch.addmm(ones[0], ones, ones)
        torch.mm(ones, ones)


def _count_kernels(graph: torch.cuda.CUDAGraph) -> int | None:
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    raw = runtime.cudaGraph_t(init_value=graph.raw_cuda_graph())
    status, _, count = runtime.cudaGraphGetNodes(raw)
    if status != runtime.cudaError_t.cudaSuccess:
        return None
    status, nodes, count = runtime.cudaGraphGetNodes(raw, count)
    kernel = runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel
    return sum(runtime.cudaGraphNodeGetType(node)[1] == kernel for node in nodes[:count])
