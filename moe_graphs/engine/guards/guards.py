"""Guards on everything that the Python of a graph could read, compared at every call."""

from __future__ import annotations

import operator
import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from operator import attrgetter, contains, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo import guards as of_dynamo

from moe_graphs.engine.fp8 import is_bookkeeping
from moe_graphs.engine.guards.bytecode_names import AccessedNames, functions_of
from moe_graphs.engine.guards.introspection import (
    GONE,
    Cell,
    Container,
    Hooks,
    are_of_fsdp,
    are_of_inputs,
    are_of_weights,
    check_not_keyed_by_weights,
    check_not_scripted,
    elements,
    hooks_of,
    keys_of,
    shown_hooks,
)
from moe_graphs.engine.guards.object_graph import Reachable, Walk
from moe_graphs.engine.reasons import CAPTURE_AGAIN, EAGER_CALLS
from moe_graphs.engine.snapshot import state_of
from moe_graphs.engine.tensors import Mismatch, address, is_wrapped, same_value, unwrap
from moe_graphs.errors import CaptureError

# ---- the fast path: every container still holds the very same objects


def _notices_attributes(version_of: Callable[[dict[Any, Any]], int]) -> bool:
    """Whether a change of an attribute changes the version of the object's dictionary.

    In Python 3.13 some changes do not go through the dictionary, even if somebody holds it.
    """

    class Owner:
        b: int

        def __init__(self) -> None:
            self.a = 0

    owner = Owner()
    held = vars(owner)
    for value in range(50):  # the interpreter specialises the code after some calls
        before = version_of(held)
        owner.a = value + 1
        if version_of(held) == before:
            return False
    before = version_of(held)
    owner.b = 1
    between = version_of(held)
    del owner.b
    return len({before, between, version_of(held)}) == 3


Contents = tuple[Container, dict[Any, Any]]
# The version of a dictionary, which every change of the dictionary changes: Python's own version,
# or that of a watcher. An id never changes, so it is no version.
_version_of: Callable[[dict[Any, Any]], int] = getattr(of_dynamo, "dict_version", id)
_HAS_VERSIONS = _notices_attributes(_version_of)
_OFTEN = 3
_NAMED = 4  # further differences that a message names
_KEYED = (dict, types.MappingProxyType)
_ASKED = attrgetter("__class__", "shape", "dtype", "device", "requires_grad")
_CODE_OF = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class FastPath:
    """Compares containers, cells, types and code with those of when it was made, in loops in C.

    Args:
        contents: containers, each with what it holds now.
        cells: cells, each with its value now.
        typed: objects whose types are compared.
        functions: functions whose code is compared.
        noisy: ids of holders that change in ways that do not matter; they are compared by name.
        matter: ids of the tensors whose identity matters; other tensors may be exchanged.
    """

    def __init__(
        self,
        contents: Sequence[Contents],
        cells: Sequence[tuple[Cell, Any]],
        typed: Sequence[Any],
        functions: Sequence[types.FunctionType],
        noisy: Collection[int],
        matter: Collection[int],
    ) -> None:
        self._contents, self._noisy, self._matter = contents, noisy, matter
        by_identity = [pair for pair in cells if not pair[0].is_copy]
        by_value = [pair for pair in cells if pair[0].is_copy]
        self._cells = [[cell.read for cell, _ in by_identity], [value for _, value in by_identity]]
        self._copies = [[cell for cell, _ in by_value], [value for _, value in by_value]]
        self._typed, self._types = typed, list(map(type, typed))
        self._functions, self._code = functions, list(map(_CODE_OF, functions))
        self._has_cells = bool(cells)
        # Ids of dictionaries -> how often they changed in ways that do not matter.
        self._changes: Counter[int] = Counter()
        self._begin()

    def _begin(self) -> None:
        matter = [pair for pair in self._contents if pair[0].keys is None or pair[0].keys]
        filled = [pair for pair in matter if not self._is_empty(pair[0].holder)]
        self._empty = [c.holder for c, _ in matter if self._is_empty(c.holder)]
        of_dicts = [pair for pair in filled if self._has_version(pair[0].holder)]
        others = [pair for pair in filled if not self._has_version(pair[0].holder)]
        self._dicts = [container.holder for container, _ in of_dicts]
        self._versions = list(map(_version_of, self._dicts))
        self._of_dicts = _Columns(of_dicts, self._noisy, self._matter)
        self._others = _Columns(others, self._noisy, self._matter)

    def _is_empty(self, holder: Any) -> bool:
        return type(holder) is dict and not holder and id(holder) not in self._noisy

    def _has_version(self, holder: Any) -> bool:
        # A dictionary that changes all the time, like the globals of a script, is not compared by
        # version.
        restless = self._changes[id(holder)] >= _OFTEN
        return _HAS_VERSIONS and type(holder) is dict and not restless

    def is_true(self) -> bool:
        """Whether everything is the very same object."""
        return (
            not any(self._empty)
            and self._contents_are_same()
            and list(map(type, self._typed)) == self._types
            and list(map(_CODE_OF, self._functions)) == self._code
            and (
                not self._has_cells
                or (
                    all(map(is_, map(operator.call, self._cells[0]), self._cells[1]))
                    and all(map(Cell.is_still, *self._copies))
                )
            )
        )

    def _contents_are_same(self) -> bool:
        versions = list(map(_version_of, self._dicts))
        if versions == self._versions:
            return self._others.are_same()
        if not (self._of_dicts.are_same() and self._others.are_same()):
            return False
        rows = zip(self._dicts, versions, self._versions, strict=True)
        self._changes.update(id(held) for held, now, before in rows if now != before)
        self._begin()
        return True

    def changed(self) -> list[Any]:
        """The holders that hold something else now, among those that are compared whole."""
        filled = [holder for holder in self._empty if holder]
        return filled + self._of_dicts.changed() + self._others.changed()


