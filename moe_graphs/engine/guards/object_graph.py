"""Everything that the Python of a block could have read: the walk behind ``Guards``.

The walk starts at the roots (a module, a step function, the arguments of a call), at the objects
whose methods ran, and at the globals and closures of the functions that ran. It follows only names
that this code mentions (``bytecode_names.py``). In modules of installed libraries it looks at data,
not at functions. It does not look into torch's own modules.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import contextvars
import decimal
import enum
import functools
import gc
import inspect
import operator
import os
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moe_graphs.engine.fp8 import is_bookkeeping
from moe_graphs.engine.guards.bytecode_names import (
    AccessedNames,
    attributes_of_globals,
    global_names_of,
    imports_of,
    module_at,
)
from moe_graphs.engine.guards.introspection import (
    GONE,
    Answers,
    Cell,
    Container,
    Elements,
    attribute_of,
    bytes_of,
    contents_of_cell,
    could_be_read,
    decimal_context,
    has_bytes,
    has_dictionary,
    is_data,
    is_generator,
    is_immutable,
    is_of_engine,
    is_of_package,
    is_own_module,
    is_without_state,
    module_of,
    names_in,
    names_within,
    origin_of_class,
    origin_of_code,
    refill,
    set_bytes,
    shown_key,
    shown_name,
    slots_of,
    special_methods,
    text_in,
)
from moe_graphs.engine.tensors import BY_IDENTITY, address, is_plain

# ---- what the code of functions names in Python's modules

Code = Mapping[types.CodeType, dict[str, Any]]


def containers_of_globals(code: Code) -> Iterator[tuple[Container, str]]:
    """The modules of the functions, and those that the functions name as ``module.name``.

    Each comes with the text between its name and that of an entry. ``code`` has the globals of each
    function.
    """
    mentioned: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
    for each, globals_ in code.items():
        origin = origin_of_code(each, globals_)
        if origin != "internal":
            names = mentioned.setdefault(id(globals_), (globals_, origin, set()))[2]
            names.update(global_names_of(each))
    of_builtins: set[str] = set()
    for globals_, origin, names in mentioned.values():
        of_builtins |= {n for n in names - globals_.keys() if is_data(vars(builtins).get(n, GONE))}
        if origin == "library":  # functions and classes of libraries are taken for granted
            names = {name for name in names if is_data(globals_.get(name, GONE))}
        yield Container(globals_, shown_name(globals_), frozenset(names)), ":"
    if of_builtins:
        yield Container(vars(builtins), "builtins", frozenset(of_builtins)), "."
    for module, names in _of_other_modules(code).values():
        yield Container(vars(module), shown_name(vars(module)), frozenset(names)), "."


def _of_other_modules(code: Code) -> dict[int, tuple[types.ModuleType, set[str]]]:
    """Modules that the code names.

    The user may patch functions of libraries that the user's own code calls, so these are compared.
    Functions that other code calls are taken for granted, and only data is compared.
    """
    found: dict[int, tuple[types.ModuleType, set[str]]] = {}
    for each, globals_ in code.items():
        origin = origin_of_code(each, globals_)
        if origin == "internal":
            continue
        for *path, key in attributes_of_globals(each):
            module = module_at(globals_, path)
            if module is None:
                continue
            value = vars(module).get(key, GONE)
            if value is not GONE and (origin == "own" or is_plain(value)):
                found.setdefault(id(module), (module, set()))[1].add(key)
    return found


# ---- the walk

# DDP rebuilds its buckets once, which is bookkeeping of its own.
_OF_EVERY_MODULE = (frozenset(nn.Module().__dict__) - {"training"}) | {"_has_rebuilt_buckets"}
_OF_CALLS = {"training", "forward"}  # these do not matter in a module that did not run
_TOO_MANY = 2000  # containers with more entries are not compared
Namespace = dict[Any, Any]
_OF_THE_CODE: Any = object()  # stands for the names that the code mentions
_VIEWS: tuple[type, ...] = (
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
# Values that are often made anew. Only what they hold is compared, not which object lies where.
_MADE_ANEW = (tuple, frozenset, types.MethodType, weakref.ref, memoryview, *_VIEWS)

# Values that are no plain objects, but may have attributes and a class of the user's own.
_WITH_ATTRIBUTES = (dict, list, tuple, set, frozenset, collections.deque, functools.partial,
                    functools._lru_cache_wrapper, weakref.ref)  # fmt: skip
_WITHOUT_ATTRIBUTES = {dict, list, tuple, set, frozenset, collections.deque, weakref.ref,
                       collections.defaultdict, torch.Size}  # fmt: skip
# Classes of Python's own whose objects hold whatever the user puts there.
_RECORDS = (types.SimpleNamespace, argparse.Namespace, collections.OrderedDict, functools.partial,
            functools._lru_cache_wrapper)  # fmt: skip


@dataclass(frozen=True)
class SameAs:
    """The first path of an object, which is compared at the object's other paths."""

    path: str

    def __repr__(self) -> str:
        return f"the object at {self.path or 'the root'!r}"


