"""Operations that communicate: they give back work to wait for."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe_graphs.engine.signature import tensor_leaves


@functools.cache
def _namespace(func: Any) -> str | None:
    return getattr(func, "namespace", None)


def communicates(func: Any) -> bool:
    return _namespace(func) == "c10d"


def sends(func: Any) -> bool:
    """To one rank, which may receive much later: waiting for that at once may be for ever."""
    return communicates(func) and func.overloadpacket.__name__ == "send"


def wait(results: Any) -> None:
    """For the communication that has just been started: the next call may read what it writes."""
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, torch.ScriptObject):
            torch._C._distributed_c10d.Work.unbox(leaf).wait()


def arrived(func: Any, results: Any) -> None:
    """Waits for communication that gives back tensors (those of DTensors do) instead of work."""
    if _namespace(func) == "_c10d_functional":
        for tensor in tensor_leaves(results):
            torch.ops._c10d_functional.wait_tensor(tensor)


def finished(func: Any, args: tuple, results: Any) -> Any:
    """The results; of a reduce-scatter on the CPU, arrived, with work that is done.

    gloo copies its results into place where they are waited for, by operations that would be
    seen: they are a part of this one.
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
