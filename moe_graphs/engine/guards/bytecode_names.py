"""The Python that ran in a block: names that it can have read, and impure calls that it made.

A graph runs no Python. To know what its values depend on, ``sys.setprofile`` watches one eager run.
The code of every function that ran mentions all names that the function can look up: in its
``self``, its arguments, its globals and its closure. ``guards.py`` looks up the same names.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import gc
import importlib
import inspect
import itertools
import logging
import os
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from moe_graphs.engine.guards.introspection import (
    attribute_of,
    contents_of_cell,
    is_of_standard_library,
    is_taken_for_granted,
    module_of,
    names_in,
    origin_of,
    origin_of_class,
    origin_of_code,
    text_in,
    with_inner_code,
)
from moe_graphs.engine.guards.known_functions import CLASSES, FUNCTIONS, NOT_OF_TORCH
from moe_graphs.engine.guards.looked_up_names import ANY, looks_up_unseen, names_looked_up
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import BY_IDENTITY
from moe_graphs.errors import CaptureError

# ---- impure calls: their answers cannot be compared later, and no name shows them

# They give work to another thread or process, or wait for what it does.
_THREADS_OF_C = {"lock.acquire", "SimpleQueue.get", "SimpleQueue.put", "_thread.start_new_thread"}
# Impure functions of Python, by module; an empty set means all functions of the module.
_OF_PYTHON: dict[str, frozenset[str]] = {
    "inspect": frozenset({"currentframe", "stack"}),
    "threading": frozenset({"current_thread", "get_ident", "active_count", "enumerate"}),
    "random": frozenset({"getstate"}),
    "uuid": frozenset({"uuid1", "uuid4"}),
    "genericpath": frozenset(),
    "posixpath": frozenset({"abspath", "realpath", "expanduser"}),
    "pathlib": frozenset({"read_text", "read_bytes", "exists", "is_file", "is_dir", "stat", "open",
                          "iterdir", "glob", "cwd", "home"}),
    "tempfile": frozenset(),
    "subprocess": frozenset(),
    "socket": frozenset(),
}  # fmt: skip
# The same as ``_THREADS_OF_C`` in Python; parts of packages are named by the package.
_THREADS: dict[str, frozenset[str]] = {
    "threading": frozenset({"start", "join", "wait", "wait_for"}),
    "queue": frozenset({"get", "put", "join"}),
    "concurrent": frozenset(),
    "multiprocessing": frozenset({"start", "join", "apply", "apply_async", "map", "map_async",
                                  "imap", "starmap", "get", "put", "send", "recv", "poll"}),
    "asyncio": frozenset(),
}  # fmt: skip
# Functions whose answers may change, and which are asked again at every replay.
_COMPARED = {
    function.__code__
    for function in (logging.Logger.isEnabledFor, logging.Logger.getEffectiveLevel)
}
# Transformer Engine updates scales at the end of its autocast, and decides at its beginning which
# module is first.
_ENTERS_FP8 = ("fp8_autocast_enter", "autocast_enter")
_BY_ARGUMENTS = ("seed", *_ENTERS_FP8)  # functions that are impure by their arguments
FP8 = "Transformer Engine's autocast"
_CHECKPOINT = "Transformer Engine's checkpoint"
# Under a dispatch mode dynamo leaves a function uncompiled for good, and uncompiled code rounds in
# another way.
_COMPILED = "torch.compile"
_OPERATIONS_OF_THE_USER = str(pathlib.Path(torch.__file__).parent / "_library")
_UNSEEDED = "without a seed: "  # the names of calls that ask the system for random numbers
_OF_THREADS = "threads: "  # the names of calls that give work to other threads begin so
_OF_NUMPY = {"geterr", "get_printoptions"}
# Attributes that lead to globals.
TO_GLOBALS = frozenset({"__globals__", "f_globals", "f_locals", "gi_frame"})
# Attributes in which a forward's inputs and weights differ from the static tensors of a graph.
OF_HISTORY = frozenset({"grad", "grad_fn", "is_leaf", "_base", "_version", "_is_view"})
OF_VERSIONS = frozenset({"_version"})  # a replay counts a tensor once that a step writes often


def refusal(impure: str) -> str:
    """A message that says why no graph can have the impure call, and what to do."""
    if impure == _COMPILED:
        return (
            "it calls a function of torch.compile, which does something else when it is watched: "
            "leave it out, or do not compile there (torch.compiler.disable; for Transformer "
            "Engine's fused functions NVTE_TORCH_COMPILE=0)"
        )
    if impure == _CHECKPOINT:
        return f"it calls {impure}, which keeps scales in Python: checkpoint around it instead"
    if impure == FP8:
        return f"it enters {impure}: enter it outside of the scope, around the whole step"
    if impure.startswith(_UNSEEDED):
        return (
            f"it asks the system for random numbers ({impure.removeprefix(_UNSEEDED)}()), since it "
            f"makes a generator without a seed or uses secrets, and a replay does not do so again: "
            f"draw with torch"
        )
    if impure.startswith(_OF_THREADS):
        return (
            f"it calls {impure.removeprefix(_OF_THREADS)}(), so that another thread works for it, "
            f"and a graph has the operations of one thread: do that work on the thread of the call"
        )
    return (
        f"it calls {impure}(), whose answer may be another one at every call, and a replay runs no "
        f"Python: call it outside, and pass on the answer"
    )


def _asking(who: str, names: Collection[str]) -> str:
    return (
        f"{who} asks for .{min(names)} of a tensor: inside of a graph tensors are other objects, "
        f"with another history: ask outside"
    )


def of_c(function: Any) -> str | None:
    """The name of a function of C that is neither torch's nor in the table, else None."""
    owner, name = getattr(function, "__self__", None), function.__name__
    module = getattr(function, "__module__", None) or ""
    if owner is None and not module:  # a static method of a class in C
        kind_of_c = function.__qualname__.partition(".")[0]
        # Python 3.12 binds a method to None if the call lacks its object, before the call raises.
        owner = object() if kind_of_c == "NoneType" else vars(builtins).get(kind_of_c)
    if module or owner is None or isinstance(owner, types.ModuleType):
        label, is_known = f"{module}.{name}", name in FUNCTIONS.get(module, ())
    else:
        kind = _home_of_method(owner, name)
        module, label = module_of(kind), f"{kind.__qualname__.replace('Base', '')}.{name}"
        unknown = CLASSES.get(f"{module}.{kind.__qualname__}")
        is_known = unknown is not None and name not in unknown
    if is_taken_for_granted(module):
        is_known = label.removeprefix("torch.").removeprefix("_C.") not in NOT_OF_TORCH
    if is_known:
        return None
    return f"{_OF_THREADS}{label}" if label in _THREADS_OF_C else label