@dataclass
class Reachable:
    """Everything that a walk has found.

    Attributes:
        leaves: path -> what is compared there: plain values, classes of objects, functions, ...
        orders: path -> a text that tells one order of a dictionary's keys from another.
        containers, cells: where to look for changes.
        tensors: path -> tensor whose identity, address and layout matter: operations read it, or it
            is a parameter or buffer of a module that ran. Of other tensors only the shape matters.
        modules: modules whose hooks a replay would not run, with their paths.
        kinds: objects whose class may be assigned.
        functions: functions of the user's own, whose code may be assigned.
        iterators: paths of iterators that a replay would not advance.
        draws: random number generators of Python and numpy that were reached.
        not_followed: paths of values that cannot be looked into.
        made_late: how the paths begin of state that an optimizer's first step makes.
        may_grow: how the paths begin of answers of cached functions, to which calls may add others.
        reached_again: ids of objects that lie at several paths.
        names: names of attributes that the data holds, if the code looks up names that are data.
        behind_caches: functions behind a cache, which run only if the cache has no answer.
    """

    leaves: dict[str, Any] = field(default_factory=dict)
    orders: dict[str, str] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    kinds: list[Any] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    iterators: list[str] = field(default_factory=list)
    draws: list[tuple[str, Any]] = field(default_factory=list)
    not_followed: list[str] = field(default_factory=list)
    made_late: list[str] = field(default_factory=list)
    may_grow: list[str] = field(default_factory=list)
    reached_again: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    behind_caches: list[types.FunctionType] = field(default_factory=list)


