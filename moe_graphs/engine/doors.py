"""Doors to state that no name gives away: what a block calls there cannot be compared later."""

from __future__ import annotations

import types
from typing import Any

import torch

# Functions of C, by module; an empty set is all of them.
_OF_C: dict[str, frozenset[str]] = {
    "_warnings": frozenset({"warn", "warn_explicit"}),
    "builtins": frozenset({"eval", "exec", "globals", "input", "open"}),
    "sys": frozenset({"_getframe", "getrecursionlimit", "getrefcount", "gettrace", "getprofile"}),
    "_io": frozenset({"open"}),
    "_thread": frozenset({"get_ident", "get_native_id"}),
    "gc": frozenset(),
    "posix": frozenset(),
    "nt": frozenset(),
    "time": frozenset(),
    "_socket": frozenset(),
}
_METHODS_OF_C = {"datetime.now", "datetime.utcnow", "date.today", "Generator.initial_seed"}
# Functions of Python, by module; likewise.
_OF_PYTHON: dict[str, frozenset[str]] = {
    "inspect": frozenset({"currentframe", "stack"}),
    "threading": frozenset({"current_thread", "get_ident", "active_count", "enumerate"}),
    "logging": frozenset({"isEnabledFor", "getEffectiveLevel"}),
    "random": frozenset({"getstate"}),
    "genericpath": frozenset(),
    "posixpath": frozenset({"abspath", "realpath", "expanduser"}),
    "pathlib": frozenset({"read_text", "read_bytes", "exists", "is_file", "is_dir", "stat", "open",
                          "iterdir", "glob", "cwd", "home"}),
    "tempfile": frozenset(),
    "subprocess": frozenset(),
    "socket": frozenset(),
}  # fmt: skip
# Of Transformer Engine: scales follow where it ends, and whose modules came first is settled there.
_ENTERS_FP8 = ("fp8_autocast_enter", "autocast_enter")
FP8 = "Transformer Engine's autocast"
_CHECKPOINT = "Transformer Engine's checkpoint"
# Whoever watches operations makes dynamo leave the function uncompiled, for good, and that rounds
# otherwise.
_COMPILED = "torch.compile"
_OF_NUMPY = {"geterr", "get_printoptions"}
# Attributes that lead to globals.
TO_GLOBALS = frozenset({"__globals__", "f_globals", "f_locals", "gi_frame"})
# What tells a forward's inputs and weights from the static ones of a graph.
OF_HISTORY = frozenset({"grad", "grad_fn", "is_leaf", "_base", "_version", "_is_view"})
OF_VERSIONS = frozenset({"_version"})  # a replay of a whole step counts once what it writes often


def refusal(door: str) -> str:
    """Why a graph cannot have it, and what to do."""
    if door == _COMPILED:
        return (
            "it calls a function of torch.compile, which does something else when it is watched: "
            "leave it out, or do not compile there (torch.compiler.disable; for Transformer "
            "Engine's fused functions NVTE_TORCH_COMPILE=0)"
        )
    if door == _CHECKPOINT:
        return f"it calls {door}, which keeps scales in Python: checkpoint around it instead"
    if door == FP8:
        return f"it enters {door}: enter it outside of the scope, around the whole step"
    return (
        f"it calls {door}(), whose answer may be another one at every call, and a replay runs no "
        f"Python: call it outside, and pass on the answer"
    )


def of_c(function: Any) -> str | None:
    """The name of a function of C, if it is such a door."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.Tensor):
        return "Tensor.data_ptr" if function.__name__ == "data_ptr" else None
    if function is torch.get_num_threads:
        return "torch.get_num_threads"
    if owner is not None and not isinstance(owner, types.ModuleType):
        name = getattr(function, "__qualname__", "")
        return name if name in _METHODS_OF_C else None
    module = getattr(function, "__module__", None) or getattr(owner, "__name__", "")
    return _found(_OF_C, module, function.__name__)


def of_python(frame: types.FrameType, *, of_the_user: bool) -> str | None:
    """The name of the function of Python that has just been called, if it is such a door.

    of_the_user: it was called by code of the user's own.
    """
    if frame.f_code is torch.Tensor.__reduce_ex__.__code__:
        return "pickle.dumps"
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
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
    return _found(_OF_PYTHON, "pathlib" if module.startswith("pathlib") else module, name)


def _found(doors: dict[str, frozenset[str]], module: str, name: str) -> str | None:
    names = doors.get(module)
    if names is None or (names and name not in names):
        return None
    return f"{module}.{name}"