class _Columns:
    """Holders, keys and values side by side.

    Two kinds of containers are compared whole: those of which everything matters, and dictionaries
    of objects until they change in a way that does not matter. Modules of Python have many names,
    of which few matter; these names are compared one by one.
    """

    def __init__(
        self, contents: Sequence[Contents], noisy: Collection[int], matter: Collection[int]
    ) -> None:
        keyed = [pair for pair in contents if not _is_compared_whole(pair[0], noisy)]
        self._holders = [c.holder for c, _ in contents if _is_compared_whole(c, noisy)]
        # The views of dictionaries are live: they show the values of the time when they are read.
        self._now = list(map(elements, self._holders))
        self._sizes = list(map(len, self._now))
        self._values = list(chain.from_iterable(self._now))
        self._keys_now = [keys_of(holder) for holder in self._holders if isinstance(holder, dict)]
        self._keys = list(chain.from_iterable(self._keys_now))
        rows = [
            (c.holder, key, value)
            for c, held in keyed
            for key, value in held.items()
            if not isinstance(value, Tensor) or id(value) in matter
        ]
        by_kind = [(kind, _columns(rows, kind)) for kind in _KEYED]
        self._entries = [(kind.get, *columns) for kind, columns in by_kind if columns[0]]
        # Tensors that no operation reads may be exchanged for others that look the same to Python.
        rows = [
            (c.holder, key, value)
            for c, held in keyed
            for key, value in held.items()
            if isinstance(value, Tensor) and id(value) not in matter
        ]
        by_kind = [(kind, _columns(rows, kind)) for kind in _KEYED]
        self._shown = [
            (kind.get, holders, keys, list(map(_ASKED, values)))
            for kind, (holders, keys, values) in by_kind
            if holders
        ]
        # Names that may appear: they are compared one by one or, if they are many, all names of the
        # holder are.
        absent = [(c.holder, c.absent(held)) for c, held in keyed]
        few = [(holder, keys) for holder, keys in absent if len(keys) <= len(holder)]
        self._absent = [[h for h, keys in few for _ in keys], [k for _, keys in few for k in keys]]
        many = [holder for holder, keys in absent if len(keys) > len(holder)]
        self._names_of_many = [holder.keys() for holder in many]
        self._names_known = list(map(frozenset, many))

    def are_same(self) -> bool:
        if self._holders and not self._holders_are_same():
            return False
        for get, holders, keys, values in self._entries:
            if not all(map(is_, map(get, holders, keys, repeat(GONE)), values)):
                return False
        if self._shown and not self._are_shown_the_same():
            return False
        return not any(map(contains, *self._absent)) and self._names_of_many == self._names_known

    def _are_shown_the_same(self) -> bool:
        for get, holders, keys, asked in self._shown:
            try:
                if list(map(_ASKED, map(get, holders, keys, repeat(None)))) != asked:
                    return False
            except AttributeError:  # no tensor lies there any more
                return False
        return True

    def _holders_are_same(self) -> bool:
        return (
            list(map(len, self._now)) == self._sizes
            and all(map(is_, chain.from_iterable(self._now), self._values))
            and all(map(is_, chain.from_iterable(self._keys_now), self._keys))
        )

    def changed(self) -> list[Any]:
        before, keys, found = iter(self._values), iter(self._keys), []
        for holder, view, size in zip(self._holders, self._now, self._sizes, strict=True):
            values = list(islice(before, size))
            names = list(islice(keys, size)) if isinstance(holder, dict) else []
            same = size == len(view) and all(map(is_, view, values))
            if not (same and (not names or all(map(is_, keys_of(holder), names)))):
                found.append(holder)
        return found