def _home_of_method(owner: Any, name: str) -> type:
    """The class in C that a method comes from; ``owner`` may be a class itself."""
    kinds = [owner, type(owner)] if isinstance(owner, type) else [type(owner)]
    for base in (base for kind in kinds for base in kind.__mro__):
        if not isinstance(vars(base).get(name, of_c), types.FunctionType):
            return base
    return kinds[0]


def of_python(frame: types.FrameType, *, of_the_user: bool) -> str | None:
    """The name of the Python function that has just been called if the call is impure, else None.

    Args:
        of_the_user: whether code of the user's own has called it.
    """
    if frame.f_code is torch.Tensor.__reduce_ex__.__code__:
        return "pickle.dumps"
    module, name = text_in(frame.f_globals, "__name__") or "", frame.f_code.co_name
    if (module, name) == ("random", "seed") and frame.f_locals.get("a", 0) is None:
        return f"{_UNSEEDED}random.Random" if _is_asked_by_the_user(frame) else None
    if name in _ENTERS_FP8 and frame.f_locals.get("enabled"):
        return FP8
    if (module, name) == ("transformer_engine.pytorch.distributed", "checkpoint"):
        return _CHECKPOINT
    if (module, name) == ("torch._dynamo.eval_frame", "compile_wrapper"):
        return _COMPILED
    if not of_the_user:
        return None
    if module.partition(".")[0] == "numpy":
        return f"numpy.{name}" if name in _OF_NUMPY else None
    threads = _found(_THREADS, module if module in _THREADS else module.partition(".")[0], name)
    if threads is not None:
        return f"{_OF_THREADS}{threads}"
    return _found(_OF_PYTHON, "pathlib" if module.startswith("pathlib") else module, name)


def _unless_in_an_operation(impure: str | None, frame: types.FrameType | None) -> str | None:
    """The name of the call, but None within an operation that ``torch.library`` knows."""
    while impure is not None and frame is not None:
        if frame.f_code.co_filename.startswith(_OPERATIONS_OF_THE_USER):
            return None
        frame = frame.f_back
    return impure


