"""One call of a scope as graphs: what was recorded, and what its replays change.

The recordings of forward and backward say what these read and write, and do not change after the
capture. A ``CallSite`` has the recordings of one call at its place in a slot, and the values that
change with every replay. A ``PendingBackward`` is one replayed forward until its backward.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.audit import NEVER, CallAudit
from moe_graphs.engine.autograd import LeafUses, SplitBackward
from moe_graphs.engine.backends.backend import Backend, Graph
from moe_graphs.engine.buffer_lease import BufferLease, Leases
from moe_graphs.engine.fp8 import Scales
from moe_graphs.engine.guards.bytecode_names import unwatched
from moe_graphs.engine.guards.guards import Guards
from moe_graphs.engine.guards.torch_state import TorchState
from moe_graphs.engine.partial.scope import Call, Exit, Scope
from moe_graphs.engine.partial.trials import Tried
from moe_graphs.engine.ranks import ALONE, Ranks
from moe_graphs.engine.reasons import BACKWARD, EAGER_CALLS
from moe_graphs.engine.report import FallbackWarning
from moe_graphs.engine.snapshot import ParameterAliases
from moe_graphs.engine.tensors import (
    Mismatch,
    OutputLeaf,
    Signature,
    address,
    as_leaf,
    copy_to,
    is_wrapped,
    unflattening,
    unwrap,
)
from moe_graphs.engine.verify import Difference, same_bits, warn
from moe_graphs.errors import GraphError

Layouts = tuple[tuple[int, ...] | None, ...]
versions_of = attrgetter("_version")
_LARGE = 1 << 22  # elements
_SEVERAL_SHAPES = "several_shapes"  # the reason why gradients are copied


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
        used_within: numbers of the outputs from which the scope computes others of its outputs.
        listed: inputs of the autograd node, per use: the number of an input, or the parameter.
        saved_outputs, saved_of_model: tensors that the backward reads: outputs, and parameters and
            buffers of the model.
        saved_inputs: numbers of the inputs that the backward reads.
        written: tensors outside of the graph that it modifies.
        counted: those among them whose version eager counts.
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
    used_within: tuple[int, ...]
    output_leaves: tuple[OutputLeaf, ...]
    output_structure: pytree.TreeSpec
    exit: Exit | None
    listed: tuple[int | Tensor, ...]
    saved_outputs: tuple[Tensor, ...]
    saved_inputs: tuple[int, ...]
    saved_of_model: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    counted: tuple[Tensor, ...]
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

    @property
    def own_inputs(self) -> list[Tensor]:
        """Static inputs that are no outputs of other recordings."""
        return [self.inputs[i] for i in self.loaded if i not in self.linked]


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
        counts_anew: if it begins with the forward of a scope that keeps inputs only, the tensors
            whose versions this forward counts up; else None.
    """

    graph: Graph | None
    conditions: ReplayConditions
    layouts: Layouts
    targets: tuple[Tensor, ...]
    uses: tuple[int, ...]
    listed: tuple[int | Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    leases: tuple[BufferLease | None, ...]
    counts_anew: tuple[Tensor, ...] | None = None

    def replay(self, backend: Backend, random: Any) -> None:
        """Replays it; a forward at its beginning draws from ``random``, as the first time."""
        if self.graph is None:
            return
        if self.counts_anew is None:
            self.graph.replay()
            return
        with backend.drawing_from(random):
            self.graph.replay()
        if self.counts_anew:
            torch.autograd.graph.increment_version(self.counts_anew)

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


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that tensors lie on; a storage of several counts once."""
    storages = (unwrap(tensor).untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


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
        is_cached = self._forward.conditions.context.has_autocast_cache
        inputs = self._forward.signature.anew(
            self._inputs, lambda _, each: as_leaf(each.detach(), each.requires_grad, is_cached)
        )
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


# ---- a call at its place in a slot: what was recorded there, and what its replays change


@dataclass
class PlannedCall:
    """Facts about a call that hold for all slots of one shape.

    Attributes:
        signature: of the inputs; until the first call of another shape, that of the first shape.
        is_signed: whether the call has had its first call, if it is of another shape.
        tried: the findings of its trial run, until everything is captured.
        is_observed: whether warm-up steps have shown who uses its weights and their gradients.
        ranks: the ranks that it communicates with; they capture and compare it together.
        copied_outputs: outputs that are handed out as copies, because somebody keeps views of them
            beyond the next replay.
        refused: why the call is not replayed, or not any more.
        not_reproducible: whether eager runs differ from one another in their last bits.
        any_order: the rounding of operations of its backward that add in any order, or 0
            (``Operations.rounding_of_any_order``).
        backward_runs_once: whether one backward uses up the autograd graph of its forward.
        eager_backwards: reason -> number of replayed forwards whose backward ran eagerly.
        copies_gradients: why no weight gradient may become ``.grad`` as it is; None if they may.
        fallbacks: warns of eager backwards; all calls of the graphs share it.
        eager_bytes: memory that an eager forward and backward take at most, as measured.
        use_reentrant: if it keeps its inputs only, how torch's checkpoint runs it eagerly.
        recomputed_bytes: saved tensors that each of its backwards computes anew, as measured.
    """

    scope: Scope
    signature: Signature
    tried: Tried | None = None
    is_observed: bool = False
    ranks: Ranks = ALONE
    copied_outputs: set[int] = field(default_factory=set)
    refused: Mismatch | None = None
    not_reproducible: bool = False
    any_order: float = 0.0
    backward_runs_once: bool = False
    eager_backwards: Counter[str] = field(default_factory=Counter)
    copies_gradients: str | None = "not_observed"
    fallbacks: FallbackWarning = field(default_factory=FallbackWarning)
    eager_bytes: int = 0
    use_reentrant: bool | None = None
    recomputed_bytes: int = 0
    is_signed: bool = True

    def of_another_shape(self) -> PlannedCall:
        """Returns the same call for another shape of microbatches, which has not come yet.

        Its weight gradients are copies: memory for them in place would grow with each shape.
        """
        return replace(
            self,
            is_signed=False,
            copied_outputs=set(),
            eager_backwards=Counter(),
            copies_gradients=_SEVERAL_SHAPES,
        )

    @property
    def is_of_later_shape(self) -> bool:
        """Whether graphs of other shapes were captured in its memory pool before."""
        return self.copies_gradients == _SEVERAL_SHAPES

    @property
    def recomputes(self) -> bool:
        """Whether it keeps its inputs only, and its backward runs its forward again."""
        return self.use_reentrant is not None

    def ran_backward_eagerly(self, reason: str) -> None:
        """Counts a backward of a replayed forward that no graph served."""
        self.eager_backwards[reason] += 1
        self.fallbacks.ran_eagerly(f"scope {self.scope.name!r}", f"{BACKWARD}{reason}")

    def differs(self, difference: Difference) -> Mismatch:
        """Turns replays of the call off, because they do not compute what eager computes."""
        message = f"its replay differs from eager: {difference}"
        self.refused = refused = Mismatch("differs_from_eager", message)
        warn(f"scope {self.scope.name!r} stays eager: {message}")
        return refused


class CallSite:
    """A call at its place in the order of a slot, with what was recorded there.

    Attributes:
        has_forward: whether its forward is recorded.
        forward: the recording of its forward; only call sites with ``has_forward`` have it.
        backward: the recording that computes all gradients or, if the backward is split, those of
            the inputs; then ``weights`` computes the others.
        first: the recording of the backward for the first microbatch of a step, if gradients are
            accumulated. Its gradients stay where they are, as ``.grad``.
        open: autograd's graph of the forward, until everything is recorded.
        run: the latest backward of ``open``.
        verified_layouts: further layouts of incoming gradients for which a replay was compared with
            eager.
        leases: one for each storage that its outputs lie on, if they are not copied.
        out: the leases among them whose outputs were handed out.
        has_lent: whether other shapes may work in the memory of its outputs.
        audit: what its audits compare with, or None.
        audit_due: the count of replays at which an audit may be due.
    """

    forward: RecordedForward

    def __init__(self, planned: PlannedCall, position: int) -> None:
        self.planned, self.position, self.name = planned, position, planned.scope.name
        self.clear()

    def clear(self) -> None:
        self.has_forward = False
        self.__dict__.pop("forward", None)
        self.backward: RecordedBackward | None = None
        self.first: RecordedBackward | None = None
        self.weights: RecordedBackward | None = None
        self.backward_position = -1
        self.verified_layouts: set[Layouts] = set()
        self.open: OpenCall | None = None
        self.run: BackwardRun | None = None
        self.sources: dict[int, tuple[CallSite, int]] = {}
        self.leases: list[BufferLease] = []
        self.out = Leases()
        self.replayed = self.audited = 0
        self.has_lent = False
        self.audit: CallAudit | None = None
        self.audit_due = NEVER

    @property
    def is_recorded(self) -> bool:
        """Whether everything that its replays need is recorded."""
        if not self.has_forward or not any(self.forward.differentiable):
            return self.has_forward
        has_weights = self.weights is not None or not self.forward.is_split
        return self.backward is not None and has_weights

    def unused_inputs(self) -> list[str]:
        """The names of inputs that require a gradient and get none."""
        if self.backward is None:
            return []
        forward = self.forward
        got = {
            forward.listed[use]
            for use, gradient in zip(self.backward.uses, self.backward.gradients, strict=True)
            if gradient is not None and isinstance(forward.listed[use], int)
        }
        return [
            forward.signature.leaves[i].name
            for i in forward.loaded
            if forward.inputs[i].requires_grad and i not in got
        ]

    def gradient_leases(self) -> list[BufferLease]:
        """The leases of the weights' gradients."""
        recorded = (self.first or self.backward, self.weights)
        return [row[-1] for each in recorded if each is not None for row in each.of_parameters]

    def graphs(self) -> list[Graph]:
        recorded: list[RecordedForward | RecordedBackward | None]
        recorded = [self.forward] if self.has_forward else []
        recorded += [self.backward, self.first, self.weights]
        return [each.graph for each in recorded if each is not None and each.graph is not None]

    def opened(
        self,
        forward: RecordedForward,
        open: OpenCall,
        sources: dict[int, tuple[CallSite, int]],
        owned: set[int],
    ) -> None:
        """Notes the recording of its forward.

        Args:
            sources: per input that reads an output of another call site in place: that call site
                and the number of the output.
            owned: addresses of the model's own memory. An output that lies there is not leased.
        """
        self.forward, self.has_forward = forward, True
        self.open, self.sources = open, sources
        on_storage: dict[int, list[int]] = {}
        for index, output in enumerate(forward.outputs):
            storage = output.untyped_storage()
            if output.dim() > 0 and storage.data_ptr() not in owned:
                on_storage.setdefault(storage._cdata, []).append(index)
        self.leases = [
            BufferLease(forward.outputs[numbers[0]], outputs=numbers)
            for numbers in on_storage.values()
        ]
        # On a GPU the lease of an output that no backward saves did not see its holder. Outputs of
        # a later shape lie where graphs of earlier shapes work.
        if self.copies_outputs:
            self.planned.copied_outputs.update(range(len(forward.outputs)))

    @property
    def copies_outputs(self) -> bool:
        """Whether callers get all of its outputs as copies, from the first replay on."""
        return self.planned.recomputes or self.planned.is_of_later_shape

    def static_tensors(self) -> list[Tensor]:
        """Tensors that its recording keeps alive: its own inputs, and outputs if it keeps them."""
        if not self.has_forward:
            return []
        return [*self.forward.own_inputs, *(() if self.has_lent else self.forward.outputs)]

    def lend_outputs(self, borrow: Callable[[Tensor], Tensor]) -> None:
        """Gives the memory of its outputs, which are copies for callers, to later captures.

        These belong to other shapes, whose microbatches are never in flight together with its own.
        ``borrow`` returns a tensor that does not keep its memory alive.
        """
        if not self.has_forward or any(map(is_wrapped, self.forward.outputs)):
            return
        self.has_lent, forward = True, self.forward
        outputs = tuple(map(borrow, forward.outputs))
        by_address = {each.data_ptr(): each for each in outputs}
        saved = tuple(by_address[each.data_ptr()] for each in forward.saved_outputs)
        self.forward = replace(forward, outputs=outputs, saved_outputs=saved)
        self.leases = [
            BufferLease(outputs[lease.outputs[0]], outputs=lease.outputs) for lease in self.leases
        ]
        self.out = Leases()

    def is_in_place(self, index: int, leaf: Tensor) -> bool:
        """Whether static memory has the values of an input already."""
        if leaf.data_ptr() == self.forward.inputs[index].data_ptr():
            return True
        if index not in self.sources:
            return False
        source, output = self.sources[index]  # the output may have been handed out as a copy
        return source.handed_as(leaf) == output and leaf._version == 0

    def needs_output(self, source: CallSite, output: int) -> bool:
        """Whether the backward may read the memory of an output of a call site.

        It may if this is that call site, or if the memory is one of its static inputs.
        """
        memory = source.forward.outputs[output].untyped_storage()._cdata
        inputs = (at.forward.outputs[number].untyped_storage()
                  for at, number in self.sources.values())  # fmt: skip
        return self is source or any(each._cdata == memory for each in inputs)

    def load(self, leaves: Sequence[Any]) -> None:
        """Copies the inputs into place, except those that are already there."""
        for index, target in self.forward.loads:
            if not self.is_in_place(index, leaves[index]):
                copy_to(target, leaves[index])

    def hand_out(self) -> list[Tensor]:
        """The outputs of this replay, as new tensor objects."""
        copied, handed = self.planned.copied_outputs, []
        for index, output in enumerate(self.forward.outputs):
            is_copied = index in copied or not output.dim()
            handed.append(output.clone() if is_copied else output.detach())
        return handed

    def note_handed(self, outputs: Sequence[Tensor], pending: PendingBackward) -> None:
        """Leases the outputs: the tensors as they come out of autograd."""
        if self.forward.used_within:
            pending.used_within = [
                NoHooks(self.name, outputs[number]) for number in self.forward.used_within
            ]
        for lease in self.leases:
            lease.note_handed(map(outputs.__getitem__, lease.outputs))
        self.out.add(self.leases)

    def handed_as(self, leaf: Any) -> int | None:
        """The number of the output of the last replay that ``leaf`` is, or None.

        Only the very object that was handed out counts, and only until its memory was reclaimed.
        """
        numbers = (lease.output_of(leaf) for lease in self.leases)
        return next((number for number in numbers if number is not None), None)

    def reclaim(self) -> bool:
        """Reclaims the outputs before they are overwritten. False if somebody holds a view of one.

        Who holds a view once will do it again (a pipeline that waits late for a send), so from then
        on the output is handed out as a copy.
        """
        if self.out.reclaim():
            return True
        self.planned.copied_outputs.update(*(lease.outputs for lease in self.out))
        return False

    def check_plain(self, gradients: Sequence[Tensor | None]) -> None:
        """Checks that a backward is a plain one.

        Raises:
            GraphError: if it is to be differentiated again, transformed or batched.
        """
        if torch.is_grad_enabled():
            raise GraphError(
                f"scope {self.name!r}: a backward with create_graph=True: a graph has no "
                f"derivative of its backward: run forwards whose gradients are differentiated (a "
                f"gradient penalty) within graphs.paused(), or in the warm-up steps as well"
            )
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if is_transformed or any(map(_is_batched, gradients)):
            raise GraphError(
                f"scope {self.name!r}: a backward under torch.func or with is_grads_batched=True, "
                f"which a graph was not captured for: run its forward within graphs.paused()"
            )

    def release(self) -> None:
        for graph in self.graphs():
            graph.release()
        self.clear()


def _is_batched(gradient: Tensor | None) -> bool:
    functorch = torch._C._functorch
    return gradient is not None and (
        functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient)
    )


