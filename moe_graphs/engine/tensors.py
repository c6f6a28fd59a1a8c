"""Tensors and plain values of a call: what a graph was captured for, and how calls differ."""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from moe_graphs.engine.reasons import EAGER_CALLS, remedy_at
from moe_graphs.errors import GraphError

T = TypeVar("T")

# ---- plain Python values: the same bit for bit, not merely equal

# These types are compared by value, because nothing inside them can change.
PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range,
)  # fmt: skip
# These types are compared by identity; the guards follow what some of them hold.
BY_IDENTITY = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum,
    torch.Generator, property,
)  # fmt: skip


def is_plain(value: Any) -> bool:
    return type(value) in PLAIN


def same_value(a: Any, b: Any) -> bool:
    """Whether ``a`` may stand for ``b``: 0.0 is not -0.0, NaN is NaN, 1 is neither True nor 1.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, complex):
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same_value, a.values(), b.values()))
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # arrays compare element by element
        return False


# ---- tensors that wrap another one: a DTensor's memory is that of its local shard

_PLAIN = (Tensor, nn.Parameter)


def unwrap(tensor: Tensor) -> Tensor:
    """The inner tensor of a wrapper (the local shard of a DTensor), or the tensor itself.

    A wrapper of one tensor gives that very object; a wrapper of several tensors stays as it is.
    """
    while type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        inner = [part for part in parts if isinstance(part, Tensor)]
        if len(inner) != 1:
            break
        (tensor,) = inner
    return tensor


def is_wrapped(tensor: Tensor) -> bool:
    return unwrap(tensor) is not tensor


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) has changed the module's class, found without an import."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_wrapper(kind: type) -> bool:
    """Whether dispatch sees a wrapper class; its operations come once more on the inner tensor."""
    return is_traceable_wrapper_subclass_type(kind)


def has_no_values(kinds: tuple[type, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation only finds out shapes, as operations of DTensor do."""
    on_meta = "device" in kwargs and kwargs["device"] == torch.device("meta")
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    of_fake = bool(kinds) and any(kind.__name__ == "FakeTensor" for kind in kinds)
    return on_meta or is_fake or of_fake


# ---- signatures of calls

_CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}


@dataclass(frozen=True)
class Mismatch:
    """A difference from the capture: ``reason`` is the counter's key, ``message`` is for users."""

    reason: str
    message: str

    def error(self, where: str, others: Iterable[Mismatch]) -> GraphError:
        """The error that names this difference and the others of the same call, one a line."""
        messages = dict.fromkeys(each.message for each in (self, *others))
        return GraphError(f"{where}: " + "\nand ".join(messages))


def results_of(checks: Iterable[Callable[[], Mismatch | None]]) -> Iterator[Mismatch]:
    """The mismatches that the checks find, one check after the other."""
    for check in checks:
        found = check()
        if found is not None:
            yield found