def _is_asked_by_the_user(frame: types.FrameType | None) -> bool:
    """Whether the user's own code is the first on the stack outside of the standard library.

    Code of numpy that is compiled is not on the stack, so it counts as part of that library, too.
    """
    while frame is not None and is_of_standard_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and origin_of(frame.f_code.co_filename) == "own"


def _found(impure_calls: dict[str, frozenset[str]], module: str, name: str) -> str | None:
    names = impure_calls.get(module)
    if names is None or (names and name not in names):
        return None
    return f"{module}.{name}"


# ---- names that were read

# Files whose functions are not noted. Every operation under a dispatch mode asks torch's registry.
_NOT_NOTED = (
    str(pathlib.Path(__file__).parents[1]),
    str(pathlib.Path(torch.__file__).parent / "_library" / "simple_registry.py"),
)
# Functions that set the state of a random number generator or ask for its seed; a replay would not
# do it again.
_SEEDING = {
    function.__code__: function.__name__
    for function in (torch.manual_seed, torch.seed, torch.set_rng_state, torch.cuda.manual_seed,
                     torch.cuda.manual_seed_all, torch.cuda.seed, torch.cuda.set_rng_state,
                     torch.initial_seed, torch.cuda.initial_seed)
    for function in (getattr(function, "__wrapped__", function),)
    if hasattr(function, "__code__")
}  # fmt: skip


_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_LOADS_A_VARIABLE = ("LOAD_FAST", "STORE_FAST_LOAD_FAST")
_OF_OWNERS = {
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "COPY",
    "SWAP",
}  # they find the object of an attribute
_TEMPLATES = {"format", "format_map", "attrgetter", "methodcaller"}  # their strings contain names
_JOIN = {"join", "format"}  # they put names together
_CONTEXT = torch._C._FunctionBase  # what autograd functions call ``ctx``
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
# Functions and attributes that hand out all attributes of an object, whatever their names.
_WHOLE = {"vars", "__dict__", "asdict", "astuple", "fields", "model_dump", "dir", "getmembers",
          "__getstate__", "to_dict"}  # fmt: skip
# Names among them that concern classes, modules and functions, too; ``__dict__`` also stands for
# what ``getattr`` reads by a name that is put together.
_OF_NAMESPACES = {"vars", "__dict__", "dir", "getmembers"}
# Functions that look up an attribute whose name may be data.
_BY_DATA = {"getattr", "hasattr", "attrgetter", "methodcaller", "__getattribute__"}


@dataclass(slots=True)
class _CalledCode:
    """Facts of code that are the same at all of its calls.

    Where dynamo waits for a function of the user's, it would compile one of the engine's that names
    torch, or gets a tensor, or a tuple or dictionary with one, as globals are.

    Attributes:
        origin: as of ``origin_of_code``, once the code has called a function in C.
        matters: whether its calls are noted: it is neither the engine's nor the body of a module.
        loads_modules: whether it is Python's own code that loads a module.
        may_be_impure: whether ``of_python`` may name its calls.
        first: the name of its first argument, or None.
        acts: whether anything is to be done at a further call.
    """

    code: types.CodeType  # kept alive, so that its id stays its own
    globals_: dict[str, Any]
    matters: bool = False
    loads_modules: bool = False
    may_be_impure: bool = False
    first: str | None = None
    acts: bool = False
    origin: str | None = None

    @classmethod
    def of(cls, frame: types.FrameType) -> _CalledCode:
        code, globals_ = frame.f_code, frame.f_globals
        if code.co_name == "_find_and_load" and "<frozen" in code.co_filename:
            return cls(code, globals_, loads_modules=True, acts=True)
        if code.co_filename.startswith(_NOT_NOTED) or code.co_name == "<module>":
            return cls(code, globals_)
        may_be_impure = code.co_name in _BY_ARGUMENTS or code in _COMPARED
        may_be_impure = may_be_impure or of_python(frame, of_the_user=True) is not None
        first = code.co_varnames[0] if code.co_argcount else None
        acts = may_be_impure or first is not None
        return cls(code, globals_, True, False, may_be_impure, first, acts)