class Walk:
    """Finds what is reachable.

    Args:
        roots: path -> object. Modules among them count as having run.
        accessed: which code ran. None: every attribute is followed, whatever its name.
        read_addresses: addresses of the memory that operations have read.
        everything: roots that are followed through all of their attributes (an optimizer).
        assigned: entries of dictionaries that the code assigns, by the id of the dictionary.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        accessed: AccessedNames,
        read_addresses: frozenset[int] | set[int] = frozenset(),
        everything: Mapping[str, Any] = types.MappingProxyType({}),
        tensor_names: Mapping[int, str] = types.MappingProxyType({}),
        assigned: Mapping[int, Mapping[Any, Any]] = types.MappingProxyType({}),
    ) -> None:
        self.found = Reachable()
        self._reads, self._names = accessed, accessed.names
        self._is_of_the_user = any(origin_of_code(*each) == "own" for each in accessed.code.items())
        self._called = accessed.names - accessed.values
        self._called_of_modules = accessed.names_of_modules - accessed.values_of_modules
        by_user = accessed.reads_whole(accessed.names_of_the_user())
        # Origins of the classes whose objects may be read whole. An object of a library's class is
        # followed whole only if the user's own code may read objects whole.
        self._whole = {"own"} if accessed.reads_whole(accessed.names) else set()
        self._whole |= {"library"} if by_user else set()
        self._whole_modules = {"own"} if by_user else set()
        # Data of classes, modules and functions is compared by any name then.
        self._reads_namespaces = accessed.reads_namespaces
        # Ids of modules that the code names only for their attributes.
        self._looked_into: set[int] = set()
        self._looks_up_data = accessed.looks_up_data
        self._read_addresses = read_addresses
        self._tensor_names, self._assigned = tensor_names, assigned
        self._roots = {id(root) for root in roots.values()}
        # id -> (its first path, the object, whether all of its attributes are followed).
        self._first: dict[int, tuple[str, Any, bool]] = {}
        self._classes: set[type] = set()
        self._stack: list[tuple[Any, str, bool]] = []
        # The last root is visited first, so it gives its name to values that other roots reach as
        # well.
        first, others = list(roots.items())[:1], list(roots.items())[1:]
        for name, root in reversed([*others, *self._owners()]):
            self._push(root, name, False)
        for name, root in reversed(list(everything.items())):
            self._push(root, name, True)
        for name, root in first:
            self._push(root, name, False)
        if self._names & {"environ", "getenv"}:
            self._push(vars(os.environ)["_data"], "os.environ", False)
        self._globals()
        for name, ask in accessed.questions.items():
            self._cell(Cell(ask, None, name, is_copy=True), False)
        while self._stack:
            self._visit(*self._stack.pop())

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """Objects whose methods ran. They may be reachable by name as well."""
        for number, owner in enumerate(self._reads.owners.values()):
            yield f"<{type(owner).__name__} {number}>", owner

    def _push(self, value: Any, name: str, everything: bool) -> None:
        self._stack.append((value, name, everything))

    def _note(self, name: str, value: Any) -> None:
        """Notes what is compared at a path. No path stands twice for different values."""
        leaves, path, number = self.found.leaves, name, 1
        while path in leaves and leaves[path] is not value:
            number += 1
            path = f"{name} ({number})"
        leaves[path] = value

    # ---- one value

    def _visit(self, value: Any, name: str, everything: bool) -> None:
        if is_plain(value):
            self._note(name, value)
            if isinstance(value, str):
                self._may_be_a_name(value)
        elif isinstance(value, BY_IDENTITY):
            self._note(name, value)
            if id(value) not in self._first:
                self._first[id(value)] = name, value, False
                self._by_identity(value, name)
        elif _is_made_anew(value) or self._is_new(value, name, everything):
            self._look_into(value, name, everything)
            if isinstance(value, _WITH_ATTRIBUTES) and type(value) not in _WITHOUT_ATTRIBUTES:
                self._attributes(value, name, everything)

    def _is_new(self, value: Any, name: str, everything: bool) -> bool:
        """Whether the object is to be looked into. A known one is noted by its first path."""
        first, _, followed = self._first.get(id(value), (name, value, None))
        if followed is not None:
            self._note(name, SameAs(first))
            self.found.reached_again.add(id(value))
        if followed is None or (everything and not followed):
            self._first[id(value)] = first, value, everything
            return True
        return False

    def _may_be_a_name(self, text: str) -> None:
        if self._looks_up_data:
            self.found.names.update(names_in(text))

    def _by_identity(self, value: Any, name: str) -> None:
        if isinstance(value, types.ModuleType):
            if is_own_module(value):
                is_value = id(value) not in self._looked_into
                whole = self._of_any_name(vars(value), _contents_of if is_value else _data_of)
                self._namespace(vars(value), name, False, self._names | whole)
                self._class(type(value), f"{name}.__class__")
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif isinstance(value, type):
            # A library's class in a table is compared by identity, and its data is not.
            if not (name.endswith("]") and origin_of_class(value) == "library"):
                self._class(value, name)
        elif isinstance(value, property):
            for part in ("fget", "fset", "fdel"):
                self._push(getattr(value, part), f"{name}.{part}", False)
            if type(value) is not property:
                self._attributes(value, name, False)
        elif isinstance(value, enum.Enum):
            if origin_of_class(type(value)) != "internal":
                whole = self._of_any_name(vars(value), _contents_of)
                names = frozenset(self._names | {"_value_", "_name_"} | whole)
                self._entries(vars(value), name, names, False)
                self._class(type(value), f"{name}.__class__")
        elif isinstance(value, types.BuiltinFunctionType) and value.__self__ is not None:
            self._push(value.__self__, f"{name}.__self__", False)
        if value is decimal.Decimal:
            self._cell(Cell(decimal_context, None, "decimal.getcontext()", is_copy=True), False)

    def _look_into(self, value: Any, name: str, everything: bool) -> None:
        if isinstance(value, Tensor):
            self._note(name, value)
            if everything or _is_read(value, self._read_addresses):
                self.found.tensors[name] = value
            if self._is_of_the_user:  # the user's code may ask for attributes of a tensor
                whole = self._of_any_name(value.__dict__, _contents_of)
                self._namespace(value.__dict__, name, False, self._names | whole)
        elif is_bookkeeping(value) or isinstance(value, torch.jit.ScriptModule):
            self._note(name, value)
        elif isinstance(value, nn.Module):
            self._module(value, name, everything)
        elif isinstance(value, Optimizer):
            # Other attributes are bookkeeping of torch and of schedulers, unless it wraps another
            # optimizer.
            wrapped = {key for key, child in vars(value).items() if isinstance(child, Optimizer)}
            self._entries(vars(value), name, {"param_groups", "state"} | wrapped, True)
            self.found.made_late.append(f"{name}.state[")
        elif isinstance(value, dict):
            self._mapping(value, name, everything)
        elif isinstance(value, _VIEWS):
            self._push(gc.get_referents(value)[0], name, everything)
        elif isinstance(value, (list, tuple, collections.deque, set, frozenset)):
            self._sequence(value, name, everything)
        elif isinstance(value, functools.partial):
            for key in ("func", "args", "keywords"):  # __setstate__ binds others
                read = functools.partial(getattr, value, key)
                self._cell(Cell(read, None, f"{name}.{key}"), everything)
        elif isinstance(value, types.MethodType):
            self._push(value.__func__, name, False)
            self._push(value.__self__, f"{name}.__self__", everything)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._note(name, value)
            # The function stays in C if somebody deletes the attribute.
            in_c = (each for each in gc.get_referents(value) if callable(each))
            function = attribute_of(value, "__wrapped__") or next(in_c, None)
            self._push(function, f"{name}.__wrapped__", everything)
            self._cache(value, name)
        elif isinstance(value, weakref.ref):
            self._push(value(), f"{name}()", everything)
        elif isinstance(value, contextvars.ContextVar):
            self._cell(Cell(lambda: value.get(GONE), value.set, f"{name}.get()"), everything)
        elif isinstance(value, memoryview):
            self._push(value.obj, f"{name}.obj", everything)
        elif isinstance(value, (operator.attrgetter, operator.methodcaller)):
            self._note(name, value)
            self.found.names.update(*map(names_in, map(str, value.__reduce__()[1])))
        elif isinstance(value, Iterator):
            self.found.iterators.append(name)
        elif has_bytes(value):
            self._array(value, name)
        else:
            self._object(value, name, everything)

    # ---- kinds of values

    def _module(self, module: nn.Module, name: str, everything: bool) -> None:
        ran = id(module) in self._roots or self._reads.owns_what_ran(module)
        attributes = module.__dict__
        ours = getattr(attributes.get("forward"), "installed", ())  # a GraphedScope has these
        self._note(f"{name}.__class__", type(module))
        if ran:
            if name:
                self._note(name, module)
            self._class(type(module), f"{name}.__class__")
            self._forward_of(type(module))
            self.found.modules.append((name, module))
        accessed = self._reads
        mentioned = could_be_read(attributes, accessed.names_of_modules, self._called_of_modules)
        whole = everything or origin_of_class(type(module)) in self._whole_modules
        names = frozenset(attributes) if whole else mentioned
        names = names - (_OF_EVERY_MODULE - self._names) - {*ours}
        self._entries(attributes, name, names if ran else names - _OF_CALLS, everything)
        for place in (module._parameters, module._buffers):
            if ran or everything:
                self._entries(place, name, None, everything)
                assigned = self._assigned.get(id(place), ())
                tensors = ((k, t) for k, t in place.items() if t is not None and k not in assigned)
                own = {_join(name, key): t for key, t in tensors}
                self.found.tensors.update(own)
            else:
                read = {k for k, t in place.items() if _is_read(t, self._read_addresses)}
                self._entries(place, name, frozenset(read), everything)
        self._entries(module._modules, name, None if ran or everything else self._names, everything)

    def _entries(
        self, place: Namespace, name: str, names: Collection[str] | None, everything: bool
    ) -> None:
        """Entries of a module's dictionaries, which share one name space."""
        if id(place) in self._assigned:
            names = self._without_assigned(place, name, names)
        container = Container(place, name, None if names is None else frozenset(names))
        self.found.containers.append(container)
        contents = container.contents()
        if names is None and not everything:
            order, what = ", ".join(map(str, contents)), f"the order of {name or 'the model'}"
            self.found.orders[what] = f"{self.found.orders.get(what, '')}[{order}]"
        for key, child in reversed(contents.items()):
            self._push(child, _join(name, key), everything)

    def _without_assigned(
        self, place: Namespace, name: str, names: Collection[str] | None
    ) -> frozenset[Any]:
        """The names except those that the code assigns. Notes what it may ask of the old values."""
        assigned = self._assigned[id(place)]
        for each in assigned.values():
            if each.is_read and not each.is_input:
                asked = f"what code can ask of {each.name}"
                self._cell(Cell(each.asked, None, asked, is_copy=True), False)
        if names is None:
            read = functools.partial(tuple, place)
            self._cell(Cell(read, None, f"the names in {name}", is_copy=True), False)
        return frozenset(place if names is None else names) - assigned.keys()

    def _forward_of(self, kind: type) -> None:
        """Notes the forward that modules of this class run, which may be patched."""
        for base in kind.__mro__:
            name = f"{module_of(base)}.{base.__qualname__}"
            if f"{name}.forward" in self.found.leaves:
                return
            self.found.containers.append(Container(vars(base), name, frozenset({"forward"}), base))
            if "forward" in vars(base):
                return self._push(vars(base)["forward"], f"{name}.forward", False)

    def _mapping(self, value: Namespace, name: str, everything: bool) -> None:
        elements = Elements(value)
        if len(elements) > _TOO_MANY:
            return self._too_large(name, len(elements))
        assigned = self._assigned.get(id(value), {})
        names_left = self._without_assigned(value, name, None) if assigned else None
        self.found.containers.append(Container(value, name, names_left))
        self._note(f"{name}.__class__", type(value))
        if isinstance(value, collections.defaultdict):
            read = functools.partial(getattr, value, "default_factory")
            self._cell(Cell(read, None, f"{name}.default_factory"), False)
        keys = list(elements.keys())
        names = [shown_key(i, k, self._tensor_names) for i, k in enumerate(keys)]
        if not everything:  # optimizers make their state in the order of first use
            self.found.orders[f"the order of {name}"] = ", ".join(names)
        for key, shown, child in reversed(list(zip(keys, names, elements, strict=True))):
            if key in assigned:
                continue
            self._push(child, f"{name}[{shown}]", everything)
            if isinstance(key, str):
                self._may_be_a_name(key)
            elif not (is_plain(key) or (everything and isinstance(key, Tensor))):
                if not isinstance(key, (Tensor, *BY_IDENTITY, *_MADE_ANEW)):
                    self._note(f"{name}[{shown}] has the key", key)
                self._push(key, f"{name}[{shown}] has the key", False)

    def _sequence(self, value: Any, name: str, everything: bool) -> None:
        elements = Elements(value)
        if len(elements) > _TOO_MANY:
            return self._too_large(name, len(elements))
        if isinstance(value, (set, frozenset)) and all(map(is_plain, elements)):
            write = None if isinstance(value, frozenset) else functools.partial(refill, value)
            return self._cell(Cell(lambda: frozenset(elements), write, name, is_copy=True), False)
        if not isinstance(value, (tuple, frozenset)):
            self.found.containers.append(Container(value, name))
        self._note(f"{name}.__class__", type(value))
        for index, child in reversed(list(enumerate(elements))):
            self._push(child, f"{name}[{index}]", everything)

    def _object(self, value: Any, name: str, everything: bool) -> None:
        kind: type = type(value)
        origin = origin_of_class(kind)
        if origin == "internal":
            self._note(name, value)  # it may hold more than its attributes show
            if kind.__name__ == "SeedSequence":  # numpy's counts its children
                self.found.iterators.append(name)
            if is_immutable(kind):
                return
        if isinstance(value, LRScheduler):
            counters = {key for key, child in vars(value).items() if is_plain(child)}
            return self._entries(vars(value), name, frozenset(counters), everything)
        if is_generator(value):
            self.found.draws.append((name, value))
        elif origin != "library" and not (
            has_dictionary(value) or slots_of(kind) or is_without_state(kind)
        ):  # objects of a library's C code are taken for granted, as its functions are
            self.found.not_followed.append(f"{name} (a {kind.__name__}, whose state is in C)")
        self._attributes(value, name, everything)

    def _attributes(self, value: Any, name: str, everything: bool) -> None:
        """Visits the class and the attributes of an object, as far as names mention them."""
        kind: type = type(value)
        origin = origin_of_class(kind)
        if origin == "own":
            self.found.kinds.append(value)
        self._note(f"{name}.__class__", kind)
        self._class(kind, f"{name}.__class__")
        # A graph counts its calls, so of a graph only what the user asks for is compared.
        asked = self._reads.names_of_the_user() if is_of_engine(kind) else self._names
        is_whole = origin in self._whole or (self._whole and isinstance(value, _RECORDS))
        whole = everything or (is_whole and _is_record(value))
        names = None if whole else asked | names_within(kind)
        if has_dictionary(value):
            self._namespace(vars(value), name, everything, names)
        self._slots(value, slots_of(kind), name, everything, names)

    def _namespace(
        self, place: Namespace, name: str, everything: bool, names: set[str] | None = _OF_THE_CODE
    ) -> None:
        """Visits the entries of a dictionary of attributes; all of them if ``names`` is None."""
        names = self._names if names is _OF_THE_CODE else names
        mentioned = None if names is None else could_be_read(place, names, self._called)
        self._entries(place, name, mentioned, everything)

    def _slots(
        self, value: Any, slots: list[str], name: str, everything: bool, names: set[str] | None
    ) -> None:
        for key in slots:
            if names is None or key in names:
                read = functools.partial(getattr, value, key, GONE)
                write = functools.partial(setattr, value, key)
                self._cell(Cell(read, write, f"{name}.{key}"), everything)

    def _class(self, kind: type, name: str) -> None:
        """Visits data and functions of a class and its metaclass, as far as names mention them.

        Functions of libraries are taken for granted, and so is what their classes keep in names
        with two underscores.
        """
        for base in kind.__mro__:
            origin = origin_of_class(base)
            if base in self._classes or origin == "internal":
                continue
            self._classes.add(base)
            names = frozenset(self._names) | special_methods(base) | self._read_whole(base, origin)
            if origin == "library":
                names = frozenset(
                    name
                    for name in names & vars(base).keys()
                    if name[:2] != "__" and is_data(vars(base)[name])
                )
                if not names:
                    continue
            container = Container(vars(base), name, names, base)
            self.found.containers.append(container)
            for key, child in container.contents().items():
                unbound = getattr(child, "__func__", child)
                self._push(unbound, f"{name}.{key}", False)
        if type(kind) is not type:
            self._class(type(kind), f"{name}.__class__")

    def _read_whole(self, kind: type, origin: str) -> frozenset[str]:
        """Names in a class that the user's code may read, though nothing mentions them."""
        is_of_training = issubclass(kind, (nn.Module, Optimizer, LRScheduler))
        found = frozenset({"__dataclass_fields__"} if self._whole else ())
        if origin == "own" or not is_of_training:
            found |= self._of_any_name(vars(kind), _contents_of if origin == "own" else _data_of)
        return found

    def _of_any_name(
        self, place: Mapping[str, Any], part: Callable[[Mapping[str, Any]], frozenset[str]]
    ) -> frozenset[str]:
        """The names in a namespace that the user's code may read without mentioning them."""
        return part(place) if self._reads_namespaces else frozenset()

    def _function(self, function: types.FunctionType, name: str) -> None:
        code = function.__code__
        if function.__dict__:
            whole = self._of_any_name(function.__dict__, _contents_of)
            self._namespace(function.__dict__, name, False, self._names | whole)
        if code not in self._reads.code:
            return
        if is_of_package(code):
            return
        is_of_user = origin_of_code(code, function.__globals__) == "own"
        if is_of_user:
            self.found.functions.append(function)
            self._note(f"{name}.__code__", code)
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if not is_of_user:  # only the library itself could fill it anew
                self._push(contents_of_cell(cell), f"{name}:{key}", False)
                continue
            read = functools.partial(contents_of_cell, cell)
            write = functools.partial(setattr, cell, "cell_contents")
            self._cell(Cell(read, write, f"{name}:{key}"), False)
        for index, default in enumerate(function.__defaults__ or ()):
            self._push(default, f"{name}:default {index}", False)
        if function.__kwdefaults__:
            self._push(function.__kwdefaults__, f"{name}:defaults", False)

    def _globals(self) -> None:
        """Visits what the functions that ran find in Python's modules."""
        for code, globals_ in self._reads.code.items():
            if origin_of_code(code, globals_) == "internal":
                continue
            name = text_in(globals_, "__name__") or ""
            package = name if "__path__" in globals_ else name.rpartition(".")[0]
            package = text_in(globals_, "__package__") or package
            for name in sorted(imports_of(code, package) & sys.modules.keys()):
                self._looked_into.add(id(sys.modules[name]))
                self._push(sys.modules[name], name, False)
        as_values = self._reads.modules_as_values() if self._reads_namespaces else set()
        for container, separator in containers_of_globals(self._reads.code):
            self.found.containers.append(container)
            for key, child in container.contents().items():
                if isinstance(child, types.ModuleType) and id(child) not in as_values:
                    self._looked_into.add(id(child))
                self._push(child, f"{container.name}{separator}{key}", False)

    def _cache(self, cache: functools._lru_cache_wrapper[Any], name: str) -> None:
        """Visits the answers of a cached function; those that calls add later do not matter."""
        function = inspect.unwrap(cache)
        if not inspect.isfunction(function):
            return
        if function.__code__ not in self._reads.code:
            self.found.behind_caches.append(function)
        if origin_of_code(function.__code__, function.__globals__) != "own":
            return
        answers = Answers.of(cache)
        if answers is None or len(answers.kept) > _TOO_MANY:
            return self._too_large(f"{name}'s answers", 0 if answers is None else len(answers.kept))
        read = functools.partial(Answers.of, cache)
        self._cell(Cell(read, None, f"{name}'s answers", is_copy=True), False)
        self.found.may_grow.append(f"{name}(")
        for index, (key, answer) in enumerate(answers.kept.items()):
            self._push(answer, f"{name}({shown_key(index, key, self._tensor_names)})", False)

    def _cell(self, cell: Cell, everything: bool) -> None:
        self.found.cells.append(cell)
        value = cell.read()
        if value is GONE or cell.is_copy:
            self._note(cell.name, value)
        else:
            self._push(value, cell.name, everything)

    def _array(self, value: Any, name: str) -> None:
        size = getattr(value, "nbytes", None)
        size = memoryview(value).nbytes if size is None else size
        if size > 1 << 16 or getattr(getattr(value, "dtype", None), "hasobject", False):
            return self._too_large(name, size)
        read = functools.partial(bytes_of, value)
        write = functools.partial(set_bytes, value)
        self._cell(Cell(read, write, name, is_copy=True), False)
        if has_dictionary(value):  # numpy's masked arrays keep their masks there
            self._namespace(vars(value), name, False, None)

    def _too_large(self, name: str, size: int) -> None:
        self._note(name, size)
        self.found.not_followed.append(f"{name} ({size:,} entries or bytes)")


