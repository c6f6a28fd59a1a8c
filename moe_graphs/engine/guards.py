"""What a graph assumes of everything that its Python could read, checked at every call."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import guards as of_dynamo

from moe_graphs.engine.containers import GONE
from moe_graphs.engine.fp8 import is_bookkeeping
from moe_graphs.engine.hooks import are_of_fsdp, hooks_of, shown_hooks
from moe_graphs.engine.looking_into import check_not_keyed_by_weights, check_not_scripted
from moe_graphs.engine.reachable import Reachable, Walk
from moe_graphs.engine.reads import Reads, functions_of
from moe_graphs.engine.reasons import CAPTURE_AGAIN, EAGER_CALLS
from moe_graphs.engine.signature import Mismatch
from moe_graphs.engine.snapshot import state_of
from moe_graphs.engine.stand_for import local, stands_for_another
from moe_graphs.engine.tracing import address
from moe_graphs.engine.untouched import Untouched
from moe_graphs.engine.values import same_value
from moe_graphs.errors import CaptureError

_CODE_OF = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_TensorGuards = getattr(of_dynamo, "TensorGuards", None)
_SAME_ADDRESSES = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # with CUDA
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Guards:
    """Attributes, containers, globals, closures, tensors and hooks, as they were when it was made.

    Values are compared by value, functions and classes by identity, tensors by identity, address
    and layout. The quick answer is a few loops in C over the very objects; if any of these is
    another one, everything is looked up anew and compared by its path.

    Args:
        roots, reads, read_addresses, everything, tensor_names: as of ``Walk``.
        tensors: path -> more tensors whose address matters.
        outside: modules whose own hooks run outside of the block.
        sharded: the hooks of ``fully_shard`` may run inside.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        reads: Reads,
        read_addresses: Iterable[int] = (),
        *,
        everything: Mapping[str, Any] = _NOTHING,
        tensors: Mapping[str, Tensor] = _NOTHING,
        tensor_names: Mapping[int, str] = _NOTHING,
        outside: Iterable[nn.Module] = (),
        sharded: bool = False,
    ) -> None:
        self._outside, self._sharded = {id(module) for module in outside}, sharded
        self._arguments = (dict(roots), reads, frozenset(read_addresses), dict(everything))
        self._tensor_names, self._more = dict(tensor_names), dict(tensors)
        self._noisy: set[int] = set()
        found = self._walk()
        self._places = _place_of_each_tensor({**found.tensors, **self._more})
        self._where = Where(list(self._places.values()))
        self._adopt(found)

    @property
    def not_followed(self) -> list[str]:
        """What the block may have read and nobody compares, by name."""
        return sorted(set(self._found.not_followed))

    @property
    def functions(self) -> list[types.FunctionType]:
        """What may be called, whether it ran or not: methods of classes, too."""
        found = list(self._found.leaves.values())
        classes = [value for value in found if isinstance(value, type)]
        methods = chain.from_iterable(map(functions_of, classes))
        return [*(each for each in found if isinstance(each, types.FunctionType)), *methods]

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._places.values())

    def mismatch(self) -> Mismatch | None:
        """How things differ from the capture. Reads no tensor values."""
        if self._is_empty:
            return None
        if not self._is_untouched():
            difference = self._look_again()
            if difference is not None:
                return difference
        if any(self._hooks) or self._hooks_of_fsdp != [list(hooks) for hooks in self._with_fsdp]:
            return self._other_hooks()
        return None if self._where.is_same() else self._where.mismatch(list(self._places))

    def _other_hooks(self) -> Mismatch:
        """Name of the module that has hooks now, and whose they are."""
        inside = [(n, m) for n, m in self._found.modules if id(m) not in self._outside]
        hooked = (
            f"module {name or 'model'!r} has {shown_hooks(hooks)}"
            for name, module in inside
            if (hooks := [h for h in hooks_of(module) if h and not self._are_known(h)])
        )
        what = next(hooked, "a module that fully_shard has wrapped has other hooks")
        remedy = EAGER_CALLS["hooks"].remedy
        return Mismatch("hooks", f"{what} now, which a replay does not run: {remedy}")

    def changes(self) -> list[str]:
        """What is another value now, by its path and with both. State that an optimizer's first
        step has made is none of it."""
        found = self._walk()
        now = found.leaves
        drawn = [name for name, rng, state in self.draws if not _same_state(rng, state)]
        changed = [
            f"{name} ({_shown(before)} -> {_shown(now.get(name, GONE))})"
            for name, before in self._found.leaves.items()
            if not _same_leaf(now.get(name, GONE), before)
        ]
        late = tuple(self._found.made_late)
        new = [name for name in now if self._is_new(name) and not name.startswith(late)]
        orders = self._found.orders.items()
        moved = [name for name, order in orders if found.orders.get(name, order) != order]
        return [
            *(f"{name}, from which it draws" for name in drawn),
            *changed,
            *(f"{name} (new: {_shown(now[name])})" for name in new),
            *moved,
        ]

    def check_unchanged(self, where: str = "") -> None:
        """
        Raises:
            CaptureError: if a block that was run since has changed anything.
        """
        changes = self.changes()
        if changes:
            raise CaptureError(
                f"{where}it changes {changes[0]}, and a replay runs no Python: keep it in a buffer "
                f"that is changed in place, or change it outside of the scope"
            )

    def check_hooks(self) -> None:
        """
        Raises:
            CaptureError: if the block runs hooks of a module, or may advance an iterator.
        """
        self.check_followable()
        for name, module in self._found.modules:
            foreign = [each for each in hooks_of(module) if each and not self._are_known(each)]
            if foreign and id(module) not in self._outside:
                raise CaptureError(
                    f"module {name or 'model'!r} has {shown_hooks(foreign)}, which a replay does "
                    f"not run: remove them, or {self._scopes_without_hooks()}"
                )

    def _scopes_without_hooks(self) -> str:
        """A remedy that names a part of the scope in which no module has hooks, if there is one."""
        scope = self._arguments[0].get("")
        children = scope.named_children() if isinstance(scope, nn.Module) else ()
        for name, child in children:
            hooks = chain.from_iterable(map(hooks_of, child.modules()))
            if next(child.parameters(), None) is not None and not any(hooks):
                return f"choose scopes that have none inside: '*.{name}' is one"
        return "choose scopes that leave this module out"

    def check_keys(self) -> None:
        check_not_keyed_by_weights(self._found.containers)

    def check_followable(self) -> None:
        """
        Raises:
            CaptureError: if the block may advance an iterator, or run a compiled module.
        """
        check_not_scripted(self._found.leaves)
        if self._found.iterators:
            raise CaptureError(
                f"it reaches {self._found.iterators[0]!r}, an iterator, which a replay would not "
                f"advance: take what it gives outside, and pass that on"
            )

    def _walk(self) -> Reachable:
        return Walk(*self._arguments, self._tensor_names).found

    def _is_new(self, name: str) -> bool:
        return name not in self._found.leaves

    def _adopt(self, found: Reachable) -> None:
        """What is compared from now on."""
        self._found = found
        self.contents = [(each, each.contents()) for each in found.containers]
        self.cells = [(cell, cell.read()) for cell in found.cells]
        matter = {id(leaf) for leaf in found.leaves.values() if is_bookkeeping(leaf)}
        matter.update(map(id, found.tensors.values()))
        self._untouched = Untouched(self.contents, self._noisy, matter)
        inside = (module for _, module in found.modules if id(module) not in self._outside)
        hooks = [each for module in inside for each in hooks_of(module)]
        self._with_fsdp = [each for each in hooks if each and self._are_known(each)]
        self._hooks = [each for each in hooks if not (each and self._are_known(each))]
        self._hooks_of_fsdp = list(map(list, self._with_fsdp))
        self._typed = [*(module for _, module in found.modules), *found.kinds]
        self._types = list(map(type, self._typed))
        self._functions = found.functions
        self._code = list(map(_CODE_OF, self._functions))
        quick = (
            (self.contents, self._untouched.is_true),
            (self.cells, self._cells_are_still),
            (self._typed, lambda: list(map(type, self._typed)) == self._types),
            (self._functions, lambda: list(map(_CODE_OF, self._functions)) == self._code),
        )
        self._quick = [is_true for compared, is_true in quick if compared]
        self._is_empty = not (self._quick or self._places)
        self.draws = [(name, rng, state_of(rng)) for name, rng in found.draws]

    def _are_known(self, hooks: dict) -> bool:
        return self._sharded and are_of_fsdp(hooks)

    def _is_untouched(self) -> bool:
        """The quick answer: every place has the very same value."""
        return all(map(operator.call, self._quick))

    def _cells_are_still(self) -> bool:
        return all(cell.is_still(value) for cell, value in self.cells)

    def _look_again(self) -> Mismatch | None:
        """Other containers may hold the same leaves, and what changed may not matter."""
        found = self._walk()
        for name, before in self._found.leaves.items():
            now = found.leaves.get(name, GONE)
            if not (_same_leaf(now, before) or self._is_alike(name, now, before)):
                return _difference(name, before, now)
        for name, now in found.leaves.items():
            if self._is_new(name):
                return _difference(name, GONE, now)
        for name, order in self._found.orders.items():
            if found.orders.get(name) != order:
                return _difference(name, order, found.orders.get(name, GONE))
        self._noisy.update(map(id, self._untouched.changed()))
        # By now others may lie where the block has read something.
        found.tensors = {n: t for n, t in found.tensors.items() if n in self._found.tensors}
        self._adopt(found)
        return None

    def _is_alike(self, name: str, now: Any, before: Any) -> bool:
        """Of a tensor that no operation reads, only what Python may ask of it matters."""
        if name in self._found.tensors or not isinstance(before, Tensor) or is_bookkeeping(before):
            return False
        return isinstance(now, Tensor) and _asked(now) == _asked(before)


