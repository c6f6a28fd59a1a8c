"""Functions in C that are known: guards see a change of what they are called with."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import copy
import datetime
import decimal
import functools
import hashlib
import importlib
import io
import itertools
import random
import re
import struct
import threading
import time
import types

import numpy as np
import pytest
import torch

from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.guards import Guards
from moe_graphs.engine.guards.known_functions import CLASSES, FUNCTIONS
from moe_graphs.errors import CaptureError
from refusal_runs import ENGINES, Scope, check

NAMES = sorted(f"{module}.{name}" for module, names in FUNCTIONS.items() for name in names)
# A value, and the value that it is exchanged for.
VALUES = [
    (0.5, 0.25),
    (3, 5),
    (2.5, 1.5),
    ([3, 1], [4, 2, 9]),
    (bool, str),
    (np.eye(2), np.ones((2, 2))),
    ({"a": 1}, {"a": 2}),
    ("ab", "cb"),
    (b"abcdefgh", b"bcdefghi"),
    (bytearray(8), bytearray(9)),
    (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
]
ARGUMENTS = [
    "v",
    "v, v",
    "v, 2",
    "[v]",
    "v, 1, 2",
    "[v, v], [v, v]",
    "v, 'a'",
    "v, 'a', 3",
    "v, int",
    "lambda *_: v, [1, 2]",
    "'i', 3 + v",
    "'i', bytes(v)[:4]",
    "'i', v",
    "'i', v, 0, 3",
    "'i', v, 0",
    "'x', [v], 'lambda: v', 0",
    "str(v)",
    "f'{v}i'",
    "iter([v])",
    "'math', {'v': v}",
    "lambda: v, 'Made'",
    "",
]


def watched(function, arguments, value):
    """Calls the function as the user's code does; returns what the call reads, and its guards."""
    owner = types.SimpleNamespace(v=value)
    space = {"owner": owner, "function": function, "__name__": __name__, "__file__": __file__}
    text = f"def forward():\n    v = owner.v\n    return function({arguments})\n"
    exec(compile(text, __file__, "exec"), space)
    with AccessedNames() as accessed:
        space["forward"]()
    return owner, accessed, Guards({"forward": space["forward"]}, accessed)


def sees(guards, change):
    """Whether guards see a change, or refuse what is to be changed."""
    try:
        guards.check_followable()
    except CaptureError:
        return True
    change()
    return guards.mismatch() is not None or bool(guards.changes())


@pytest.mark.parametrize("name", NAMES)
def test_guards_see_what_a_known_function_is_called_with(name):
    module, _, last = name.rpartition(".")
    function = getattr(importlib.import_module(module), last, None)
    if function is None:
        pytest.skip("this Python has no such function")
    for before, after in VALUES:
        for arguments in ARGUMENTS:
            try:
                found = watched(function, arguments, copy.deepcopy(before))
            except Exception:  # not a value that it takes
                continue
            owner, accessed, guards = found
            assert not accessed.impure_calls
            assert sees(guards, lambda: setattr(owner, "v", after))  # noqa: B023
            return
    pytest.fail("no arguments were found")


def _generator():
    yield 1


class Own:
    gain = 1.0