def _is_compared_whole(container: Container, noisy: Collection[int]) -> bool:
    holder = container.holder
    if container.keys is None:
        return isinstance(holder, (dict, list, deque, set))
    return isinstance(holder, dict) and not (id(holder) in noisy or "__builtins__" in holder)


def _columns(
    rows: Sequence[tuple[Any, Any, Any]], kind: type
) -> tuple[list[Any], list[Any], list[Any]]:
    chosen = [row for row in rows if isinstance(row[0], kind)]
    return [row[0] for row in chosen], [row[1] for row in chosen], [row[2] for row in chosen]


# ---- the comparison by value and path

_TensorGuards = getattr(of_dynamo, "TensorGuards", None)
# Only in builds with CUDA.
_SAME_ADDRESSES = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
_NOTHING: Mapping[Any, Any] = types.MappingProxyType({})


class _Walked(NamedTuple):
    """The first four arguments of a ``Walk`` over the objects."""

    roots: dict[str, Any]
    accessed: AccessedNames
    read_addresses: frozenset[int]
    everything: dict[str, Any]


class Present(NamedTuple):
    """Objects in the places that ``Guards`` compare, as they were when this was made.

    ``Guards`` themselves may have older ones: a tensor that no operation reads may be exchanged.
    """

    contents: list[Contents]
    cells: list[tuple[Cell, Any]]
    draws: list[tuple[str, Any, Any]]