class NoHooks(OrderedDict[int, Any]):
    """The hooks of an output from which its scope computes other outputs.

    A hook would get the gradient of what happens to the output outside of the scope, without that
    of the scope's other outputs. Hooks of FSDP2 and of the engine do not look at
    gradients.
    """

    def __init__(self, scope: str, output: Tensor) -> None:
        super().__init__()
        self._scope, self._output = scope, weakref.ref(output)
        output._backward_hooks = self
        node: Any = output.grad_fn
        node._register_hook_dict(output)

    def __setitem__(self, key: int, hook: Any) -> None:
        function = hook.func if isinstance(hook, functools.partial) else hook
        module = getattr(function, "__module__", None) or ""
        if not module.startswith(("torch.distributed.", "moe_graphs.")):
            raise self._refusal("register_hook")
        super().__setitem__(key, hook)

    def check(self) -> None:
        """Checks, in the backward, that ``.grad`` of the output is not asked for."""
        output = self._output()
        if output is not None and output.retains_grad:
            raise self._refusal("retain_grad")

    def _refusal(self, method: str) -> GraphError:
        return GraphError(
            f"scope {self._scope!r}: {method}() of an output from which the scope computes another "
            f"output, whose part of the gradient stays within the graph: call the scope within "
            f"graphs.paused(), or leave it out of the scopes"
        )