INSTANCES = {
    "builtins.str": ("ab", "cd"),
    "builtins.bytes": (b"ab", b"cd"),
    "builtins.bytearray": (bytearray(b"ab"), bytearray(b"cd")),
    "builtins.int": (3, 4),
    "builtins.float": (3.0, 4.0),
    "builtins.complex": (3j, 4j),
    "builtins.tuple": ((3,), (4,)),
    "builtins.list": ([3], [4]),
    "builtins.dict": ({3: 3}, {3: 4}),
    "builtins.set": ({3}, {4}),
    "builtins.frozenset": (frozenset({3}), frozenset({4})),
    "builtins.range": (range(3), range(4)),
    "builtins.slice": (slice(3), slice(4)),
    "builtins.memoryview": (memoryview(b"abcd"), memoryview(b"cdef")),
    "builtins.object": (Own(), 3),
    "builtins.type": (Own, int),
    "builtins.property": (property(lambda _: 1), property(lambda _: 2)),
    "builtins.mappingproxy": (types.MappingProxyType({3: 3}), types.MappingProxyType({3: 4})),
    "builtins.generator": (_generator(), None),
    "builtins.dict_keys": ({3: 3}.keys(), {4: 3}.keys()),
    "builtins.dict_values": ({3: 3}.values(), {3: 4}.values()),
    "builtins.dict_items": ({3: 3}.items(), {3: 4}.items()),
    "builtins.BaseException": (ValueError("a"), ValueError("b")),
    "collections.deque": (collections.deque([3]), collections.deque([4])),
    "collections.OrderedDict": (collections.OrderedDict(a=3), collections.OrderedDict(a=4)),
    "collections.defaultdict": (collections.defaultdict(int), collections.defaultdict(list)),
    "array.array": (array.array("d", [3.0]), array.array("d", [4.0])),
    "re.Pattern": (re.compile("a"), re.compile("b")),
    "re.Match": (re.match("a", "ab"), re.match("ab", "ab")),
    "decimal.Decimal": (decimal.Decimal(3), decimal.Decimal(4)),
    "datetime.timedelta": (datetime.timedelta(3), datetime.timedelta(4)),
    "datetime.time": (datetime.time(3), datetime.time(4)),
    "datetime.tzinfo": (datetime.UTC, datetime.timezone(datetime.timedelta(hours=3))),
    "datetime.timezone": (datetime.UTC, datetime.timezone(datetime.timedelta(hours=3))),
    "datetime.datetime": (datetime.datetime(1, 1, 1), datetime.datetime(1, 1, 2)),
    "datetime.date": (datetime.date(1, 1, 1), datetime.date(1, 1, 2)),
    "itertools.chain": (itertools.chain([3]), None),
    "_hashlib.HASH": (hashlib.md5(b"a"), hashlib.md5(b"b")),
    "_struct.Struct": (struct.Struct("i"), struct.Struct("d")),
    "_contextvars.ContextVar": (contextvars.ContextVar("a", default=1), None),
    "_random.Random": (random.Random(3), random.Random(4)),
    "_io.TextIOWrapper": (io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())),
}


def test_every_class_of_the_table_has_an_instance():
    assert set(INSTANCES) == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_guards_see_objects_whose_methods_are_known(name):
    before, after = INSTANCES[name]
    methods = [
        method
        for method, value in vars(type(before)).items()
        if isinstance(value, types.MethodDescriptorType | types.ClassMethodDescriptorType)
        and method
        not in CLASSES[name] | {"close", "detach", "clear", "throw", "release", "__exit__"}
    ]
    owner, accessed, guards = watched(functools.partial(_call_all, methods), "v", before)
    assert not accessed.impure_calls
    assert sees(guards, lambda: setattr(owner, "v", after))


def _call_all(methods, target):
    for method in methods:
        for arguments in ((), (target,), (0,), ("a",)):
            with contextlib.suppress(Exception):
                getattr(target, method)(*arguments)


UNKNOWN = {
    "the time": ("__import__('time').time()", "time.time"),
    "the process": ("__import__('os').getpid()", "posix.getpid"),
    "a hash": ("hash(x)", "builtins.hash"),
    "a lock": ("s.lock.locked()", "lock.locked"),
    "an arithmetic context": (
        "__import__('decimal').getcontext().prec",
        f"{decimal.getcontext.__module__}.getcontext",  # `_decimal` from Python 3.13 on
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("expression", "name"), UNKNOWN.values(), ids=UNKNOWN)
def test_another_function_in_c_is_refused_by_name(expression, name, engine):
    space: dict = {"__name__": __name__, "__file__": __file__}
    text = f"def forward(s, x):\n    {expression}\n    return s.linear(x)\n"
    exec(compile(text, __file__, "exec"), space)

    def make():
        scope = Scope(forward=space["forward"])
        scope.lock = threading.Lock()
        return scope

    named, report = check(make, engine)
    assert len(named) == 1
    assert f"it calls {name}()" in named[0]
    assert report is None or not report.replayed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_operation_of_the_users_own_calls_is_part_of_the_operation(engine):
    named, report = check(lambda: Scope(forward=lambda s, x: timed(s.linear(x))), engine)
    assert not named
    assert report.replayed


@torch.library.custom_op("tests_known_functions::timed", mutates_args=())
def timed(x: torch.Tensor) -> torch.Tensor:
    time.perf_counter()
    return x * 2.0


timed.register_autograd(lambda ctx, gradient: gradient * 2.0)
timed.register_fake(torch.empty_like)