class AccessedNames:
    """A context that notes which Python runs inside, on this thread.

    Args:
        in_step: whether the block is a whole training step, with whatever surrounds its modules.
        refuse: whether an impure call raises ``CaptureError`` where it is made, before it has done
            anything. Otherwise ``check_impure_calls`` raises.

    Attributes:
        code: code of every function that ran, with the globals that it looked its names up in.
        names: every name that this code mentions: of attributes, of globals, and in strings.
        names_of_modules: the same for reads of modules' attributes, which code of torch does, too.
        values, values_of_modules: the names among them that are not only called as methods. For
            example ``clear`` in ``x.clear()`` reads no number of that name.
        owners: objects whose methods ran, by id, except those that the block made.
        of_contexts: values that the ``ctx`` of autograd functions held, without tensors.
        questions: calls of ``_COMPARED``, whose answers guards compare.
        given: names that the user's code gave to ``getattr`` and its kin, however it made them.
        impure_calls: functions that were called and read state that nobody can compare later.
        is_estimate: whether functions are among the code that may never run. No data is read for
            further names then.
    """

    is_estimate = False

    def __init__(self, *, in_step: bool = False, refuse: bool = False) -> None:
        self._open_impure_calls = {FP8} if in_step else set()
        self._refuse = refuse
        self.code: dict[types.CodeType, dict[str, Any]] = {}
        self.names: set[str] = set()
        self.names_of_modules: set[str] = set()
        self.values: set[str] = set()
        self.values_of_modules: set[str] = set()
        self.owners: dict[int, Any] = {}
        self.given: set[str] = set()
        self.impure_calls: list[str] = []
        self.questions: dict[str, Callable[[], Any]] = {}
        self._ran: set[types.CodeType] = set()
        self.of_contexts: dict[str, Any] = {}
        self._seen: dict[int, weakref.ref[Any] | None] = {}
        self._may_have_state = functools.cache(_may_have_state)  # a block makes some thousand calls
        self._import: types.FrameType | None = None
        self._known: dict[int, _CalledCode] = {}

    def __enter__(self) -> AccessedNames:
        # Dispatch modes and optimizers import it with their first operation, and that import must
        # not be watched.
        importlib.import_module("torch._dynamo")
        self._before = Snapshot(python_random=True)
        self._profiler = sys.getprofile()
        self._collecting = gc.get_threshold()
        gc.set_threshold(0)  # finalizers do not belong to the block
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        _profile_again(self._profiler)
        gc.set_threshold(*self._collecting)
        self._ran = set(self.code)
        self.code.update(_not_seen_running(self.code))
        for code in self.code:
            self._mentions(code)
        self._mention(self.given)
        alive = (reference() for reference in self._seen.values() if reference is not None)
        self.owners = {id(owner): owner for owner in alive if owner is not None}
        self._seen.clear()
        self._known.clear()

    @classmethod
    def before_running(
        cls, *functions: Callable[..., Any], with_inner: bool = False
    ) -> AccessedNames:
        """Names that functions mention, found without running them.

        The names are in the functions' own code and in that of functions that they name or enclose.
        ``with_inner`` adds functions that they make, such as hooks.
        """
        accessed, todo = cls(), [*functions]
        while todo:
            each = todo.pop()
            wrapped = attribute_of(each, "__wrapped__")
            todo += [] if wrapped is None else [wrapped]
            each = attribute_of(each, "__func__") or each
            code = attribute_of(each, "__code__")
            if code is None or code in accessed.code:
                continue
            if origin_of_code(code, each.__globals__) == "internal":
                continue
            todo += filter(callable, map(contents_of_cell, each.__closure__ or ()))
            for inner in with_inner_code(code) if with_inner else (code,):
                accessed.code[inner] = each.__globals__
                accessed._mentions(inner)
                todo += filter(callable, map(each.__globals__.get, global_names_of(inner)))
        return accessed

    @classmethod
    def together(cls, *several: AccessedNames) -> AccessedNames:
        """The names that any of the blocks has read."""
        united = cls()
        for accessed in several:
            united.code.update(accessed.code)
            united.names |= accessed.names
            united.names_of_modules |= accessed.names_of_modules
            united.values |= accessed.values
            united.values_of_modules |= accessed.values_of_modules
            united.owners.update(accessed.owners)
            united.is_estimate |= accessed.is_estimate
            united.given |= accessed.given
            united.impure_calls += accessed.impure_calls
            united.questions.update(accessed.questions)
        return united

    def reads_whole(self, names: set[str]) -> bool:
        """Whether code that mentions these names may read all attributes of an object at once."""
        return not (self.is_estimate or _WHOLE.isdisjoint(names))

    @property
    def looks_up_data(self) -> bool:
        """Whether some code of the user looks up attributes whose names may be data.

        A library that does so is taken for granted. Otherwise every word in its data, such as the
        key "step" in an optimizer's state, would be the name of an attribute that is read.
        """
        return not (self.is_estimate or _BY_DATA.isdisjoint(self.names_of_the_user()))

    @property
    def reads_namespaces(self) -> bool:
        """Whether code of the user's may read a class, module or function by any name."""
        return not (self.is_estimate or _OF_NAMESPACES.isdisjoint(self.names_of_the_user()))

    def modules_as_values(self) -> set[int]:
        """Ids of modules that the user's code hands on, as in ``vars(settings)``."""
        code = self._code_of_the_user()
        chains = ((self.code[each], chain) for each in code for chain in _ends_of_globals(each))
        found = (module_at(*each) for each in chains)
        return {id(module) for module in found if module is not None}

    @property
    def asks_for_identities(self) -> bool:
        """Whether code of the user's compares objects by identity: ``mask is self.mask``."""
        return any(map(_asks_for_identities, self._code_of_the_user()))

    def with_found(
        self, names: set[str], behind_caches: Sequence[Callable[..., Any]]
    ) -> AccessedNames | None:
        """Union of the names with those that a walk has found; None if it has found no others."""
        more = AccessedNames.before_running(*behind_caches, with_inner=True)
        more._mention(names)
        new = more.values - self.values or more.names - self.names or more.code.keys() - self.code
        return AccessedNames.together(self, more) if new else None

    def has_all_of(self, other: AccessedNames) -> bool:
        """Whether another block mentions no other names, and runs no other code than torch's."""
        new = other.code.keys() - self.code.keys()
        origins = (origin_of_code(code, other.code[code]) for code in new)
        return other.names <= self.names and all(each == "internal" for each in origins)

    @property
    def loaded(self) -> set[str]:
        """Names that some code may read before it assigns them."""
        return set().union(*map(_loaded_by, self.code))

    @property
    def counted(self) -> set[str]:
        """Attributes to which the code only adds numbers."""
        found = set().union(*map(_counted_by, self.code))
        return {n for n in found if all(n in _counted_by(c) or n not in _names_of(c)
                                        for c in self.code)}  # fmt: skip

    def names_of_the_user(self) -> set[str]:
        """Names that the user's own code mentions."""
        return self.given.union(*map(_names_of, self._code_of_the_user()))

    def _code_of_the_user(self) -> list[types.CodeType]:
        return [code for code, of in self.code.items() if origin_of_code(code, of) == "own"]

    def check_impure_calls(self, *, asked: frozenset[str] = frozenset()) -> None:
        """Checks that the block made no impure call and asked for no attribute of ``asked``.

        Args:
            asked: attributes of tensors whose values in a graph differ from those outside.

        Raises:
            CaptureError: if the block asks for something that can be different at every call.
        """
        if self.impure_calls:
            raise CaptureError(refusal(self.impure_calls[0]))
        own = self._code_of_the_user()
        for code in own:
            if _names_of(code) & TO_GLOBALS or ("sys", "modules") in attributes_of_globals(code):
                raise CaptureError(
                    f"{code.co_qualname} looks up globals by another way than their names, and "
                    f"nobody can compare what it finds"
                )
        found = (
            (code, _names_of(code) & asked - _called_methods_of(code))
            for code in own
            if asked and code in self._ran
        )
        for code, names in found:
            if names:
                raise CaptureError(_asking(code.co_qualname, names))
        if self.given & asked:
            raise CaptureError(_asking("getattr", self.given & asked))

    def check_random(self) -> None:
        """Puts back what was drawn from generators of Python and numpy, and refuses such blocks.

        Raises:
            CaptureError: if the block draws from these generators, or seeds those of torch.
        """
        seeding = next((_SEEDING[code] for code in self.code if code in _SEEDING), None)
        if seeding is not None:
            raise CaptureError(f"torch's {seeding}() is called, and a replay would not do it again")
        drawn = self._before.drawn_from()
        self._before.put_back()
        if drawn is not None:
            raise CaptureError(
                f"it draws from {drawn}, which a replay does not do again: draw with torch"
            )

    def owns_what_ran(self, value: Any) -> bool:
        """Whether a method of ``value`` ran, and ``value`` outlived the block."""
        return self.owners.get(id(value)) is value

    def _mention(self, names: set[str]) -> None:
        for each in (self.names, self.values, self.names_of_modules, self.values_of_modules):
            each |= names

    def _mentions(self, code: types.CodeType) -> None:
        if origin_of_code(code, self.code[code]) == "own" and looks_up_unseen(code):
            self.given.add(ANY)
        self.names_of_modules |= _names_of(code)
        self.values_of_modules |= _values_of(code)
        if origin_of_code(code, self.code[code]) != "internal":
            self.names |= _names_of(code)
            self.values |= _values_of(code)

    def _note(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "c_return" or event == "c_exception":
            return
        if self._import is not None:  # finders and bodies of modules run once, and are not reads
            if event == "return" and self._import is frame:
                self._import = None
            return
        if event == "return":
            return
        known = self._known.get(id(frame.f_code))
        if known is None or known.globals_ is not frame.f_globals:
            known = _CalledCode.of(frame)
            if event == "call":
                self._known[id(frame.f_code)] = known
                if known.matters:
                    self.code.setdefault(frame.f_code, frame.f_globals)
        if event == "c_call":
            self._note_call_of_c(frame, argument, known)
        elif known.acts:
            self._note_call(frame, known)

    def _note_call_of_c(self, frame: types.FrameType, function: Any, known: _CalledCode) -> None:
        if known.origin is None:
            known.origin = origin_of_code(known.code, known.globals_)
        if known.origin == "own":
            self._open(_unless_in_an_operation(of_c(function), frame))
            self.given.update(names_looked_up(function, frame))
        elif function is os.urandom and _is_asked_by_the_user(frame):
            self._open(f"{_UNSEEDED}{function.__name__}")

    def _note_call(self, frame: types.FrameType, known: _CalledCode) -> None:
        if known.loads_modules:
            self._import = frame
        if known.may_be_impure:
            self._note_impure(frame)
        if known.first is None:
            return
        owner = frame.f_locals.get(known.first)
        kind: type = type(owner)
        if id(owner) in self._seen or not self._may_have_state(kind):
            if issubclass(kind, _CONTEXT):
                self._note_context(owner)
            return
        # Objects that are made inside the block are no inputs of it.
        is_made_here = frame.f_code.co_name in _CONSTRUCTORS
        with contextlib.suppress(TypeError):  # without weak references it is found by name
            self._seen[id(owner)] = None if is_made_here else weakref.ref(owner)

    def _note_impure(self, frame: types.FrameType) -> None:
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else "?"
        of_the_user = origin_of(caller) == "own"
        self._open(of_python(frame, of_the_user=of_the_user))
        if of_the_user and frame.f_code in _COMPARED:
            self._note_question(frame)

    def _note_context(self, context: Any) -> None:
        for name, value in vars(context).items():
            if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
                self.of_contexts[f"{type(context).__name__}.{name}"] = value

    def _note_question(self, frame: types.FrameType) -> None:
        owner, *rest = [
            frame.f_locals[name] for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]
        ]
        asked = functools.partial(getattr(owner, frame.f_code.co_name), *rest)
        self.questions[f"{owner!r}.{frame.f_code.co_name}{tuple(rest)}"] = asked

    def _open(self, impure: str | None) -> None:
        if (
            impure is not None
            and impure not in self.impure_calls
            and impure not in self._open_impure_calls
        ):
            self.impure_calls.append(impure)
            if self._refuse:
                self.check_impure_calls()