class Guards:
    """Attributes, containers, globals, closures, tensors and hooks, as they were when it was made.

    Values are compared by value; functions and classes by identity; tensors by identity, address
    and layout. The fast path is a few loops in C over the very objects. If any object is another
    one, everything is looked up anew and compared by its path.

    Attributes:
        asked_for: ids of tensors that the code may compare with others by identity.

    Args:
        roots, accessed, read_addresses, everything, tensor_names: as of ``Walk``.
        tensors: path -> more tensors whose address matters.
        outside: modules whose own hooks run outside of the block.
        assigned: entries of dictionaries that the block assigns (``Assigned.compared``).
        in_step: whether the block is a whole step, where hooks of ``fully_shard`` and those that
            let inputs require gradients may run.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        accessed: AccessedNames,
        read_addresses: Iterable[int] = (),
        *,
        everything: Mapping[str, Any] = _NOTHING,
        tensors: Mapping[str, Tensor] = _NOTHING,
        tensor_names: Mapping[int, str] = _NOTHING,
        outside: Iterable[nn.Module] = (),
        assigned: Mapping[int, Mapping[Any, Any]] = _NOTHING,
        in_step: bool = False,
    ) -> None:
        self._outside, self._in_step = {id(module) for module in outside}, in_step
        read = frozenset(read_addresses)
        self._walked = _Walked(dict(roots), accessed, read, dict(everything))
        self._assigned = assigned
        self._tensor_names, self._more = dict(tensor_names), dict(tensors)
        self._noisy: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        found = self._walk_all()
        self._places = _place_of_each_tensor({**found.tensors, **self._more})
        self._address_guards = AddressGuards(list(self._places.values()))
        self._adopt(found)

    def also_read(self, accessed: AccessedNames, addresses: Collection[int] = ()) -> None:
        """Compares from now on what these names find, too: those that only a backward mentions.

        A function that only a backward calls may mention no name; its code is compared from now on.

        Tensors at these addresses, which a backward has read, are compared as well. If something
        has changed since the forward (a context around the forward is over), the values of now are
        not those that the forward reads, and nothing is added.

        Raises:
            CaptureError: if something cannot be compared.
        """
        known, seen = self._walked.accessed, map(unwrap, self._found.leaves.values())
        tensors = {address(each) for each in seen if isinstance(each, Tensor)}
        read = self._walked.read_addresses | tensors.intersection(addresses)
        is_known = known.has_all_of(accessed) and read == self._walked.read_addresses
        if is_known or self.changes():
            return
        together = AccessedNames.together(known, accessed)
        self._walked = self._walked._replace(accessed=together, read_addresses=read)
        self._begin()
        self.check_followable()

    @property
    def not_followed(self) -> list[str]:
        """Paths of values that the block may have read and that nobody compares."""
        return sorted(set(self._found.not_followed))

    def present(self) -> Present:
        """The objects that lie now in the places that are compared, for a ``Snapshot``."""
        return Present(
            [(each, each.contents()) for each, _ in self.contents],
            [(cell, cell.read()) for cell, _ in self.cells],
            [(name, rng, state_of(rng)) for name, rng, _ in self.draws],
        )

    @property
    def functions(self) -> list[types.FunctionType]:
        """Functions that may be called, whether they ran or not; methods of classes, too."""
        found = list(self._found.leaves.values())
        classes = [value for value in found if isinstance(value, type)]
        functions = [each for each in found if isinstance(each, types.FunctionType)]
        return functions + list(chain.from_iterable(map(functions_of, classes)))

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._places.values())

    def mismatch(self) -> Mismatch | None:
        """The first difference from the capture, or None. Reads no values of tensors."""
        if self._is_empty:
            return None
        if not self._fast_path.is_true():
            difference = self._compare_by_path()
            if difference is not None:
                return difference
        if any(self._hooks) or (
            self._with_known and self._known_hooks != list(map(list, self._with_known))
        ):
            return self._other_hooks()
        if self._address_guards.is_same():
            return None
        return self._address_guards.mismatch(list(self._places))

    def _other_hooks(self) -> Mismatch:
        """The mismatch that names a module which has hooks now, and whose hooks they are."""
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
        """Values that have changed, by path, old and new.

        State that an optimizer's first step has made does not count as a change.
        """
        found = self._walk()
        now = found.leaves
        drawn = [name for name, rng, state in self.draws if not _same_state(rng, state)]
        changed = [
            f"{name} ({_shown(before)} -> {_shown(now.get(name, GONE))})"
            for name, before in self._found.leaves.items()
            if not _same_leaf(now.get(name, GONE), before)
        ]
        late = tuple(self._found.made_late + self._found.may_grow)
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
        """Checks that nothing has changed.

        Raises:
            CaptureError: if a block that was run since has changed anything.
        """
        changes = self.changes()
        if changes:
            remedy = "keep it in a buffer that is changed in place, or change it outside"
            if "] (new: a tensor" in changes[0]:  # a list of metrics, for instance
                remedy = (
                    "assign the tensor to an attribute (self.last = ...) and collect it outside"
                )
            raise CaptureError(
                f"{where}it changes {changes[0]}, and a replay runs no Python: {remedy} of the "
                f"scope"
            )

    def check_hooks(self) -> None:
        """Checks that the block runs no hooks of modules.

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
        scope = self._walked.roots.get("")
        children = scope.named_children() if isinstance(scope, nn.Module) else ()
        for name, child in children:
            hooks = chain.from_iterable(map(hooks_of, child.modules()))
            if next(child.parameters(), None) is not None and not any(hooks):
                return f"choose scopes that have none inside: '*.{name}' is one"
        return "choose scopes that leave this module out"

    def check_keys(self) -> None:
        check_not_keyed_by_weights(self._found.containers)

    def check_followable(self) -> None:
        """Checks that the block reaches nothing that cannot be compared at every call.

        Raises:
            CaptureError: if the block may advance an iterator, run a compiled module, or read a
                value that is too large to be compared or keeps its state in C.
        """
        check_not_scripted(self._found.leaves)
        if self._found.iterators:
            raise CaptureError(
                f"it reaches {self._found.iterators[0]!r}, an iterator, which a replay would not "
                f"advance: take what it gives outside, and pass that on"
            )
        if self._found.not_followed:
            raise CaptureError(
                f"it may read {self.not_followed[0]}, which is not compared at every call: read "
                f"it outside, and pass on what the block needs of it"
            )

    def _walk_all(self) -> Reachable:
        """Walks until the data that was found names nothing new."""
        while True:
            found = self._walk()
            more = self._walked.accessed.with_found(found.names, found.behind_caches)
            if more is None:
                return found
            self._walked = self._walked._replace(accessed=more)

    def _walk(self) -> Reachable:
        return Walk(*self._walked, self._tensor_names, self._assigned).found

    def _is_new(self, name: str) -> bool:
        return name not in self._found.leaves

    def _adopt(self, found: Reachable) -> None:
        """Compares with what the walk has found, from now on."""
        self._found = found
        self.contents = [(each, each.contents()) for each in found.containers]
        self.cells = [(cell, cell.read()) for cell in found.cells]
        matter = {id(leaf) for leaf in found.leaves.values() if is_bookkeeping(leaf)}
        matter.update(map(id, found.tensors.values()), found.reached_again)
        typed = [*(module for _, module in found.modules), *found.kinds]
        self._fast_path = FastPath(
            self.contents, self.cells, typed, found.functions, self._noisy, matter
        )
        inside = (module for _, module in found.modules if id(module) not in self._outside)
        hooks = [each for module in inside for each in hooks_of(module)]
        self._with_known = [each for each in hooks if each and self._are_known(each)]
        self._hooks = [each for each in hooks if not (each and self._are_known(each))]
        self._known_hooks = list(map(list, self._with_known))
        compared = (self.contents, self.cells, typed, found.functions, self._places)
        self._is_empty = not any(compared)
        self.draws = [(name, rng, state_of(rng)) for name, rng in found.draws]
        tensors_found = [leaf for leaf in found.leaves.values() if isinstance(leaf, Tensor)]
        asks = bool(tensors_found) and self._walked.accessed.asks_for_identities
        self.asked_for = frozenset(map(id, tensors_found if asks else ()))

    def _are_known(self, hooks: Hooks) -> bool:
        of_steps = are_of_fsdp(hooks) or are_of_inputs(hooks)
        return (self._in_step and of_steps) or are_of_weights(hooks)

    def _compare_by_path(self) -> Mismatch | None:
        """The difference by path, or None. The message has the first one and names the others.

        Other containers may hold the same values, and a changed value may not matter.
        """
        found = self._walk()
        differing = list(self._differing(found))
        if differing:
            first = _difference(*differing[0])
            others = [repr(name) for name, *_ in differing[1:]]
            more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            named = f"; also different: {', '.join(others[:_NAMED])}{more}" if others else ""
            return Mismatch(first.reason, first.message + named)
        self._noisy.update(map(id, self._fast_path.changed()))
        # Other tensors may lie by now at an address that the block has read.
        found.tensors = {n: t for n, t in found.tensors.items() if n in self._found.tensors}
        self._adopt(found)
        return None

    def _differing(self, found: Reachable) -> Iterator[tuple[str, Any, Any]]:
        """Paths at which something else lies, with what was there and what is there now."""
        for name, before in self._found.leaves.items():
            now = found.leaves.get(name, GONE)
            if not (_same_leaf(now, before) or self._is_alike(name, now, before)):
                yield name, before, now
        late = tuple(self._found.may_grow)
        new = (name for name in found.leaves if self._is_new(name) and not name.startswith(late))
        yield from ((name, GONE, found.leaves[name]) for name in new)
        for name, order in self._found.orders.items():
            if found.orders.get(name) != order:
                yield name, order, found.orders.get(name, GONE)

    def _is_alike(self, name: str, now: Any, before: Any) -> bool:
        """Whether a tensor that no operation reads looks the same to Python."""
        if name in self._found.tensors or not isinstance(before, Tensor) or is_bookkeeping(before):
            return False
        return isinstance(now, Tensor) and _ASKED(now) == _ASKED(before)


