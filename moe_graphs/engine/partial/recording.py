"""One call of a scope as graphs: what its forward and its backward read and write.

These values do not change after the capture. A call site of a slot has the values that change with
every replay (``slots.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe_graphs.engine.autograd import LeafUses, SplitBackward
from moe_graphs.engine.backends.backend import Backend, Graph
from moe_graphs.engine.buffer_lease import BufferLease
from moe_graphs.engine.fp8 import Scales
from moe_graphs.engine.guards.bytecode_names import unwatched
from moe_graphs.engine.guards.guards import Guards
from moe_graphs.engine.guards.torch_state import TorchState
from moe_graphs.engine.partial.scope import Call, Exit, Scope
from moe_graphs.engine.snapshot import ParameterAliases
from moe_graphs.engine.tensors import (
    Mismatch,
    OutputLeaf,
    Signature,
    address,
    as_leaf,
    unflattening,
    unwrap,
)
from moe_graphs.errors import GraphError

Layouts = tuple[tuple[int, ...] | None, ...]
versions_of = attrgetter("_version")
_LARGE = 1 << 22  # elements


@dataclass(frozen=True)
class ReplayConditions:
    """Guards on what the Python of a call could read, and the state of torch around the call.

    Attributes:
        of_forward: for a backward that runs its forward again, the guards of that forward.
        others: tensors that the call reads besides inputs, parameters and buffers.
    """

    guards: Guards
    context: TorchState
    others: tuple[Tensor, ...] = ()
    of_forward: Guards | None = None

    @cached_property
    def checks(self) -> tuple[Callable[[], Mismatch | None], ...]:
        """Functions that return a difference from the capture, or None."""
        checks = (self.context.mismatch, self.guards.mismatch)
        return checks if self.of_forward is None else (*checks, self.of_forward.mismatch)


@dataclass(frozen=True)
class RecordedForward:
    """A captured forward.

    Attributes:
        inputs: static tensors where the inputs have tensors, the captured constants elsewhere.
        loaded: numbers of the inputs that have memory of their own. If several inputs are the very
            same tensor, this is the first.
        targets: for each of ``loaded``, the tensor that its values are copied to.
        linked: numbers of the loaded inputs that are static outputs of other recordings.
        outputs: static tensors that the graph writes. They are handed out as aliases, or as copies
            if they have no dimension.
        differentiable: per output, whether it has a gradient.
        listed: inputs of the autograd node, per use: the number of an input, or the parameter.
        saved_outputs, saved_of_model: tensors that the backward reads: outputs, and parameters and
            buffers of the model.
        saved_inputs: numbers of the inputs that the backward reads.
        written: tensors outside of the graph that it modifies.
        draws: whether it draws random numbers.
        scales: the scales that it casts to FP8 with; None if it does not cast to FP8.
        is_split: whether weight gradients are computed apart.
        arguments: arguments of the module's forward, without tensors, for a forward that resumes.
    """

    graph: Graph
    signature: Signature
    conditions: ReplayConditions
    inputs: tuple[Any, ...]
    loaded: tuple[int, ...]
    targets: tuple[Tensor, ...]
    linked: frozenset[int]
    outputs: tuple[Tensor, ...]
    differentiable: tuple[bool, ...]
    output_leaves: tuple[OutputLeaf, ...]
    output_structure: pytree.TreeSpec
    exit: Exit | None
    listed: tuple[int | Tensor, ...]
    saved_outputs: tuple[Tensor, ...]
    saved_inputs: tuple[int, ...]
    saved_of_model: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    draws: bool
    scales: Scales | None
    is_split: bool
    arguments: Call

    @property
    def parameters(self) -> list[Tensor]:
        return [each for each in self.listed if isinstance(each, Tensor)]

    @cached_property
    def loads(self) -> list[tuple[int, Tensor]]:
        """Numbers of the inputs that are loaded, each with its target."""
        return list(zip(self.loaded, self.targets, strict=True))

    @cached_property
    def saved(self) -> list[Tensor]:
        """Saved tensors: outputs, then tensors of the model."""
        return [*self.saved_outputs, *self.saved_of_model]

    @cached_property
    def constant_outputs(self) -> list[int]:
        """The numbers of the outputs without a gradient."""
        return [i for i, needed in enumerate(self.differentiable) if not needed]

    @cached_property
    def build_outputs(self) -> Callable[[list[Any]], Any]:
        """The function that builds the outputs from their leaves."""
        return unflattening(self.output_structure)

    def static_tensors(self) -> list[Tensor]:
        """Tensors that only the recording keeps alive: its own inputs, and its outputs."""
        return [self.inputs[i] for i in self.loaded if i not in self.linked] + list(self.outputs)


@dataclass(frozen=True)
class Launch:
    """Gradients that one launch copies. Each copy is laid out like its entry of ``likes``."""

    uses: list[int]
    likes: list[Tensor]
    gradients: list[Tensor]

    def without(self, uses: Collection[int]) -> Launch:
        kept = [use not in uses for use in self.uses]
        likes, gradients = compress(self.likes, kept), compress(self.gradients, kept)
        return Launch(list(compress(self.uses, kept)), list(likes), list(gradients))


@dataclass(frozen=True)
class RecordedBackward:
    """A captured backward, or a part of it.

    Attributes:
        layouts: per differentiable output, the strides of its incoming gradient, or None if none
            comes in. With other incoming gradients other sums are made and other parameters get
            gradients, which needs another graph.
        targets: tensors that the incoming gradients are copied to.
        uses: numbers of the uses (``RecordedForward.listed``) whose gradients it computes.
        listed: per use, the number of an input or the parameter.
        gradients: per use, the gradient (of a DTensor, its local shard). A gradient that may become
            ``.grad`` has memory of its own. Memory of the others is only borrowed: later captures
            of the slot use it again.
        leases: leases of the weight gradients, for when they are handed out.
        anew: the forward that it begins with, if its scope keeps inputs only; else None.
    """

    graph: Graph | None
    conditions: ReplayConditions
    layouts: Layouts
    targets: tuple[Tensor, ...]
    uses: tuple[int, ...]
    listed: tuple[int | Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    leases: tuple[BufferLease | None, ...]
    anew: RecordedForward | None = None

    def replay(self, backend: Backend, random: Any) -> None:
        """Replays it; a forward at its beginning draws from ``random``, as the first time."""
        if self.graph is None:
            return
        if self.anew is None:
            self.graph.replay()
            return
        with backend.drawing_from(random):
            self.graph.replay()
        if self.anew.written:
            torch.autograd.graph.increment_version(self.anew.written)

    @cached_property
    def of_parameters(self) -> list[tuple[int, Tensor, BufferLease]]:
        """Uses, parameters and the leases of their gradients."""
        return [
            (use, parameter, lease)
            for use, parameter, lease in zip(self.uses, self.listed, self.leases, strict=True)
            if lease is not None and isinstance(parameter, Tensor)
        ]

    @cached_property
    def parameters(self) -> list[Tensor]:
        return [parameter for _, parameter, _ in self.of_parameters]

    @cached_property
    def has_some_in_place(self) -> bool:
        """Whether it was captured with gradients that may become ``.grad``."""
        return any(lease.in_place for _, _, lease in self.of_parameters)

    def finds_no_gradient(self) -> bool:
        """Whether its gradients can become ``.grad`` now, because no ``.grad`` exists yet."""
        in_place = [parameter for _, parameter, lease in self.of_parameters if lease.in_place]
        return bool(in_place) and all(parameter.grad is None for parameter in in_place)

    @cached_property
    def launches(self) -> list[Launch]:
        """Launches that copy all gradients.

        The kernel for many tensors copies gradients of one dtype and layout together. Large ones
        are copied one by one: that kernel moves 2.6 TB/s on an H200, the kernel for a single tensor
        4.3 (2026-11-21).
        """
        together: dict[Any, Launch] = {}
        for use, each, gradient in zip(self.uses, self.listed, self.gradients, strict=True):
            if gradient is not None:
                like = each if isinstance(each, Tensor) else gradient
                dense = gradient.is_contiguous() and unwrap(like).stride() == gradient.stride()
                alone = gradient.numel() >= _LARGE or not dense or like.dtype != gradient.dtype
                launch = together.setdefault(use if alone else gradient.dtype, Launch([], [], []))
                launch.uses.append(use)
                launch.likes.append(like)
                launch.gradients.append(gradient)
        return list(together.values())

    def launches_without(self, uses: tuple[int, ...]) -> list[Launch]:
        """Launches that copy all gradients except those of ``uses``."""
        if uses not in self._launches_without:
            rest = [launch.without(uses) for launch in self.launches]
            self._launches_without[uses] = [launch for launch in rest if launch.uses]
        return self._launches_without[uses]

    @cached_property
    def _launches_without(self) -> dict[tuple[int, ...], list[Launch]]:
        return {}

    def other(self, layouts: Layouts) -> str:
        """The reason why a backward with other incoming gradients cannot be replayed."""
        used = [layout is not None for layout in layouts]
        same = used == [layout is not None for layout in self.layouts]
        return "other_layout" if same else "other_outputs"


def has_tensors_inside(value: Any) -> bool:
    """Whether an object that is no pytree holds tensors, which would be lost on the way."""
    held = getattr(value, "__dict__", {}).values() if not isinstance(value, nn.Module) else ()
    return any(isinstance(each, Tensor) for each in held)


def layouts_of(incoming: Sequence[Tensor | None]) -> Layouts:
    layouts: list[tuple[int, ...] | None] = []
    for gradient in incoming:
        layouts.append(None if gradient is None else gradient.stride())
    return tuple(layouts)


# ---- what autograd saves between a forward and its backward


class Saved:
    """The memory of the tensors that autograd saves within a block."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._note, self._get):
            yield

    def has(self, tensor: Tensor) -> bool:
        return address(tensor) in self._addresses

    def _note(self, tensor: Tensor) -> Any:
        self._addresses.add(address(tensor))
        return tensor

    def _get(self, noted: Any) -> Tensor:
        return noted


