"""Runs a block eagerly and sees every operation; tries a block beside the real run.

Operations that cannot be in a graph are refused by name and source line. Tensors from outside that
the block writes can be put back.

Scopes and callables (`partial/trials.py`) and whole steps (`whole_step/capture_step.py`) try what
they are about to capture. A `TrialRun` refuses by name what a graph cannot have. A `Snapshot` puts
back what the block has changed. An error in a trial run or in a capture becomes a `CaptureError`
with the line that it comes from (`explaining_errors`).
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from moe_graphs.engine.checkpointing import Checkpoints, hooks_of_others
from moe_graphs.engine.guards.bytecode_names import AccessedNames, unwatched
from moe_graphs.engine.ranks import groups_in
from moe_graphs.engine.reasons import remedy_at
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import (
    address,
    communicates,
    finished,
    has_no_values,
    is_wrapped,
    is_wrapper,
    namespace_of,
    noting_resizes,
    per_operation,
    tensor_leaves,
    unwrap,
)
from moe_graphs.errors import CaptureError
from moe_graphs.weight_codes import made_apart

if TYPE_CHECKING:  # backends import this file
    from moe_graphs.engine.backends.backend import Backend

# Reads of tensor values that never reach the dispatcher on the CPU.
_HOST_READS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}
_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray}  # they read tensors in lists
_VALUE_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Autograd itself makes these calls where hooks on saved tensors are in force. They compute nothing.
_OF_AUTOGRAD = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
MODIFIED_INPUT = (
    "which a replay would do to its own copy only: clone it before modifying it (inplace=False)"
)
# These operations change their fourth and fifth argument, but their schemas do not say so.
_WITH_RUNNING_STATISTICS = tuple(
    getattr(torch.ops.aten, name)
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)
# Backwards of attention on GPUs, which torch documents as not deterministic.
_ADDING_IN_ANY_ORDER = {
    f"{name}_backward"
    for name in (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention",
        "aten::_efficient_attention",
        "aten::_cudnn_attention",
        "torch_attn::_varlen_attn",
    )
}
_HOST_READ = (
    "reads values on the host, which a graph cannot replay: keep them in tensors on the device "
    "(torch.where in place of if), read them outside of what is captured, or choose scopes that "
    "leave this module out"
)
_OTHER = (
    "that is neither an input nor a parameter or buffer of the model, and that no guard finds, and "
    "a graph would keep reading its address: register it as a buffer, pass it as an argument, or "
    "name it in FullIteration(state=...)"
)
_LOOP_OVER_EXPERTS = " (MoELayer.from_experts converts a loop over experts: docs/own_block.md)"


_PACKAGE = pathlib.Path(__file__).parent.parent
_TORCH = str(pathlib.Path(torch.__file__).parent)
_NOT_OF_THE_USER = (
    _TORCH,
    str(_PACKAGE / "engine"),
    str(_PACKAGE / "staged.py"),
    contextlib.__file__,
    "<",
)


def is_of_the_user(filename: str) -> bool:
    """Whether a line of code belongs neither to torch nor to the engine."""
    return not filename.startswith(_NOT_OF_THE_USER)


def frame_of_the_user(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from this one on that is the user's."""
    while frame is not None and not is_of_the_user(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


_PLAIN_ARGUMENTS = (
    int, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def source_line(summary: traceback.StackSummary) -> str:
    """The innermost line that is the user's."""
    for frame in reversed(summary):
        if is_of_the_user(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown source line"


class DispatchMode(TorchDispatchMode):
    """A dispatch mode without the wrapper that keeps dynamo out.

    Nothing is compiled under these modes, and the wrapper takes longer than most operations. If an
    operation runs on a wrapper of a tensor (DTensor), subclasses see the operation on the inner
    tensor, in ``see``. Inside, no codes of weights from outside are used.
    """

    def __enter__(self) -> Self:
        self._apart = made_apart()
        self._apart.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._apart.__exit__(None, None, None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(is_wrapper, types)):
            return NotImplemented
        if has_no_values(types, kwargs):
            return func(*args, **kwargs)
        out = self.see(func, args, kwargs)
        return finished(func, args, out) if communicates(func) else out

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operation."""
        raise NotImplementedError


class Origins:
    """The origins of the memory that operations work on, in names that later runs use again.

    | memory | name |
    |---|---|
    | made by an operation of the run | the operation's number, and the number of the output |
    | there before, at an address that lasts (parameters, static inputs) | this address |
    | a caller's input of a later run | the address of the static input in its place |
    | named by the engine (incoming gradients) | that name |
    | constants that Python has put into a tensor on the CPU | their values |
    | anything else that was there before | its number, in the order of the first use |

    Memory is known by the object that holds it, not by its address, because freed memory is soon
    used again. Nothing is kept alive.

    Args:
        by_address: whether unnamed memory that was there before has an address that lasts.
    """

    def __init__(self, *, by_address: bool) -> None:
        self.by_address = by_address
        # id of the storage -> its name, its address if that lasts, and the first element of the
        # tensor that was named.
        self._found: dict[int, tuple[Any, int | None, int]] = {}
        self._references: list[StorageWeakRef] = []  # no later storage gets a known identity
        self._others = self._operations = 0

    def stands_in(self, tensor: Tensor, static: Tensor) -> None:
        """Names the tensor's memory as that of ``static``, which a capture has in its place."""
        tensor, static = unwrap(tensor), unwrap(static)
        if tensor.layout is torch.strided:
            base = static.untyped_storage().data_ptr()
            moved = (static.storage_offset() - tensor.storage_offset()) * tensor.itemsize
            self._note(tensor.untyped_storage(), "at", base + moved)

    def go_on_in_backward(self, incoming: Sequence[Tensor], module: nn.Module) -> None:
        """Goes on behind a forward, and names the incoming gradients.

        Parameters and buffers of the module have addresses that last, also those that the forward
        has not used. Nothing is known of the addresses of other memory that a backward finds.
        """
        self.by_address = False
        for tensor in (*module.parameters(), *module.buffers()):
            if not (is_wrapped(tensor) or self.has(tensor)):
                self.stands_in(tensor, tensor)
        for number, gradient in enumerate(incoming):
            self.call(gradient, f"incoming gradient {number}")

    def call(self, tensor: Tensor, name: str) -> None:
        """Names the tensor's memory. Where it lies within larger memory does not matter."""
        tensor = unwrap(tensor)
        if tensor.layout is torch.strided:
            self._note(tensor.untyped_storage(), name, None, tensor.storage_offset())

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory has a name."""
        tensor = unwrap(tensor)
        is_strided = tensor.layout is torch.strided
        return is_strided and tensor.untyped_storage()._cdata in self._found

    def is_made(self, tensor: Tensor) -> bool:
        """Whether an operation of the run has made the tensor's memory."""
        tensor = unwrap(tensor)
        is_strided = tensor.layout is torch.strided
        known = self._found.get(tensor.untyped_storage()._cdata) if is_strided else None
        return known is not None and isinstance(known[0], tuple)

    def of(self, tensor: Tensor) -> tuple[Any, ...]:
        """The name of the tensor's memory, and where and how the tensor lies in it."""
        tensor = unwrap(tensor)
        if tensor.layout is not torch.strided:
            return (str(tensor.layout),)
        storage = tensor.untyped_storage()
        found = self._found.get(storage._cdata)
        if found is None:
            found = self._of_before(storage)
        name, base, first = found
        where = tensor.storage_offset() - first
        if base is not None:
            where = base + where * tensor.itemsize if tensor.numel() else 0
        pairs = zip(tensor.stride(), tensor.shape, strict=True)
        return (name, where, tuple(stride for stride, size in pairs if size != 1))

    def made(self, func: Any, out: Any) -> None:
        """Names the memory that an operation has made."""
        number, self._operations = self._operations, self._operations + 1
        for index, tensor in enumerate(tensor_leaves(out)):
            tensor = unwrap(tensor)
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._found:
                is_python = func is _LIFT_FRESH and tensor.is_cpu
                name = _values_of(tensor) if is_python else (number, index)
                self._note(storage, name, None)

    def _of_before(self, storage: torch.UntypedStorage) -> tuple[Any, int | None, int]:
        if self.by_address:
            return self._note(storage, "at", storage.data_ptr())
        self._others += 1
        return self._note(storage, f"other memory {self._others}", None)

    def _note(
        self, storage: torch.UntypedStorage, name: Any, base: Any, first: Any = 0
    ) -> tuple[Any, int | None, int]:
        self._references.append(StorageWeakRef(storage))
        self._found[storage._cdata] = found = (name, base, first)
        return found


def _values_of(tensor: Tensor) -> str:
    if tensor.numel() <= 16:
        return f"the values {tensor.tolist()}"
    values = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"values with the digest {hashlib.blake2b(values, digest_size=8).hexdigest()}"


class Operations(DispatchMode):
    """A context that notes which operations run inside.

    Args:
        origins: names the memory that operations work on; without it, memory is not noted.

    Attributes:
        ops: the operations, each with shapes and constants.
        memory: for each operation, the origins of its tensors.
        groups: process groups over which they communicate.
        checkpoint: what looks after torch's checkpoint inside.
    """

    def __init__(
        self, origins: Origins | None = None, checkpoint: Checkpoints | None = None
    ) -> None:
        super().__init__()
        self.origins = origins
        self.ops: list[tuple[Any, ...]] = []
        self.memory: list[tuple[Any, ...]] = []
        self.groups: set[dist.ProcessGroup] = set()
        self.checkpoint = checkpoint or Checkpoints()

    def __enter__(self) -> Self:
        self.checkpoint.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.checkpoint.__exit__(*exception)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note(func, args, kwargs)
        out = func(*args, **kwargs)
        self._note_made(func, out)
        return out

    def rounding_of_any_order(self) -> float:
        """The coarsest rounding (eps) of the operations that add with atomics; 0 without any.

        Their sums vary from one run to the next by such roundings, and so does what is computed
        from the sums, in whatever dtype.
        """
        if torch.are_deterministic_algorithms_enabled():
            return 0.0
        dtypes = {
            described[1]
            for func, arguments, _ in self.ops
            if _name_of(func) in _ADDING_IN_ANY_ORDER
            for described in arguments
            if _is_described_tensor(described)
        }
        floating = [each for each in dtypes if each.is_floating_point]
        return max((torch.finfo(each).eps for each in floating), default=0.0)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _computes_nothing(func):
            return
        self.groups.update(groups_in(func, args, kwargs))
        memory: tuple[Any, ...] = ()
        if self.origins is not None and func is not _LIFT_FRESH:
            memory = tuple(map(self.origins.of, tensor_leaves((args, kwargs))))
        self._add(_described(func, args, kwargs), memory)

    def _note_made(self, func: Any, out: Any) -> None:
        if self.origins is not None and not _computes_nothing(func):
            self.origins.made(func, out)

    def _add(self, op: tuple[Any, ...], memory: tuple[Any, ...]) -> None:
        self.ops.append(op)
        self.memory.append(memory)


# Functions that every ``Trace`` calls with the arguments and the results of an operation.
listeners: list[Callable[[Any, Any], None]] = []


class Trace(Operations):
    """A context that sees every operation on tensors and checks it.

    Args:
        device: the device of the graphs. Operations on other devices do not concern a graph.
        known: memory from outside whose reads are noted: inputs, parameters, buffers.
        strict: whether other memory is noted that no operation of this block made, because its
            address would be baked into a graph.
        inputs: tensors that the block must not modify, by name.
        generators: the random number generators that a graph knows, besides the default ones.
        refuse: whether to refuse what a graph cannot have; otherwise writes are only noted.
        before: the snapshot that gets what is written outside of the block, to put it back.
        before_others: the snapshot for this, if it is only to get what is written of ``others``.
        in_step: whether the block is a whole step.

    Attributes:
        read: addresses of memory from outside that was read, or written.
        written: addresses of the memory from outside that was written.
        others: what was read of memory that is not known, by address, each with its refusal.

    Raises:
        CaptureError: inside the block, with operation and source line.
    """

    def __init__(
        self,
        device: torch.device,
        known: Iterable[Tensor] = (),
        *,
        strict: bool = True,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
        generators: Sequence[torch.Generator] = (),
        refuse: bool = True,
        before: Snapshot | None = None,
        before_others: Snapshot | None = None,
        in_step: bool = False,
    ) -> None:
        super().__init__(checkpoint=Checkpoints(device) if in_step else None)
        self._device, self._strict, self._refuse, self._before = device, strict, refuse, before
        self._before_others = before_others
        self._known = {address(tensor) for tensor in known}
        self._inputs = {address(t): name for name, t in inputs.items() if t.numel()}
        all_of_them: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
        self._generators = {generator._cdata for generator in (*all_of_them, *generators)}
        self._made: set[int] = set()
        self._taken: set[int] = set()  # memory that was taken by its storage alone
        self._from_python: set[int] = set()  # memory on the CPU whose values are constants
        self._kept: set[tuple[Any, ...]] = set()
        self._host_reads = _RefuseHostReads(self._from_python)
        self.read: set[int] = set()
        self.written: set[int] = set()
        self.others: dict[int, tuple[Tensor, str]] = {}  # it stays alive, so its address stays
        self._resizes = noting_resizes(self._allocated)
        self._runs_no_python = False

    def __enter__(self) -> Self:
        with unwatched():
            around = _get_current_dispatch_mode_stack()
            self._runs_no_python = all(isinstance(mode, DispatchMode) for mode in around)
            self._runs_no_python &= _kernels_are_those_of_torch()
        if self._refuse:
            self._host_reads.__enter__()
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._resizes.__exit__(None, None, None)
        if self._refuse:
            self._host_reads.__exit__(*exception)
        # This object lives longer than the copies are needed.
        self._before = self._before_others = None

    def check_others(self, guarded: Iterable[Tensor]) -> list[Tensor]:
        """Checks that guards compare all unknown memory that was read; returns it.

        Args:
            guarded: tensors that guards compare and hold, such as plain attributes and caches.

        Raises:
            CaptureError: for memory that no guard compares, with operation and source line.
        """
        found = {where: each for each in guarded if (where := address(each)) in self.others}
        missing = [message for where, (_, message) in self.others.items() if where not in found]
        self.others = {where: (each, "") for where, each in found.items()}
        if missing:
            raise CaptureError(missing[0])
        return list(found.values())

    def _allocated(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if nbytes:
            self._made.add(storage.data_ptr())

    def goes_on_from(self, other: Trace) -> Trace:
        """Continues the trace of a forward in its backward.

        Memory that the forward made does not count as outside.
        """
        self._made, self._taken = other._made, other._taken
        return self

    def check_outputs(self, outputs: Iterable[Any]) -> None:
        """Checks that operations of the block made its outputs, or that they are known memory.

        Raises:
            CaptureError: if something else has made an output: another thread, numpy, a cache.
        """
        known = self._made | self._taken | self._known | self.others.keys()
        for output in tensor_leaves(outputs) if self._strict else ():
            is_strided = output.device.type == self._device.type and address(output) != 0
            if is_strided and address(output) not in known:
                raise CaptureError(
                    f"no operation that was seen has made the output {tuple(output.shape)}: "
                    f"another thread may have, or a cache or numpy, and a replay would hand out "
                    f"the one of the capture for ever: compute it with torch on this thread"
                )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unwatched() as here:  # nine tenths of all calls are the engine's own inside of it
            if types or not self._runs_no_python or namespace_of(func) != "aten":
                here.end()
            return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with unwatched():
            found = tensor_leaves((args, kwargs))
            tensors = [tensor for tensor in found if tensor.device.type == self._device.type]
            if self._refuse:
                self._check(func, args, kwargs, tensors)
            if func is not _LIFT_FRESH:
                self._note_memory(func.overloadpacket, tensors)
            self._note(func, args, kwargs)
            self._keep_what_is_written(func, args, kwargs)
            # ``lift_fresh`` gets a tensor that Python made inside of the block.
            given = set() if func is _LIFT_FRESH else set(map(address, found))
            given |= self._taken_by_storage(args)
        # The implementation of an operation may look at values (a custom op on the CPU), but it
        # counts as one operation.
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
        with unwatched():
            for listener in listeners:
                listener((args, kwargs), out)
            made = {address(tensor) for tensor in tensor_leaves(out)}
            self._made |= made - given  # a view of outside memory is outside memory
            if func is _LIFT_FRESH and self._device.type != "cpu":
                self._from_python |= {address(t) for t in tensor_leaves(out) if t.is_cpu}
            elif not func.is_view:
                self._from_python -= made
        return out

    def _taken_by_storage(self, args: tuple[Any, ...]) -> set[int]:
        """Notes as read what an operation takes by its storage alone, as ``deepcopy`` does.

        Nobody can tell a new storage from one that a tensor outside has. So both count as read, and
        what is written there is put back.
        """
        storages = (each for each in args if isinstance(each, torch.UntypedStorage))
        taken = {each.data_ptr() for each in storages} - {0} - self._made
        self.read |= taken
        self._taken |= taken
        return taken

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        operation = func.overloadpacket
        if (tensors or not tensor_leaves(args)) and _depends_on_values(func, args):
            of_indices = operation is torch.ops.aten.nonzero
            _refuse(operation, _HOST_READ + (_LOOP_OVER_EXPERTS if of_indices else ""))
        generator = kwargs.get("generator")
        if generator is not None and generator._cdata not in self._generators:
            _refuse(
                operation,
                "draws from a generator that the graphs do not know: pass generators=[...]",
            )
        if self._strict:
            self._check_hooks(operation)

    def _check_hooks(self, operation: Any) -> None:
        if hooks_of_others():
            _refuse(
                operation,
                "runs under saved-tensor hooks (offloading), which a replay does not run: leave "
                "this part out of the scopes",
            )

    def _note_memory(self, operation: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            where = address(tensor)
            if where in self._known:
                self.read.add(where)
            elif tensor.numel() and where not in self._made | self._taken:
                self.read.add(where)
                if self._strict and where not in self.others:
                    shape = tuple(tensor.shape)
                    self.others[where] = (
                        tensor,
                        _named(operation, f"reads a tensor {shape} {_OTHER}"),
                    )

    def _keep_what_is_written(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for tensor in written_arguments(func, args, kwargs):
            where = address(tensor)
            if where in self._made:
                continue
            self.written.add(where)
            if where in self._inputs:
                raise CaptureError(
                    f"input {self._inputs[where]!r} is modified in place by "
                    f"{func.overloadpacket}, {MODIFIED_INPUT}"
                )
            key = (where, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            is_other = where in self.others or where in self._taken
            before = self._before_others if is_other else None
            before = self._before or before
            if before is not None and key not in self._kept:
                self._kept.add(key)
                before.keep(tensor)


# Kernels in Python, as ``torch.library`` names them, of other operations or only for shapes.
_OTHER_KERNELS: set[str] = set()


def _kernels_are_those_of_torch() -> bool:
    """Whether nobody else has given one of torch's own operations a kernel in Python."""
    registered = getattr(torch.library, "_impls", None)
    if registered is None:
        return False
    found = registered - _OTHER_KERNELS
    _OTHER_KERNELS.update(k for k in found if k[:5] != "aten/" or k.endswith("/Meta"))
    names = (key.split("/")[1] for key in found - _OTHER_KERNELS)
    lines = (line for n in names for line in torch._C._dispatch_dump(f"aten::{n}").splitlines())
    return all(map(_is_registered_by_torch, (line for line in lines if ".py:" in line)))


def _is_registered_by_torch(line: str) -> bool:
    """Whether a line of a dispatch table names a file of torch that no caller registers through."""
    _, _, file = line.partition(f" {_TORCH}/")
    return file != "" and not file.startswith(("library.py", "_library/"))


@per_operation
def _computes_nothing(func: Any) -> bool:
    """Whether an operation belongs to autograd's hooks, or marks a range for a profiler."""
    return func in _OF_AUTOGRAD or func.namespace == "profiler"


def differing_op(first: Operations, second: Operations) -> str | None:
    """The first operation in which two runs of the same block differ, or None."""
    for number, (a, b) in enumerate(zip(first.ops, second.ops, strict=False)):
        if a != b:
            return f"operation {number} is {shown(a)} in one run and {shown(b)} in the next"
    if len(first.ops) != len(second.ops):
        return f"one run has {len(first.ops)} operations, the next {len(second.ops)}"
    return None


def _refuse(operation: Any, problem: str) -> None:
    raise CaptureError(_named(operation, problem))


def _named(operation: Any, problem: str) -> str:
    return f"{operation} {problem}, at {source_line(traceback.extract_stack())}"


class _RefuseHostReads(TorchFunctionMode):
    def __init__(self, from_python: set[int]) -> None:
        super().__init__()
        self._from_python = from_python

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func in _HOST_READS and address(args[0]) not in self._from_python) or (
            func in _MAKERS and isinstance(args[0], (list, tuple)) and tensor_leaves(args[0])
        ):
            _refuse(f"Tensor.{func.__name__}", _HOST_READ)
        return func(*args, **(kwargs or {}))


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    if func.overloadpacket is torch.ops.aten.index:
        masks = (torch.bool, torch.uint8)
        return any(i is not None and i.dtype in masks for i in args[1])
    return _has_value_tag(func)


@per_operation
def _has_value_tag(func: Any) -> bool:
    return any(tag in func.tags for tag in _VALUE_TAGS)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation that it writes in place."""
    if func.overloadpacket in _WITH_RUNNING_STATISTICS:
        yield from tensor_leaves(args[3:5])
    for number, name in _written_by(func):
        yield from tensor_leaves(args[number] if number < len(args) else kwargs.get(name))


@per_operation
def _written_by(func: Any) -> list[tuple[int, str]]:
    """The numbers and names of the arguments that an operation writes by its schema."""
    arguments = enumerate(func._schema.arguments)
    return [(n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    # The caller decides whether a default of None is passed along, so it is left out.
    given = tuple((key, _plain(value)) for key, value in kwargs.items() if value is not None)
    return (func, _plain(args), given)


def _name_of(func: Any) -> str:
    return func.name().partition(".")[0] if isinstance(func, torch._ops.OpOverload) else str(func)


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN_ARGUMENTS:
        return value
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, float):
        return repr(value)  # NaN is NaN here
    if isinstance(value, _PLAIN_ARGUMENTS):
        return value
    return type(value).__name__


def _is_described_tensor(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)


def shown(op: tuple[Any, ...]) -> str:
    """A described operation for messages."""
    func, args, kwargs = op
    values = [str(a) for a in args] + [f"{key}={value}" for key, value in kwargs]
    return f"{func.overloadpacket}({', '.join(values)})"


# ---- a trial run: which operations and which Python run, before anything is captured


class TrialRun:
    """A context around one run of a block.

    Args:
        known: memory from outside that the block may read.
        before: the snapshot that gets what the block writes; None if the caller has one already.
        before_others: the snapshot of memory that the caller's snapshot does not know, or None.
        inputs: tensors that the block must not modify, by name.
        strict: whether reads of any other memory from outside are noted (``Trace.others``).
        behind: the trial run of the forward, if the block is its backward.
        in_step: whether the block is a whole step.

    Attributes:
        accessed: which Python ran.
        trace: which operations ran, the memory that they read, and the process groups over which
            they communicated.

    Raises:
        CaptureError: inside of the block, for an operation that cannot be in a graph.
    """

    def __init__(
        self,
        backend: Backend,
        known: Iterable[Tensor] = (),
        *,
        before: Snapshot | None = None,
        before_others: Snapshot | None = None,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
        strict: bool = True,
        behind: TrialRun | None = None,
        in_step: bool = False,
    ) -> None:
        self.accessed = AccessedNames(in_step=in_step, refuse=True)
        self.trace = Trace(
            backend.device,
            known,
            strict=strict,
            inputs=inputs,
            generators=backend.generators if behind is None else (),
            before=before,
            before_others=before_others,
            in_step=in_step,
        )
        if behind is not None:
            self.trace.goes_on_from(behind.trace)
        self._has_backward = in_step or behind is not None

    def __enter__(self) -> TrialRun:
        self._threads = _on_this_thread() if self._has_backward else contextlib.nullcontext()
        self._threads.__enter__()
        self.accessed.__enter__()
        self.trace.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self.trace.__exit__(*exception)
        finally:
            self.accessed.__exit__(*exception)
            self._threads.__exit__(*exception)

    def check(self, *, asked: frozenset[str] = frozenset()) -> None:
        """Checks the Python of the block, and puts back what it drew from Python and numpy.

        Args:
            asked: attributes of tensors whose values in a graph differ from those outside.

        Raises:
            CaptureError: for Python that a replay could not do again.
        """
        self.accessed.check_random()
        self.accessed.check_impure_calls(asked=asked)


def _on_this_thread() -> contextlib.AbstractContextManager[None]:
    """Context in which backwards run on this thread, where ``accessed`` can see them."""
    return torch.autograd.set_multithreading_enabled(False)


# ---- errors of captures, with what was captured and the line that they come from


@contextlib.contextmanager
def explaining_errors(what: str, backend: Backend, *, then: str) -> Iterator[None]:
    """Turns any error into a ``CaptureError`` that says where it came from and what runs now."""
    try:
        yield
    except CaptureError as error:
        _drop_leaked_hooks(error)
        raise CaptureError(f"{what} failed: {error}{remedy_at(str(error))}; {then}") from error
    except Exception as error:
        line = source_line(traceback.extract_tb(error.__traceback__))
        _drop_leaked_hooks(error)
        if isinstance(error, KeyError) and isinstance(error.args[0], torch.nn.Parameter):
            raise CaptureError(
                f"{what} failed: a dictionary is keyed by a parameter, at {line}: a capture runs "
                f"forwards on other parameters, which lie in the same memory: key it by the "
                f"parameter's name; {then}"
            ) from None
        raise CaptureError(
            f"{what} failed with {type(error).__name__}{backend.memory_note(error)}: {error}; at "
            f"{line}{remedy_at(line)}; {then}"
        ) from error


def explaining_errors_of(
    scope: str, direction: str, backend: Backend
) -> contextlib.AbstractContextManager[None]:
    """Turns errors in a scope's forward or backward (``direction``) into a ``CaptureError``."""
    what = f"scope {scope!r}: capture of its {direction}"
    return explaining_errors(what, backend, then="the model is eager again")


def _drop_leaked_hooks(error: BaseException) -> None:
    """Removes the saved-tensor hooks that an exception inside torch's checkpoint leaves in force.

    They stay as long as the traceback holds the frame of checkpoint's generator (torch 2.11).
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        traceback.clear_frames(error.__traceback__)