def functions_of(kind: type) -> list[types.FunctionType]:
    """Methods of a user's class, backwards of autograd functions among them."""
    own = [base for base in kind.__mro__ if origin_of_class(base) == "own"]
    found = [getattr(value, "__func__", value) for base in own for value in vars(base).values()]
    return [value for value in found if isinstance(value, types.FunctionType)]


def _may_have_state(kind: type) -> bool:
    """Whether objects of a class are watched: modules, and objects of the user's own classes.

    Other objects are found by name.
    """
    if issubclass(kind, torch.nn.Module):
        return True
    if issubclass(kind, (torch.Tensor, torch._C._FunctionBase, *BY_IDENTITY)):
        return False
    return kind.__dictoffset__ != 0 and origin_of_class(kind) == "own"  # it has attributes


def _not_seen_running(
    code: dict[types.CodeType, dict[str, Any]],
) -> dict[types.CodeType, dict[str, Any]]:
    """Functions that may run unseen: what the code makes or names for the backward.

    These are hooks, and backwards of autograd functions, which run on any thread.
    """
    found = {}
    for each, globals_ in code.items():
        if origin_of_code(each, globals_) == "internal":
            continue
        for value in map(globals_.get, global_names_of(each)):
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                function = inspect.unwrap(value.backward)
                if inspect.isfunction(function):
                    found[function.__code__] = function.__globals__
        found.update(dict.fromkeys(with_inner_code(each), globals_))
    return found