def run_anew(
    scope: Scope, forward: RecordedForward, inputs: Sequence[Any], aliases: ParameterAliases
) -> Any:
    """The outputs of another run of a recorded forward, under the contexts of the first one."""
    with (
        torch.enable_grad(),
        aliases.installed(),
        forward.conditions.context.autocast(inputs),
        forward.scales or contextlib.nullcontext(),
    ):
        tree = pytree.tree_unflatten(inputs, forward.signature.structure)
        return scope.run_captured(tree, forward.arguments)[0]


class _Enough(BaseException):
    """All saved tensors are there; the rest of the forward is not needed."""


class Recomputed(Saved):
    """Numbers that autograd saves in place of tensors, for a scope that keeps its inputs only.

    The first number that a backward asks for runs the forward again, up to the last tensor that is
    saved. ``torch.utils.checkpoint`` does the same without ``use_reentrant``, so the same
    operations run in the same order.

    Args:
        reads: addresses of the memory that the forward reads and does not write.
        is_reentrant: whether gradients of an input are added up within the backward, as they are
            with ``use_reentrant``.
    """

    def __init__(
        self,
        backend: Backend,
        aliases: ParameterAliases,
        reads: set[int],
        is_reentrant: bool | None = False,
    ) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant
        self._addresses = reads
        self._backend, self._aliases, self._count = backend, aliases, 0
        self._found: dict[int, Tensor] = {}
        self._task: int | None = None
        self._random: Any = None

    def follows(self, scope: Scope, forward: RecordedForward, inputs: Sequence[Any]) -> None:
        """Notes which forward runs again, on which inputs."""
        self._scope, self._forward, self._inputs = scope, forward, inputs

    @contextlib.contextmanager
    def drawing_from(self, random: Any) -> Iterator[None]:
        """Context around a backward, whose forward draws from ``random``; None: from here on."""
        self._random = random
        try:
            yield
        finally:
            self._task = self._random = None
            self._found.clear()

    def _note(self, tensor: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def _get(self, number: int) -> Tensor:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._compute()
            self._task = task
        if number not in self._found:
            raise GraphError(
                f"scope {self._scope.name!r}: its backward reads a saved tensor twice, which no "
                f"recomputation allows: read ctx.saved_tensors once"
            )
        return self._found.pop(number)

    def _compute(self) -> None:
        self._found.clear()
        inputs: list[Any] = []
        for first, value in zip(self._forward.signature.first, self._inputs, strict=True):
            if not isinstance(value, Tensor):
                inputs.append(value)
            elif first < len(inputs):
                inputs.append(inputs[first])
            else:
                is_cached = self._forward.conditions.context.has_autocast_cache
                inputs.append(as_leaf(value.detach(), value.requires_grad, is_cached))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, _unread)
        # The guards of the forward know already what its Python reads, so nobody watches it again.
        drawing = self._backend.drawing_from(self._random)
        with drawing, hooks, unwatched(), contextlib.suppress(_Enough):
            run_anew(self._scope, self._forward, inputs, self._aliases)
        if len(self._found) != self._count:
            raise GraphError(
                f"scope {self._scope.name!r}: its forward, run again for its backward, saves "
                f"{len(self._found)} tensors and saved {self._count} before"
            )

    def _keep(self, tensor: Tensor) -> None:
        self._found[len(self._found)] = tensor.detach()
        if len(self._found) == self._count:
            raise _Enough


