"""Source text of a program with mutable state, and where its code is installed."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import linecache
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

from programs.mutable_states import STATES, TIMES, State

# ---- how the name of a value is spelled

PLAIN_SPELLING = "as it is"
_PICK = "def pick$(NAME, **rest):\n    return NAME"
# Expressions, and statements of the module that they need. OBJECT and NAME stand for the two parts
# of ``object.name``, OBJECT and KEY for those of ``object[key]``, ROOT and PATH for ``root.a.b``.
_SPELLINGS: dict[str, tuple[str, str]] = {
    "getattr": ("getattr(OBJECT, 'NAME')", ""),
    "getattr with a default": ("getattr(OBJECT, 'NAME', 2.5)", ""),
    "getattr, name in a list": ("getattr(OBJECT, LIST$[0])", "LIST$ = ['NAME']"),
    "getattr, name put together": (
        "getattr(OBJECT, ''.join(LETTERS$))",
        "LETTERS$ = list('NAME')",
    ),
    "attrgetter": ("GET$(OBJECT)", "GET$ = operator.attrgetter('NAME')"),
    "dotted attrgetter": ("GET$(ROOT)", "GET$ = operator.attrgetter('PATH')"),
    "dotted string": ("functools.reduce(getattr, 'PATH'.split('.'), ROOT)", ""),
    "vars": ("vars(OBJECT)['NAME']", ""),
    "__dict__": ("OBJECT.__dict__['NAME']", ""),
    "asdict": ("dataclasses.asdict(OBJECT)['NAME']", ""),
    "asdict unpacked": ("pick$(**dataclasses.asdict(OBJECT))", _PICK),
    "vars unpacked": ("pick$(**vars(OBJECT))", _PICK),
    "copy": ("copy.copy(OBJECT).NAME", ""),
    "values of vars": ("dict(vars(OBJECT).items())['NAME']", ""),
    "match object": (
        "pick$(OBJECT)",
        "def pick$(found):\n    match found:\n        case object(NAME=value):\n"
        "            return value",
    ),
    "get": ("OBJECT.get(KEY, 2.5)", ""),
    "itemgetter": ("GET$(OBJECT)", "GET$ = operator.itemgetter(KEY)"),
    "methodcaller": ("GET$(OBJECT)", "GET$ = operator.methodcaller('__getitem__', KEY)"),
    "__getitem__": ("OBJECT.__getitem__(KEY)", ""),
    "key in a list": ("OBJECT[LIST$[0]]", "LIST$ = [KEY]"),
    "copy of a container": ("copy.deepcopy(OBJECT)[KEY]", ""),
    "match mapping": (
        "pick$(OBJECT)",
        "def pick$(found):\n    match found:\n        case {KEY: value}:\n            return value",
    ),
}
SPELLINGS = (PLAIN_SPELLING, *_SPELLINGS)

# ---- where the value is read

PLAIN_READER = "forward"
READERS: dict[str, str] = {
    "forward": "y = EXPRESSION",
    "lambda": "y = (lambda: EXPRESSION)()",
    "generator": "y = sum(EXPRESSION for _ in range(1))",
    "hook of a gradient": "y.register_hook(lambda y: EXPRESSION)",
    "backward of a function": "y = __apply_in_backward__(y, lambda y: EXPRESSION)",
    "thread": "y = __in_thread__(lambda: EXPRESSION)",
    # Outside of the scope:
    "model": "y = EXPRESSION",
    "step": "y = EXPRESSION",
}

_HEAD = """\
import abc, array, builtins, collections, contextvars, copy, ctypes, dataclasses
import decimal, enum, functools, io, itertools, mmap, operator, os, queue, threading, types, weakref
from multiprocessing import sharedctypes
import numpy as np
import torch
from torch import nn
"""
_HELPERS = """\
def __in_thread__(function):
    found = []
    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
def __apply_in_backward__(y, function):
    class Applied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.view_as(y)
        @staticmethod
        def backward(ctx, gradient):
            return function(gradient)
    return Applied.apply(y)
"""
_BODY = """\
def make_block():
{local}
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)
{block_init}
        def forward(self, x{parameters}):
            y = self.l(x).tanh()
{block_forward}
            return y
    return Block
Block = make_block()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.Linear(4, 4)
        self.sc = Block()
{model_init}
    def forward(self, x):
        y = self.sc(self.pre(x))
{model_forward}
        return y.square().mean()
def build():
    model = Model()
{step_local}
    def step(x{step_parameters}):
        y = model(x)
{step_forward}
        y.backward()
        return y.detach()
    return model, step