class unwatched:
    """A context for the engine's own work within a watched block, which is not to be noted."""

    __slots__ = ("_profiler",)

    def __enter__(self) -> Self:
        self._profiler = sys.getprofile()
        sys.setprofile(None)
        return self

    def __exit__(self, *exception: object) -> None:
        _profile_again(self._profiler)

    def end(self) -> None:
        """Watches again before the context ends."""
        _profile_again(self._profiler)


def _profile_again(profiler: Any) -> None:
    """Profiles again as before.

    ``profiler`` is what ``sys.getprofile`` gave; cProfile's is no function (until Python 3.12).
    """
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        profiler.enable()


@functools.cache
def global_names_of(code: types.CodeType) -> frozenset[str]:
    """The names that the code looks up in its module."""
    instructions = dis.get_instructions(code)
    return frozenset(i.argval for i in instructions if i.opname in _OF_GLOBALS)


@functools.cache
def _asks_for_identities(code: types.CodeType) -> bool:
    """Whether code has an ``is`` between two values, neither of them a constant, or an ``in``."""
    loaded: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        is_constant = loaded is not None and loaded.opname == "LOAD_CONST"
        if instruction.opname == "CONTAINS_OP" or (
            instruction.opname == "IS_OP" and not is_constant
        ):
            return True
        if instruction.opname != "CACHE":
            loaded = instruction
    return False