class PendingBackward:
    """One replayed forward until its backward. It lives as long as the autograd graph needs it.

    Attributes:
        is_done: whether its backward, or the part for the inputs, has run.
        cancelled: whether its backward will never run.
        weights: "with_backward" if one graph computes all gradients. Otherwise the graph of the
            weight gradients is still to be replayed ("pending") or was replayed ("done").
        random: positions of the random number generators before the forward, if it draws.
        weight_gradients: weight gradients that were computed together with those of the inputs.
        is_first_in_fp8: whether it contains the first module under Transformer Engine's autocast.
        versions: versions, after the replay, of the tensors that the backward needs.
        used_within: the outputs from which the scope computes other outputs.
    """

    is_first_in_fp8 = False
    used_within: Sequence[NoHooks] = ()

    def __init__(self, site: CallSite, leaves: Sequence[Any], random: Any) -> None:
        self.site = site
        self.is_done = self.cancelled = False
        self.weights = "pending" if site.forward.is_split else "with_backward"
        self.random = random
        self.weight_gradients: dict[int, Tensor | None] | None = None
        self._gradients: list[weakref.ref[Tensor] | None] = []
        self._inputs: list[tuple[weakref.ref[Tensor], int]] = []
        for index in site.forward.saved_inputs:
            self._inputs.append((weakref.ref(leaves[index]), leaves[index]._version))
        self.versions: list[int] = []

    @property
    def is_over(self) -> bool:
        return self.is_done and self.weights != "pending"

    def note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        if self.weights == "pending":
            self._gradients = [None if g is None else weakref.ref(g) for g in gradients]

    def check_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Checks that the weights' part gets the very gradients that the first part was given."""
        if self.weights == "pending":
            known = [None if ref is None else ref() for ref in self._gradients]
            if any(a is not b for a, b in zip(known, gradients, strict=True)):
                raise GraphError(
                    f"scope {self.site.name!r}: the gradients of its weights are asked for with "
                    f"other output gradients than those of its inputs were: a graph's saved "
                    f"tensors serve one backward"
                )

    def written_unseen(self) -> list[tuple[int, Tensor]]:
        """Numbers and tensors of inputs that were written since the forward without a new version.

        ``.data`` and numpy write so. The values are read, so this waits for the device.
        """
        forward, found = self.site.forward, []
        own = set(forward.loaded) - forward.linked
        for number, (ref, version) in zip(forward.saved_inputs, self._inputs, strict=True):
            leaf, static = ref(), forward.inputs[number]
            if leaf is None or leaf._version != version or number not in own:
                continue
            is_in_place = unwrap(leaf).data_ptr() == unwrap(static).data_ptr()
            if not is_in_place and not same_bits(leaf, static):
                found.append((number, leaf))
        return found

    def mismatch_of_written(self, number: int) -> Mismatch:
        """The reason why a scope whose input was written unseen is not replayed."""
        name = self.site.planned.signature.leaves[number].name
        remedy = EAGER_CALLS["input_written"].remedy
        message = (
            f"input {name!r} was written between forward and backward without a new version "
            f"(.data), and a graph reads a copy from before: {remedy}"
        )
        return Mismatch("input_written", message)

    def check_unmodified(self) -> None:
        """Checks, as eager does, that no tensor that the backward needs was modified in place."""
        forward = self.site.forward
        what, now = None, list(map(versions_of, forward.saved))
        if now != self.versions:
            outputs = len(forward.saved_outputs)
            what = "a parameter or buffer"
            if now[:outputs] != self.versions[:outputs]:
                what = "an output"
        for ref, version in self._inputs if what is None else ():
            if (tensor := ref()) is not None and tensor._version != version:
                what = "an input"
        if what is not None:
            raise GraphError(
                f"scope {self.site.name!r}: {what} was modified in place before the backward that "
                f"needs it: clone it before modifying it"
            )
