"""The stand-in that ``training_step`` gets for ``batch_idx`` while it is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_graphs.errors import CaptureError


class BatchIndex:
    """Says that it is an int, and may be handed on, but not be looked at.

    An int would be frozen in the graph; a tensor is none (keys, ``isinstance``, fp32 where Python
    computes in fp64), so that what is computed from it would not be what Lightning computes.
    """

    __slots__ = ()

    @property  # type: ignore[misc]  # object's can be set
    def __class__(self) -> type:
        return int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what torch and numpy ask of any object; no int has more of them
            raise AttributeError(name)
        return _looked_at(self)


def _looked_at(*_: Any) -> Any:
    raise CaptureError(
        "training_step looks at batch_idx, which is another number for every batch and would be "
        "frozen in a graph: leave it alone, or log it in on_train_batch_end"
    )


_TWO_SIDED = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_OPERATIONS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "index", "int", "float", "complex"),
    *("str", "repr", "format", "neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"),
    *(side + name for name in _TWO_SIDED for side in ("", "r")),
)
_look: Callable[..., Any] = _looked_at
for _operation in _OPERATIONS:
    setattr(BatchIndex, f"__{_operation}__", _look)