"""


@dataclass(frozen=True)
class Piece:
    """A kind of state, how its name is spelled, and where it is read."""

    state: str
    spelling: str = PLAIN_SPELLING
    reader: str = PLAIN_READER

    def fits(self, place: str) -> bool:
        """Whether the state can be installed there."""
        return place in ("own file", "site-packages") or not STATES[self.state].module

    @property
    def is_possible(self) -> bool:
        state = STATES[self.state]
        if self.reader in ("model", "step") and (state.local or state.parameter):
            return False
        if self.reader != "step" and (state.step_local or state.step_parameter):
            return False
        if self.reader == "step" and ("self" in state.read or state.use != TIMES):
            return False
        if {self.spelling, self.reader} & {*state.unfit}:
            return False
        if "asdict" in self.spelling and "@dataclasses" not in state.define:
            return False
        return self.spelling == PLAIN_SPELLING or _spelled(state, self.spelling) is not None

    def numbered(self, number: int) -> _Lines:
        state = STATES[self.state]
        read, helper = state.read, ""
        if self.spelling != PLAIN_SPELLING:
            spelled = _spelled(state, self.spelling)
            assert spelled is not None, self
            read, helper = spelled
        expression = state.use.format(v=read, y="y")
        lines = _Lines(
            define="\n".join(filter(None, (state.define, helper))),
            local=state.local,
            parameter=state.parameter and f", {state.parameter}",
            step_local=state.step_local,
            step_parameter=state.step_parameter and f", {state.step_parameter}",
            init=state.init,
            forward=READERS[self.reader].replace("EXPRESSION", expression),
            module=state.module,
        )
        return _Lines(*(each.replace("$", f"_{number}") for each in vars(lines).values()))


@dataclass(frozen=True)
class _Lines:
    define: str
    local: str
    parameter: str
    step_local: str
    step_parameter: str
    init: str
    forward: str
    module: str


def _spelled(state: State, spelling: str) -> tuple[str, str] | None:
    """The read in another spelling, with the statements of the module that it needs."""
    read = ast.parse(state.read.replace("$", "NUMBER"), mode="eval").body
    parts = {}
    if isinstance(read, ast.Attribute):
        parts = {"OBJECT": ast.unparse(read.value), "NAME": read.attr}
        root, _, path = ast.unparse(read).partition(".")
        if path.replace(".", "").isidentifier():
            parts |= {"ROOT": root, "PATH": path}
    elif isinstance(read, ast.Subscript):
        parts = {"OBJECT": ast.unparse(read.value), "KEY": ast.unparse(read.slice)}
    text = "\0".join(_SPELLINGS[spelling])
    text = re.sub("[A-Z]{3,}", lambda word: parts.get(word[0], word[0]), text)
    if re.search("OBJECT|NAME|KEY|ROOT|PATH", text):
        return None
    expression, statements = text.replace("NUMBER", "$").split("\0")
    return expression, statements


def source(pieces: tuple[Piece, ...]) -> tuple[str, str]:
    """The source text of a program: its definitions, and its model and step."""
    lines = [piece.numbered(number) for number, piece in enumerate(pieces)]
    of_model, of_step = (
        [lines[n] for n, piece in enumerate(pieces) if piece.reader == reader]
        for reader in ("model", "step")
    )
    of_block = [each for each in lines if each not in of_model and each not in of_step]

    def joined(name: str, chosen: list[_Lines], depth: int) -> str:
        text = "\n".join(filter(None, (getattr(each, name) for each in chosen)))
        return indent(text or "pass", " " * 4 * depth)

    body = _BODY.format(
        local=joined("local", lines, 1),
        parameters="".join(each.parameter for each in lines),
        block_init=joined("init", of_block, 3),
        block_forward=joined("forward", of_block, 3),
        model_init=joined("init", of_model, 2),
        model_forward=joined("forward", of_model, 2),
        step_local=joined("step_local", of_step, 1),
        step_parameters="".join(each.step_parameter for each in of_step),
        step_forward=joined("forward", of_step, 2),
    )
    return _HELPERS + "\n".join(each.define for each in lines if each.define) + "\n", body


# ---- where the code is installed

PLAIN_PLACE = "own file"
PLACES = (
    PLAIN_PLACE,
    "site-packages",
    "definitions in site-packages",
    "exec",
    "notebook",
    "ipython",
)
_numbers = itertools.count()


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mutable_programs_"))
    (folder / "site-packages").mkdir()
    return folder


def install(pieces: tuple[Piece, ...], place: str) -> tuple[dict[str, Any], Callable[[], None]]:
    """Run the code of a program. Returns its globals, and what removes the program's modules."""
    define, body = source(pieces)
    name = f"mutable_program_{next(_numbers)}"
    modules = {f"settings_{n}": piece.numbered(n).module for n, piece in enumerate(pieces)}
    if place in ("own file", "site-packages"):
        folder = _folder() / "site-packages" if place == "site-packages" else _folder()
        return _package(folder, name, _HEAD + define + body, modules)
    if place == "definitions in site-packages":
        _, forget_definitions = _package(
            _folder() / "site-packages", f"{name}_library", _HEAD + define, modules
        )
        text = f"{_HEAD}{_HELPERS}from {name}_library import *\n{body}"
        found, forget = _package(_folder(), name, text, {})
        return found, lambda: (forget(), forget_definitions())[0]
    text = _HEAD + define + body
    filename = {
        "exec": "<string>",
        "notebook": f"/tmp/ipykernel_7/{name}.py",
        "ipython": f"<ipython-input-1-{name}>",
    }[place]
    if place != "exec":
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(text, filename, "exec"), space)
    return space, lambda: linecache.cache.pop(filename, None) and None


def _package(
    folder: Path, name: str, text: str, modules: dict[str, str]
) -> tuple[dict[str, Any], Callable[[], None]]:
    place = folder / name
    place.mkdir()
    for file, lines in {"__init__": text, **modules}.items():
        if lines:
            (place / f"{file}.py").write_text(lines)
    spec = importlib.util.spec_from_file_location(
        name, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec is not None
    assert spec.loader is not None
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)

    def forget() -> None:
        for each in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[each]
        shutil.rmtree(place, ignore_errors=True)

    return vars(module), forget