def _is_made_anew(value: Any) -> bool:
    """Whether it does not matter which object lies there, but only what it holds."""
    if (
        isinstance(value, (tuple, frozenset, weakref.ref))
        and type(value) not in _WITHOUT_ATTRIBUTES
    ):
        return not (has_dictionary(value) and vars(value))
    return isinstance(value, _MADE_ANEW)


def _data_of(place: Mapping[str, Any]) -> frozenset[str]:
    """Names of plain data in a class or a module, without those with two underscores."""
    return frozenset(name for name in place if name[:2] != "__" and is_plain(place[name]))


def _contents_of(place: Mapping[str, Any]) -> frozenset[str]:
    """Names of data and of functions in a class, a module or a function, without such names."""
    return frozenset(
        name
        for name, value in place.items()
        if name[:2] != "__" and name != "_abc_impl" and (is_data(value) or _is_function(value))
    )


def _is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, staticmethod, classmethod, property))


def _is_record(value: Any) -> bool:
    """Whether an object only holds data, and no part of the training."""
    held = vars(value).values() if has_dictionary(value) else ()
    return not any(isinstance(each, (nn.Module, Optimizer, LRScheduler)) for each in held)


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _is_read(tensor: Tensor | None, addresses: frozenset[int] | set[int]) -> bool:
    return tensor is not None and address(tensor) in addresses
