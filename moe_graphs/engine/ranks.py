"""Ranks that take every decision together.

A rank that replays would wait for ever for one that does something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_graphs.engine.guards.introspection import attribute_of
from moe_graphs.engine.tensors import Mismatch, per_operation
from moe_graphs.errors import CaptureError

FAILED_ELSEWHERE = "it failed on another rank"
_NAMES = ("process_group", "group_name")  # names of arguments of operations that communicate


class Ranks:
    """Ranks that communicate in a model's computation, and so have to make the same calls.

    The model's modules (``groups_of``) and the operations that were seen show which ranks these
    are. If the groups do not lie in one another, all ranks of the world belong together.

    Answers travel between hosts (gloo), without waiting for a device. If a rank has died, the
    others raise.

    Attributes:
        group: None if there is no other rank to agree with.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """Finds the ranks of a model; without a model it is this rank alone."""
        self.group: dist.ProcessGroup | None = None
        self._on_hosts: dist.ProcessGroup | None = None
        if model is not None:
            self.join(groups_of(model))

    def join(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Adds the ranks of more process groups. All ranks must add the same groups."""
        before = self.group
        for group in groups:
            self.group = _wider(self.group, group)
        if self.group is not before:
            self._on_hosts = None

    def any(self, here: bool) -> bool:
        """Whether ``here`` is true on this rank or on another one. All ranks have to ask."""
        return bool(self.highest([int(here)])[0])

    def highest(self, here: Sequence[int]) -> list[int]:
        """The highest of all ranks' values, one by one. All ranks have to ask."""
        if self.group is None:
            return list(here)
        values = torch.tensor(here, device="cpu")
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._between_hosts(self.group))
        return values.tolist()

    def first_of(self, here: str | None) -> str | None:
        """The answer of this rank or, if it has none, of the first rank that has one.

        All ranks have to ask.
        """
        if self.group is None:
            return here
        said: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(said, here, group=self._between_hosts(self.group))
        others = (f"on rank {rank}: {text}" for rank, text in enumerate(said) if text is not None)
        return next(others, None) if here is None else here

    def _between_hosts(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        if self._on_hosts is None:
            ranks = dist.get_process_group_ranks(group)
            # Ranks of other groups do not have to take part in making this group.
            self._on_hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return self._on_hosts

    def agree(self, mismatch: Mismatch | None) -> Mismatch | None:
        """The mismatch of this rank, or of another one; None if no rank has any."""
        if self.any(mismatch is not None) and mismatch is None:
            message = "the call of another rank differs from the captured one"
            return Mismatch("another_rank", message)
        return mismatch

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Context around work that succeeds on all ranks or raises on all of them."""
        try:
            yield
        except Exception:
            self.any(True)
            raise
        if self.any(False):
            raise CaptureError(FAILED_ELSEWHERE)


ALONE = Ranks()
"""The ranks of a computation that does not communicate: one rank alone."""


def groups_of(model: nn.Module) -> Iterator[dist.ProcessGroup]:
    """Process groups over which a model communicates.

    Modules, or objects that they hold, have them as ``process_group``. Sharded parameters (DTensor,
    also of FSDP2) have theirs in their mesh.
    """
    for module in model.modules():
        for holder in (module, *vars(module).values()):
            group = attribute_of(holder, "process_group")
            if isinstance(group, dist.ProcessGroup):
                yield group
    sharded: list[Any] = [p for p in model.parameters() if _is_sharded(p)]
    meshes = {id(p.device_mesh): p.device_mesh for p in sharded}
    for mesh in meshes.values():
        yield from mesh.get_all_groups()


def groups_in(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[dist.ProcessGroup]:
    """Process groups over which an operation communicates."""
    for number, name in _groups_among_arguments(func):
        value = args[number] if number < len(args) else kwargs.get(name)
        if isinstance(value, str):
            c10d: Any = dist.distributed_c10d
            value = c10d._resolve_process_group(value)
        elif isinstance(value, torch.ScriptObject):
            value = dist.ProcessGroup.unbox(value)
        if isinstance(value, dist.ProcessGroup):
            yield value


@per_operation
def _groups_among_arguments(func: Any) -> list[tuple[int, str]]:
    named = enumerate(argument.name for argument in func._schema.arguments)
    return [(number, name) for number, name in named if name in _NAMES]


def _wider(known: dist.ProcessGroup | None, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    ranks = set(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return known
    before = set() if known is None else set(dist.get_process_group_ranks(known))
    if ranks <= before:
        return known
    return group if before <= ranks else dist.group.WORLD


def _is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh")