class Where:
    """Where tensors lie, how, and whether they require a gradient."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._given, self._tensors = list(tensors), list(map(local, tensors))
        self._wrappers = [tensor for tensor in tensors if stands_for_another(tensor)]
        self._stood_for = list(map(_stood_for, self._wrappers))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._kinds = list(map(_kind_of, self._tensors))
        self._require_grad = [tensor.requires_grad for tensor in tensors]
        self._indices = list(range(len(tensors)))
        self._same_kinds: Callable[..., bool] | None = None

    def is_same(self) -> bool:
        if self._wrappers and list(map(_stood_for, self._wrappers)) != self._stood_for:
            return False
        if self._same_kinds is None or not self._same_kinds(*self._tensors):
            if list(map(_kind_of, self._tensors)) != self._kinds:
                return False
            self._same_kinds = _check_in_c(self._tensors)
        if _SAME_ADDRESSES is not None:
            return _SAME_ADDRESSES(self._tensors, self._addresses, self._indices)
        return list(map(Tensor.data_ptr, self._tensors)) == self._addresses

    def mismatch(self, names: Sequence[str]) -> Mismatch:
        """What is not the same, by the names of the tensors."""
        for name, tensor, requires_grad in zip(names, self._given, self._require_grad, strict=True):
            if tensor.requires_grad is not requires_grad:
                message = f"{name!r}: captured with requires_grad={requires_grad}: set it back"
                return Mismatch("requires_grad", message)
        rows = zip(names, map(local, self._given), self._addresses, self._kinds, strict=True)
        moved = (n for n, t, a, k in rows if t.data_ptr() != a or _kind_of(t) != k)
        how = "lies at another address or is laid out in another way"
        return _moved(next(moved, "a tensor"), how)


def _stood_for(wrapper: Tensor) -> tuple[int, bool]:
    return id(local(wrapper)), wrapper.requires_grad


def _kind_of(tensor: Tensor) -> tuple:
    return tensor.requires_grad, tensor.shape, tensor.stride(), tensor.dtype


def _check_in_c(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """True of tensors that are in all (and more) as these are now, under the modes of now."""
    if _TensorGuards is None or not tensors:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def reads_before_running(
    functions: Sequence[Callable[..., Any]],
    modules: Iterable[nn.Module],
    guards_of: Callable[[Reads], Guards],
) -> Reads:
    """What functions may read, and what those may that they reach, as far as can be told without
    running them. ``modules``: those that may run."""
    owners = {id(module): module for module in modules}
    plain = (each for each in owners.values() if not isinstance(each, torch.jit.ScriptModule))
    todo = [*functions, *(type(module).forward for module in plain)]
    while True:
        reads = Reads.before_running(*todo, with_inner=True)
        reads.owners.update(owners)
        new = [each for each in guards_of(reads).functions if each not in todo]
        if not new:
            return reads
        todo += new


def tensors_of_others(
    model: nn.Module, addresses: Iterable[int], known: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Parameters and buffers of the model that were read by address, wherever they belong."""
    wanted, seen = set(addresses), {id(tensor) for tensor in known}
    named = chain(model.named_parameters(), model.named_buffers())
    return {
        name: tensor
        for name, tensor in named
        if id(tensor) not in seen and address(tensor) in wanted
    }