@dataclass(frozen=True)
class TensorSpec:
    name: str
    kind: type[Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: torch.layout = torch.strided

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        layout = tensor.layout
        stride = tensor.stride() if layout is torch.strided else ()
        return cls(
            name,
            type(tensor),
            tuple(tensor.shape),
            stride,
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            layout,
        )

    def mismatch(self, value: Any) -> Mismatch | None:
        if (
            type(value) is self.kind
            and value.shape == self.shape
            and value.layout is self.layout
            and value.stride() == self.stride
            and value.dtype is self.dtype
            and value.device == self.device
            and value.requires_grad is self.requires_grad
        ):
            return None
        if not isinstance(value, torch.Tensor):
            message = f"input {self.name!r}: captured a tensor, got {value!r}: pass a tensor"
            return Mismatch("structure", message)
        return self._difference(TensorSpec.of(self.name, value))

    def unsupported(self) -> str | None:
        """The reason why no graph can have this tensor as an input, or None."""
        plain = self.kind in (torch.Tensor, torch.nn.Parameter)
        if plain and self.layout is torch.strided and not self._overlaps_itself():
            return None
        what = f"a {self.kind.__name__}"
        if plain:
            strided = self.layout is torch.strided
            what = "a view that overlaps itself" if strided else f"of layout {self.layout}"
        return f"input {self.name!r} is {what}: graphs take plain, strided tensors: convert it"

    def _overlaps_itself(self) -> bool:
        """Whether elements share memory except by expanding; copies into it would fail."""
        at = sorted((stride, size) for size, stride in zip(self.shape, self.stride, strict=True))
        reached = 0
        for stride, size in at:
            if size > 1 and stride > 0:
                if stride <= reached:
                    return True
                reached += (size - 1) * stride
        return False

    def _difference(self, got: TensorSpec) -> Mismatch | None:
        for field in ("shape", "dtype", "device", "requires_grad", "layout", "stride", "kind"):
            captured, now = getattr(self, field), getattr(got, field)
            if captured != now:
                message = f"input {self.name!r}: captured {field} {captured}, got {now}"
                return Mismatch(field, f"{message}: {EAGER_CALLS[field].remedy}")
        return None


@dataclass(frozen=True)
class ConstantSpec:
    """Any value but a tensor. It is frozen into the graph, so it must be the same at every call.

    ``Guards`` compare the contents of objects.
    """

    name: str
    value: Any

    def mismatch(self, value: Any) -> Mismatch | None:
        if value is self.value or same_value(value, self.value):
            return None
        message = (
            f"input {self.name!r}: captured the constant {self.value!r}, got {value!r}: "
            f"{EAGER_CALLS['constant'].remedy}{remedy_at(_file_of_class(value))}"
        )
        return Mismatch("constant", message)


def _file_of_class(value: Any) -> str:
    return type(value).__module__.replace(".", "/") + ".py"


@dataclass(frozen=True)
class Signature:
    """The structure, tensors and constants of a scope's inputs.

    Attributes:
        first: per leaf, the number of the first leaf that is the very same tensor (``attn(x, x,
            x)``). It matters because the forward may ask ``key is value``, and gradients add up in
            another order.
    """

    structure: pytree.TreeSpec
    leaves: tuple[TensorSpec | ConstantSpec, ...]
    first: tuple[int, ...]

    @classmethod
    def of(
        cls, inputs: Any, name_of: Callable[[tuple[Any, ...]], str] = pytree.keystr
    ) -> Signature:
        """Signature of ``inputs``.

        ``name_of`` turns the path of a leaf into the name that messages use.
        """
        paths, _ = pytree.tree_flatten_with_path(inputs)
        leaves = tuple(
            (TensorSpec.of if isinstance(leaf, torch.Tensor) else ConstantSpec)(name_of(path), leaf)
            for path, leaf in paths
        )
        return cls(flatten(inputs)[1], leaves, _first_of_each([leaf for _, leaf in paths]))

    def mismatches(self, structure: pytree.TreeSpec, leaves: Sequence[Any]) -> Iterator[Mismatch]:
        """The differences of a call. Reads no values and does not wait."""
        if structure is not self.structure and structure != self.structure:
            message = f"captured inputs {self.structure}, got {structure}: call it alike"
            yield Mismatch("structure", message)
            return  # leaves of another structure have no partners
        for spec, leaf in zip(self.leaves, leaves, strict=True):
            difference = spec.mismatch(leaf)
            if difference is not None:
                yield difference
        if len(leaves) > 1 and _first_of_each(leaves) != self.first:
            message = "captured with other arguments being the very same tensor: call it alike"
            yield Mismatch("aliases", message)

    def mismatch_of_memory(
        self, leaves: Sequence[Any], written: Iterable[Tensor], asked_for: Collection[int]
    ) -> Mismatch | None:
        """The first input that static memory cannot stand for, because others know it, or None.

        Args:
            written: tensors from outside that a replay modifies.
            asked_for: ids of tensors that the Python of the call compares with others by identity.
        """
        places = set(map(address, written)) - {0}
        for spec, leaf in zip(self.leaves, leaves, strict=True):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) in asked_for:
                message = (
                    f"input {spec.name!r} is an object that the code knows by another name as well "
                    f"and compares by identity (is, in), and a graph has another object in its "
                    f"place: pass a clone() of it and a flag"
                )
                return Mismatch("aliases", message)
            if address(leaf) in places:
                message = (
                    f"input {spec.name!r} lies in memory that is modified in place, and a graph "
                    f"would read a copy from before: pass a clone() of it"
                )
                return Mismatch("aliases", message)
        return None

    def fits(self, structure: pytree.TreeSpec, leaves: Sequence[Any]) -> bool:
        """Whether a call has no difference."""
        return next(self.mismatches(structure, leaves), None) is None

    def anew(self, leaves: Sequence[Any], make: Callable[[int, Tensor], Tensor]) -> list[Any]:
        """The leaves with ``make(number, tensor)`` for each tensor; the same one stays the same."""
        made: list[Any] = []
        for number, (first, leaf) in enumerate(zip(self.first, leaves, strict=True)):
            if not isinstance(leaf, Tensor):
                made.append(leaf)
            else:
                made.append(made[first] if first < number else make(number, leaf))
        return made

    def tensors(self) -> list[int]:
        """The numbers of the leaves that are tensors."""
        return [i for i, spec in enumerate(self.leaves) if isinstance(spec, TensorSpec)]

    def unsupported(self) -> str | None:
        found = (spec.unsupported() for spec in self.leaves if isinstance(spec, TensorSpec))
        return next((reason for reason in found if reason is not None), None)