@functools.cache
def imports_of(code: types.CodeType, package: str) -> frozenset[str]:
    """The names of the modules that the code's import statements may look up."""
    found: set[str] = set()
    constants: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level, attributes = constants[-2:]
            base = package.rsplit(".", level - 1)[0] if level > 1 else package
            name = ".".join(filter(None, (base if level else "", instruction.argval)))
            found |= {
                name,
                name.partition(".")[0],
                *(f"{name}.{each}" for each in attributes or ()),
            }
        elif instruction.opname.startswith("LOAD_"):
            constants.append(instruction.argval)
    return frozenset(found)


@functools.cache
def _names_of(code: types.CodeType) -> frozenset[str]:
    return frozenset(code.co_names) | _values_of(code)


@functools.cache
def attributes_of_globals(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """Paths ``a.b.c`` that the code looks up, where ``a`` is a name in its module."""
    found: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            chain = (instruction.argval,)
        elif chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, instruction.argval)
            found.add(chain)
        elif instruction.opname != "CACHE":
            chain = ()
    return frozenset(found)


@functools.cache
def _ends_of_globals(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """Paths ``a.b`` of which the code uses what lies there, and not an attribute of that."""
    found: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, instruction.argval)
        elif instruction.opname != "CACHE":
            if chain and instruction.opname not in ("STORE_ATTR", "DELETE_ATTR"):
                found.add(chain)
            chain = (instruction.argval,) if instruction.opname == "LOAD_GLOBAL" else ()
    return frozenset(found)


def module_at(globals_: dict[str, Any], path: Sequence[str]) -> types.ModuleType | None:
    """The module that code with these globals finds at a path ``a.b``, or None."""
    found: Any = globals_.get(path[0])
    for name in path[1:]:
        if not isinstance(found, types.ModuleType):
            return None
        found = vars(found).get(name)
    return found if isinstance(found, types.ModuleType) else None


@functools.cache
def _called_methods_of(code: types.CodeType) -> frozenset[str]:
    """Names that are only called as methods: ``torch.autograd.grad(...)`` reads no ``.grad``."""
    return frozenset(code.co_names) - _values_of(code) - {"_is_view"}


@functools.cache
def _values_of(code: types.CodeType) -> frozenset[str]:
    """Names that the code mentions otherwise than to call a method."""
    named = {
        i.argval
        for i in dis.get_instructions(code)
        if i.opcode in dis.hasname and not _loads_a_method(i)
    }
    operations = {i.opname for i in dis.get_instructions(code)}
    if "MATCH_CLASS" in operations or _puts_names_together(code):
        named.add(ANY)
    return frozenset(named) | frozenset(code.co_freevars) | _strings_of(code)