def _place_of_each_tensor(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One name for each, without those that have no memory that could move."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and not torch._C._functorch.is_batchedtensor(tensor):
            first.setdefault(id(tensor), (name, tensor))
    return dict(first.values())


def _asked(tensor: Tensor) -> tuple:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _same_leaf(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(before, (Tensor, nn.Module)) or now is GONE or before is GONE:
        return False
    if isinstance(before, (types.FunctionType, type)):
        return False
    return same_value(now, before)


def _difference(name: str, before: Any, now: Any) -> Mismatch:
    if isinstance(before, (Tensor, nn.Module)):
        kind = "object" if isinstance(before, Tensor) else "module"
        return _moved(name, f"was replaced by another {kind}")
    if before is GONE:
        message = f"{name!r} was not there at the capture and is {_shown(now)} now: take it away"
        return Mismatch("attribute", message)
    reason = "training_flag" if name.rsplit(".", 1)[-1] == "training" else "attribute"
    what = f"{_shown(before)} at the capture and is {_shown(now)} now"
    remedy = "set it back"
    if name.endswith("['lr']"):
        remedy += f", or make it a tensor, which schedulers fill (lr=torch.tensor({before!r}, ...))"
    return Mismatch(reason, f"{name!r} was {what}: {remedy}")


def _moved(name: str, what: str) -> Mismatch:
    return Mismatch(
        "moved",
        f"{name!r} {what} since the capture, and the graph would read the old one: change it in "
        f"place (a model's load_state_dict without assign=True does, an lr that is filled instead "
        f"of assigned), or {CAPTURE_AGAIN}",
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    text = "gone" if value is GONE else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _same_state(generator: Any, state: Any) -> bool:
    return repr(state_of(generator)) == repr(state)