class AddressGuards:
    """Addresses and layouts of tensors, and whether they require a gradient."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._given, self._tensors = list(tensors), list(map(unwrap, tensors))
        self._wrappers = [tensor for tensor in tensors if is_wrapped(tensor)]
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
        """The first difference, with the name of its tensor."""
        for name, tensor, requires_grad in zip(names, self._given, self._require_grad, strict=True):
            if tensor.requires_grad is not requires_grad:
                message = f"{name!r}: captured with requires_grad={requires_grad}: set it back"
                return Mismatch("requires_grad", message)
        rows = zip(names, map(unwrap, self._given), self._addresses, self._kinds, strict=True)
        moved = (n for n, t, a, k in rows if t.data_ptr() != a or _kind_of(t) != k)
        how = "lies at another address or is laid out in another way"
        return _moved(next(moved, "a tensor"), how)


def _stood_for(wrapper: Tensor) -> tuple[int, bool]:
    return id(unwrap(wrapper)), wrapper.requires_grad


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.requires_grad, tensor.shape, tensor.stride(), tensor.dtype


def _check_in_c(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A check in C that is true for tensors like these, under the modes in force now.

    It compares everything that ``_kind_of`` compares, and more.
    """
    if _TensorGuards is None or not tensors:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def names_before_running(
    functions: Sequence[Callable[..., Any]],
    modules: Iterable[nn.Module],
    guards_of: Callable[[AccessedNames], Guards],
) -> AccessedNames:
    """Names that functions, and the functions that they reach, may read.

    The names come from the code alone; nothing is run. ``modules`` are those that may run.
    """
    owners = {id(module): module for module in modules}
    plain = (each for each in owners.values() if not isinstance(each, torch.jit.ScriptModule))
    todo = [*functions, *(type(module).forward for module in plain)]
    while True:
        accessed = AccessedNames.before_running(*todo, with_inner=True)
        accessed.owners.update(owners)
        accessed.is_estimate = True
        new = [each for each in guards_of(accessed).functions if each not in todo]
        if not new:
            return accessed
        todo += new


def tensors_of_others(
    model: nn.Module, addresses: Iterable[int], known: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Parameters and buffers, in any module of the model, that were read by address."""
    wanted, seen = set(addresses), {id(tensor) for tensor in known}
    named = chain(model.named_parameters(), model.named_buffers())
    return {
        name: tensor
        for name, tensor in named
        if id(tensor) not in seen and address(tensor) in wanted
    }


def _place_of_each_tensor(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One name for each tensor; tensors without memory that could move are left out."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and not torch._C._functorch.is_batchedtensor(tensor):
            first.setdefault(id(tensor), (name, tensor))
    return dict(first.values())


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
        message = (
            f"{name!r} was not there at the capture and is {_shown(now)} now: take it away, or "
            f"leave it out of the names that the captured code has"
        )
        return Mismatch("attribute", message)
    reason = "training_flag" if name.rsplit(".", 1)[-1] == "training" else "attribute"
    what = f"{_shown(before)} at the capture and is {_shown(now)} now"
    remedy = "set it back"
    if name.endswith("['lr']"):
        made = "moe_graphs.training.capturable.tensor_hyperparameters(optimizer)"
        remedy += f", or make it a tensor, which schedulers fill: {made}"
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