def _unread(_: None) -> Tensor:
    raise AssertionError("the graph of a recomputation has no backward")


# ---- autograd's side of a recorded forward, until its backward is recorded


@dataclass(frozen=True)
class OpenCall:
    """Autograd's graph of a captured forward.

    Attributes:
        outputs: the differentiable outputs, with their history.
        inputs: static leaves that require grad.
        numbers: the numbers of these inputs.
        parameters: leaves, mostly aliases of the model's parameters.
        uses: uses of the inputs and parameters, in this order.
        recomputed: what autograd has saved, if that is computed anew for every backward.
    """

    outputs: list[Tensor]
    numbers: tuple[int, ...]
    inputs: list[Tensor]
    parameters: list[Tensor]
    uses: LeafUses
    recomputed: Recomputed | None = None


class BackwardRun:
    """The backward of an open call for one pattern of incoming gradients.

    It may be run as often as needed, eagerly and into a graph. It reads static memory.

    Attributes:
        given: gradients per output, None where none comes in.
        incoming: the gradients that do come in.
        first_uses, second_uses: the numbers of the uses that each part computes.
    """

    def __init__(self, open: OpenCall, given: Sequence[Tensor | None], split: bool) -> None:
        used = [(o, g) for o, g in zip(open.outputs, given, strict=True) if g is not None]
        outputs, self.incoming = ([pair[i] for pair in used] for i in range(2))
        self.given, self.layouts = tuple(given), layouts_of(given)
        self._open: OpenCall | None = open
        self._outputs = outputs
        self._leaves = [*open.inputs, *open.parameters]
        count = len(open.inputs)
        of_inputs = tuple(n for n, leaf in enumerate(open.uses.of) if leaf < count)
        of_parameters = tuple(n for n, leaf in enumerate(open.uses.of) if leaf >= count)
        self._split = SplitBackward(outputs, open.inputs, open.parameters) if split else None
        self.first_uses = of_inputs if split else (*of_inputs, *of_parameters)
        self.second_uses = of_parameters if split else ()

    def first_part(
        self, incoming: Sequence[Tensor], *, last: bool = False, random: Any = None
    ) -> list[Tensor | None]:
        """Runs the first part. After the ``last`` run autograd's graph is not needed any more.

        ``random`` is the random position from which a forward that runs again draws; None outside
        of eager runs.
        """
        assert self._open is not None, "its autograd graph is freed"
        uses, recomputed = self._open.uses, self._open.recomputed
        if not self._outputs:
            return [None] * len(self.first_uses)
        if recomputed is not None:
            with recomputed.drawing_from(random):
                return uses.gradients(self._outputs, incoming, retain_graph=not last)
        if self._split is None:
            return uses.gradients(self._outputs, incoming, retain_graph=not last)
        with uses.kept_apart() as addends:
            gradients = self._split.input_gradients(incoming)
        rest = [None] * len(self._open.parameters)
        spread = uses.spread([*gradients, *rest], addends)
        return [spread[use] for use in self.first_uses]

    def close(self) -> None:
        """Frees autograd's graph, even if somebody still holds this object."""
        self._open = self._split = None
        self._outputs, self._leaves = [], []

    def second_part(self) -> list[Tensor | None]:
        """Runs the second part, which goes on from the last run of the first part."""
        assert self._open is not None, "its autograd graph is freed"
        assert self._split is not None, "its autograd graph is freed"
        if not self._outputs:
            return [None] * len(self.second_uses)
        uses = self._open.uses
        with uses.kept_apart() as addends:
            gradients = self._split.parameter_gradients()
        spread = uses.spread([*[None] * len(self._open.inputs), *gradients], addends)
        return [spread[use] for use in self.second_uses]