@functools.cache
def _puts_names_together(code: types.CodeType) -> bool:
    """Whether the code looks up attributes by names that it may have put together."""
    operations = {i.opname for i in dis.get_instructions(code)}
    puts_together = "BUILD_STRING" in operations or not _JOIN.isdisjoint(code.co_names)
    return "getattr" in code.co_names and puts_together


@functools.cache
def _strings_of(code: types.CodeType) -> frozenset[str]:
    """Names in the code's strings."""
    strings = {value for value in _constants(code.co_consts) if isinstance(value, str)}
    if _TEMPLATES.isdisjoint(code.co_names):
        return frozenset(name for value in strings for name in names_in(value))
    return frozenset(name for value in strings for name in re.findall(r"\w+", value))


@functools.cache
def _loaded_by(code: types.CodeType) -> frozenset[str]:
    """Names that the code mentions, without attributes that it always assigns before it reads."""
    instructions = list(dis.get_instructions(code))
    owners: dict[str, set[Any]] = {}
    first: dict[str, dis.Instruction] = {}
    for before, each in itertools.pairwise(instructions):
        if each.opcode in dis.hasname:
            first.setdefault(each.argval, each)
            owner = before.argval if before.opname.startswith(_LOADS_A_VARIABLE) else each.offset
            owners.setdefault(each.argval, set()).add(_last(owner))
    written = set(chain.from_iterable(map(_variables_written, instructions)))
    around = [(i.offset, i.argval) for i in instructions if i.opcode in dis.hasjrel]
    of_handlers = set[str]()
    bytecode: Any = dis.Bytecode(code)  # its exception entries are in no stub
    for entry in bytecode.exception_entries:
        end = _end_of_skipped(instructions, entry.start, entry.target)
        around.append((entry.start, end))
        if end < entry.target:
            of_handlers |= {i.argval for i in instructions
                            if i.offset >= entry.target and i.opcode in dis.hasname}  # fmt: skip
    assigned = {
        name
        for name, each in first.items()
        if each.opname == "STORE_ATTR"
        and name not in of_handlers
        and len(owners[name]) == 1
        and owners[name].isdisjoint(written)
        and not any(start < each.offset < end for start, end in around)
    }
    return _names_of(code) - (assigned - _strings_of(code))


def _end_of_skipped(instructions: list[dis.Instruction], start: int, target: int) -> int:
    """The end of the code that an exception may skip, whose handler begins at ``target``.

    Python 3.12 and newer put handlers behind the function and jump back from there.
    """
    back = (i.argval for i in instructions
            if i.offset >= target and i.opname.startswith("JUMP_BACKWARD"))  # fmt: skip
    return max((offset for offset in back if start < offset < target), default=target)


@functools.cache
def _counted_by(code: types.CodeType) -> frozenset[str]:
    """Attributes that the code mentions only in ``self.n += 1`` or ``self.n = self.n + 1``."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _OF_OWNERS]
    at = {n: i.argval for n, i in enumerate(instructions) if i.opcode in dis.hasname}
    counted: set[int] = set()
    for number, each in enumerate(instructions[:-3]):
        one, add, store = instructions[number + 1 : number + 4]
        if (
            each.opname == "LOAD_ATTR"
            and type(one.argval) is int
            and add.opname == "BINARY_OP"
            and add.argrepr in ("+", "+=", "-", "-=")
            and store.opname == "STORE_ATTR"
            and store.argval == each.argval
        ):
            counted |= {number, number + 3}
    others = {name for number, name in at.items() if number not in counted}
    return frozenset(at[number] for number in counted) - others - _strings_of(code)


def _variables_written(instruction: dis.Instruction) -> tuple[str, ...]:
    if not instruction.opname.startswith("STORE_FAST"):
        return ()
    argval = instruction.argval
    variables = argval if isinstance(argval, tuple) else (argval,)
    return variables[:1] if "LOAD" in instruction.opname else variables


def _last(variables: Any) -> Any:
    """The last one of the variables of an instruction that loads several."""
    return variables[-1] if isinstance(variables, tuple) else variables


def _loads_a_method(instruction: dis.Instruction) -> bool:
    if sys.version_info < (3, 12):
        return instruction.opname == "LOAD_METHOD"
    return instruction.opname == "LOAD_ATTR" and bool(instruction.arg & 1)


def _constants(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, frozenset)):
            yield from _constants(tuple(value))
        else:
            yield value