@dataclass(frozen=True)
class OutputLeaf:
    """The source of a leaf of the outputs at replay.

    With "graph", ``value`` is an index into the graph's outputs; with "input", an index into the
    leaves of the inputs; with "constant", the leaf itself.
    """

    source: str
    value: Any


def leaves_of_outputs(
    sources: Sequence[OutputLeaf], produced: Sequence[Any], inputs: Sequence[Any]
) -> list[Any]:
    """The leaves of the outputs, from the tensors that a call has produced and from its inputs."""
    given, found = {"graph": produced, "input": inputs}, []
    for leaf in sources:
        is_constant = leaf.source == "constant"
        found.append(leaf.value if is_constant else given[leaf.source][leaf.value])
    return found


def flatten(inputs: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Flattens as ``pytree.tree_flatten`` does.

    Positional and keyword arguments are a pair. If all arguments are tensors by position, this
    takes a tenth of the time.
    """
    is_pair = type(inputs) is tuple and len(inputs) == 2 and type(inputs[0]) is tuple
    if is_pair and type(inputs[1]) is dict and not inputs[1]:
        for leaf in inputs[0]:
            if not isinstance(leaf, torch.Tensor):
                break
        else:
            return list(inputs[0]), _of_tensors(len(inputs[0]))
    return pytree.tree_flatten(inputs)


def unflattening(structure: pytree.TreeSpec) -> Callable[[list[Any]], Any]:
    """A function that does ``pytree.tree_unflatten`` for one structure.

    If the structure is a node with leaves only, this takes a fifth of the time.
    """
    if structure.is_leaf():
        return operator.itemgetter(0)
    node = pytree.SUPPORTED_NODES.get(structure.type)
    if node is None or structure.num_leaves != structure.num_nodes - 1:
        return functools.partial(pytree.tree_unflatten, treespec=structure)
    return lambda leaves: node.unflatten_fn(leaves, structure.context)


@functools.cache
def _of_tensors(count: int) -> pytree.TreeSpec:
    return pytree.tree_structure(((0,) * count, {}))


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a pytree, in order.

    Arguments of operations take a shorter way, because a watched operation asks several times.
    """
    kind = type(tree)
    if kind is torch.Tensor:
        return [tree]
    if kind in _CONSTANTS:
        return []
    if kind is tuple or kind is list or kind is dict:
        parts = tree.values() if kind is dict else tree
        return [tensor for part in parts for tensor in tensor_leaves(part)]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def detached(tree: Any) -> Any:
    """The pytree with its tensors detached; arguments of operations take a shorter way."""
    kind = type(tree)
    if kind is torch.Tensor:
        return tree.detach()
    if kind in _CONSTANTS:
        return tree
    if kind is tuple or kind is list:
        return kind(map(detached, tree))
    if kind is dict:
        return {key: detached(value) for key, value in tree.items()}
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _first_of_each(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Per leaf, the number of the first leaf that is the same tensor; constants have their own."""
    numbers: dict[int, int] = {}
    first = []
    for number, leaf in enumerate(leaves):
        is_tensor = isinstance(leaf, torch.Tensor)
        first.append(numbers.setdefault(id(leaf), number) if is_tensor else number)
    return tuple(first)


# ---- static buffers: memory at fixed addresses, and copies into and out of it


def static_copy(tensor: Tensor) -> Tensor:
    """Memory of its own with the same values and strides, also for gaps and expanded dimensions.

    Strides must be the same because kernels are chosen by strides.
    """
    made = static_like(tensor)
    copy_to(target_of(made), tensor.detach())
    return made


def apart(
    leaves: Sequence[Any], others: Iterable[Tensor] = (), first: Sequence[int] | None = None
) -> list[Any]:
    """The leaves; tensors that lie on the memory of an earlier one are copied, as in static memory.

    Args:
        others: tensors that come before all leaves.
        first: for each leaf the number of the first leaf that is the very same tensor; such leaves
            stay the same tensor.
    """
    made: list[Any] = []
    storages = set(map(storage_of, others))
    for number, leaf in enumerate(leaves):
        if first is not None and first[number] < number:
            made.append(made[first[number]])
            continue
        if isinstance(leaf, Tensor):
            storage = storage_of(leaf)
            leaf = static_copy(leaf) if storage and storage in storages else leaf
            storages.add(storage)
        made.append(leaf)
    return made


def address(tensor: Tensor) -> int:
    """The address of the storage; 0 for tensors without one (sparse tensors)."""
    tensor = unwrap(tensor)
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def storage_of(tensor: Tensor) -> int:
    """The identity of the tensor's storage; 0 for tensors without one (sparse tensors)."""
    tensor = unwrap(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def as_leaf(tensor: Tensor, requires_grad: bool, is_cached: bool | None = None) -> Tensor:
    """The tensor as a leaf of autograd.

    Autocast caches casts of leaves, and what a caller passes is no leaf. Where the cache is on, the
    leaf is a view, whose casts are not cached.

    Args:
        is_cached: whether the cache is on; None asks whether it is on now.
    """
    if is_cached is None:
        is_cached = torch.is_autocast_cache_enabled()
        is_cached = is_cached and torch.is_autocast_enabled(tensor.device.type)
    if requires_grad and is_cached:
        tensor = tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return tensor.requires_grad_(requires_grad)


def static_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def span_bytes(tensor: Tensor) -> int:
    """Bytes from the first element to the last one."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in pairs)) * tensor.element_size()


def target_of(static: Tensor) -> Tensor:
    """The tensor that copies into static memory write to.

    Autograd does not see these writes, because an open autograd graph may have saved the static
    tensor.
    """
    return _dense(static.data)


def copy_to(target: Tensor, value: Tensor) -> None:
    """Copies ``value``, which has the shape of the tensor that ``target`` was made of."""
    target.copy_(value if value.shape == target.shape else _narrowed(value, target))


def owned(tree: Any) -> Any:
    """The tree with detached copies of its tensors."""
    leaves, structure = pytree.tree_flatten(tree)
    return pytree.tree_unflatten(owned_leaves(leaves), structure)


@torch.no_grad()
def owned_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among the leaves, in few launches. The same tensor stays the same."""
    copies: dict[int, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in copies:
            copies[id(leaf)] = torch.empty_like(leaf, requires_grad=False)
    sources = {id(leaf): unwrap(leaf).detach() for leaf in tensor_leaves(leaves)}
    copy_all([unwrap(copies[key]) for key in sources], list(sources.values()))
    return [copies.get(id(leaf), leaf) for leaf in leaves]


@torch.no_grad()
def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def dense_pair(static: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The pair that ``copy_all`` takes to copy a value into static memory that may be expanded."""
    return target_of(static), _dense(value.detach())


def _narrowed(value: Tensor, target: Tensor) -> Tensor:
    """The part of an expanded value that an expanded target has memory for."""
    for dim, (size, kept) in enumerate(zip(value.shape, target.shape, strict=True)):
        if kept < size:
            value = value.narrow(dim, 0, kept)
    return value


def _dense(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that has memory of its own, which copies go to."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# ---- facts of operations; some communicate, and return work to wait for


def per_operation(find: Callable[[Any], T]) -> Callable[[Any], T]:
    """Keeps the answers of a function of an operation.

    ``functools.cache`` would ask for the operation's hash, which is Python of torch, at every call.
    """
    known: dict[int, tuple[Any, T]] = {}

    @functools.wraps(find)
    def ask(func: Any) -> T:
        found = known.get(id(func))
        if found is None:
            found = known[id(func)] = (func, find(func))  # kept alive, so that its id stays its own
        return found[1]

    return ask


@per_operation
def namespace_of(func: Any) -> str | None:
    return getattr(func, "namespace", None)


def communicates(func: Any) -> bool:
    return namespace_of(func) == "c10d"


def returns_work(func: Any) -> bool:
    """Whether its results have to be waited for: it communicates, by c10d or for DTensors."""
    return namespace_of(func) in ("c10d", "_c10d_functional")


def sends(func: Any) -> bool:
    """Whether an operation sends to one rank.

    That rank may receive much later, so waiting at once may take for ever.
    """
    return communicates(func) and func.overloadpacket.__name__ == "send"


def wait(results: Any) -> None:
    """Waits for communication that was just started: the next call may read what it writes."""
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, torch.ScriptObject):
            torch._C._distributed_c10d.Work.unbox(leaf).wait()


def arrived(func: Any, results: Any) -> None:
    """Waits for communication that returns tensors instead of work, as that of DTensors does."""
    if namespace_of(func) == "_c10d_functional":
        for tensor in tensor_leaves(results):
            torch.ops._c10d_functional.wait_tensor(tensor)


def finished(func: Any, args: tuple[Any, ...], results: Any) -> Any:
    """The results of an operation; for a reduce-scatter on the CPU only after they have arrived.

    gloo copies these results into place when somebody waits for them. The operations that copy
    would be seen, but they belong to this one.
    """
    on_cpu = any(tensor.is_cpu for tensor in tensor_leaves(args))
    if not on_cpu or "reduce_scatter" not in func.overloadpacket.__name__:
        return results
    wait(results)
    leaves, structure = pytree.tree_flatten(results)
    done = [_done() if isinstance(leaf, torch.ScriptObject) else leaf for leaf in leaves]
    return pytree.tree_unflatten(done, structure)


def _done() -> torch.ScriptObject:
    return torch._C._distributed_c10d.FakeWork().boxed()


# ---- storages whose memory comes and goes by ``resize_``
# FSDP2 gathers parameters into such storages. ``resize_`` is no operation, so no dispatch mode sees
# it.


@contextlib.contextmanager
def noting_resizes(note: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Calls ``note(storage, nbytes)`` after each ``storage.resize_(nbytes)`` from Python."""
    kind: Any = torch.UntypedStorage
    before, own = kind.resize_, vars(kind).get("resize_")

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        result = before(storage, nbytes)
        note(storage, nbytes)
        return result

    kind.resize_ = resize_
    try:
        yield
    finally:
        if own is None:
            del kind.resize_
        else:
            kind.resize_ = own
