"""Trial runs of a scope's call: eager, beside the real call, without any lasting change.

A trial run refuses by name what a graph cannot have. It finds what the Python could read, what is
written, and how much memory the call takes. A replay has to compute what the trial run computes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from moe_graphs.engine import fp8
from moe_graphs.engine.autograd import history_before, leaves_behind
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.guards import bytecode_names
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.guards import Guards, names_before_running, tensors_of_others
from moe_graphs.engine.guards.torch_state import TorchState
from moe_graphs.engine.partial.plan import CallMemory, nbytes
from moe_graphs.engine.partial.scope import Call, Exit, Scope
from moe_graphs.engine.snapshot import ParameterAliases, Snapshot
from moe_graphs.engine.tensors import (
    Signature,
    TensorSpec,
    address,
    as_leaf,
    flatten,
    static_copy,
    tensor_leaves,
)
from moe_graphs.engine.tracing import (
    MODIFIED_INPUT,
    Trace,
    TrialRun,
    differing_op,
)
from moe_graphs.errors import CaptureError

_MOST_RUNS = 8  # trial runs in which backwards may still differ from the next one

# "forward_pre_hooks" and so on -> the function to call with the module and the values.
Hooks = Mapping[str, Callable[..., None]]


@dataclass(frozen=True)
class ScopeCall:
    """A call of a scope, given flat.

    Attributes:
        leased: numbers of inputs that lie in static memory which other recordings write.
    """

    scope: Scope
    signature: Signature
    leaves: Sequence[Any]
    arguments: Call
    hooks: Hooks = field(default_factory=dict)
    leased: frozenset[int] = frozenset()

    def run(self, leaves: Sequence[Any]) -> tuple[Any, Exit | None]:
        inputs = pytree.tree_unflatten(leaves, self.signature.structure)
        outputs = self.scope.run_captured(inputs, self.arguments)
        self._check_returned(outputs[0], inputs)
        if self.scope.start is None:
            now, structure = pytree.tree_flatten(inputs)
            if structure != self.signature.structure or not all(map(is_, now, leaves)):
                raise CaptureError(
                    "it changes a container among its arguments, and a replay runs no Python: "
                    "return what is new"
                )
        return outputs

    def _check_returned(self, outputs: Any, inputs: Any) -> None:
        given = list(map(id, containers_in(inputs)))
        if any(id(each) in given for each in containers_in(outputs)):
            raise CaptureError(
                "it returns a container of its arguments, and a replay would return another one "
                "with the same elements: return a new one"
            )

    def with_attributes(self, had_inputs: bool) -> ScopeCall:
        """The call with the attributes that are found to be inputs, too.

        ``had_inputs`` says whether it had some already.
        """
        inputs = pytree.tree_unflatten(self.leaves, self.signature.structure)
        given = self.scope.assigned.given(inputs.inputs if had_inputs else inputs)
        signature = Signature.of(given, self.scope.name_input)
        return replace(self, signature=signature, leaves=flatten(given)[0])

    def detached_leaves(self) -> list[Any]:
        """New leaves of autograd on the same memory; the same tensor stays the same.

        Leased ones are copied, because garbage of the run would hold them as a caller does.
        """

        def detached(number: int, leaf: Tensor) -> Tensor:
            own = static_copy(leaf) if number in self.leased else leaf.detach()
            return as_leaf(own, leaf.requires_grad)

        return self.signature.anew(self.leaves, detached)

    def constants(self) -> dict[str, Any]:
        """Arguments that are no tensors, by name; objects may change inside."""
        specs = zip(self.signature.leaves, self.leaves, strict=True)
        return {
            f"argument {spec.name}": leaf
            for spec, leaf in specs
            if not isinstance(spec, TensorSpec)
        }

    @contextlib.contextmanager
    def forward_hooks(self) -> Iterator[dict[str, Any]]:
        """Calls forward hooks around a block, which puts the scope's output under "output"."""
        produced: dict[str, Any] = {}
        inputs = pytree.tree_unflatten(self.leaves, self.signature.structure) if self.hooks else ()
        self._call_hook("forward_pre_hooks", *inputs)
        yield produced
        self._call_hook("forward_hooks", *inputs, produced.get("output"))

    @contextlib.contextmanager
    def backward_hooks(self, incoming: Sequence[Any]) -> Iterator[list[Any]]:
        """Calls backward hooks around a block, which fills the list with the inputs' gradients."""
        gradients: list[Any] = []
        self._call_hook("backward_pre_hooks", tuple(incoming))
        yield gradients
        self._call_hook("backward_hooks", tuple(gradients), tuple(incoming))

    def _call_hook(self, kind: str, *values: Any) -> None:
        if kind in self.hooks:
            self.hooks[kind](self.scope.module, *values)


@dataclass(frozen=True)
class TriedForward:
    """The findings of a trial run of a forward.

    Attributes:
        outputs: leaves of the outputs, detached.
        written: tensors from outside that it modifies, with the values that it leaves there.
        counted: those among them whose version it changes.
        scales: the FP8 scales that it leaves.
        draws: whether it draws random numbers.
        uses_fp8: whether Transformer Engine's modules have cast to FP8.
    """

    run: TrialRun
    outputs: list[Any]
    structure: pytree.TreeSpec
    written: list[tuple[Tensor, Tensor]]
    counted: list[Tensor]
    scales: dict[str, Tensor]
    draws: bool
    uses_fp8: bool


@dataclass(frozen=True)
class TriedCall:
    """The findings of trial runs of forward and backward.

    Attributes:
        call: the call, with the attributes that it reads among its inputs.
        groups: the process groups over which they communicate.
    """

    call: ScopeCall
    memory: CallMemory
    groups: set[dist.ProcessGroup]


class Trials:
    """Trial runs of calls of the scopes of a model."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.model, self.backend = model, backend

    def forward(self, call: ScopeCall) -> TriedForward:
        """Runs a forward once.

        Raises:
            CaptureError: for what cannot be in a graph.
        """
        with self._forward(call) as (tried, _):
            return tried

    def make_ready(self, call: ScopeCall) -> None:
        """Lets modules make their FP8 state by an unwatched forward, if no real call came first."""
        with Snapshot(self.backend) as before, self.aliases(call).installed():
            leaves = call.detached_leaves()
            trace = Trace(self.backend.device, strict=False, refuse=False, before=before)
            with fp8.Autocast().beside(leaves), trace:
                call.run(leaves)
            fp8.register(call.scope.module)

    def forward_and_backward(
        self,
        call: ScopeCall,
        accessed: AccessedNames | None = None,
        linked: Sequence[int] = (),
        runs: int = 2,
    ) -> TriedCall:
        """Runs forward and backward several times; every run has to do what the first one did.

        If no real run came before and the first run changes something, there are two at least.

        Args:
            accessed: what a real run of the call has read, if there was one.
            linked: numbers of inputs that are outputs of other calls.

        Raises:
            CaptureError: for what cannot be in a graph, or depends on state that Python keeps.
        """
        state = TorchState(self.backend.device.type)
        check_capturable(call, state, is_observed=accessed is not None)
        guards: list[Guards] = []
        before_all = None if accessed is not None else self.guards_before_running(call)
        if accessed is not None:
            accessed.check_impure_calls(asked=bytecode_names.OF_HISTORY)
            guards = [self.guards(call, accessed)]
            guards[0].check_hooks()
            guards[0].check_keys()
        forwards, backwards = list[Trace](), list[Trace]()
        tried = 0
        with Snapshot(guards=guards) as before:
            while len(forwards) < runs:
                tried += 1
                both, memory, handed, older = self._forward_and_backward(call, linked)
                ran = AccessedNames.together(*(run.accessed for run in both))
                if before_all is not None and runs == 1 and before_all.changes():
                    runs = 2
                had_inputs, read = bool(call.scope.assigned.inputs), both[0].trace.read | handed
                finds = (call.scope.assigned.find(each, ran, read) for each in guards)
                if any(finds):
                    _check_settles(tried)
                    call = call.with_attributes(had_inputs)
                    guards = [] if accessed is None else [self.guards(call, accessed)]
                    forwards, backwards = [], []
                    continue
                if guards or runs == 1:  # the very first run does not know yet what is an input
                    _check_history(older)
                for each in guards:
                    each.check_unchanged()
                reads = self.guards(call, ran, both[0].trace.read)
                if guards or accessed is not None:  # the very first run may have replaced some
                    both[0].trace.check_others(reads.tensors)
                if not guards or (accessed is not None and len(guards) == 1):
                    guards.append(reads)
                    self.check_identities(call, guards[-1])
                    before.keep_objects(guards[-1])
                forwards.append(both[0].trace)
                backwards.append(both[1].trace)
                # No real run came before, so this one may have filled a cache.
                unsettled = [backwards] if accessed is not None else [forwards, backwards]
                may_settle = len(backwards) == 2 and tried < _MOST_RUNS
                if may_settle and any(differing_op(*each) is not None for each in unsettled):
                    forwards.pop(0)
                    backwards.pop(0)
        _check_same_operations(forwards, backwards)
        if before_all is not None:
            kept = {id(container.holder): held for container, held in before_all.contents}
            call.scope.assigned.put_back(kept)
        call.scope.assigned.tried()
        groups = set().union(*(trace.groups for trace in (*forwards, *backwards)))
        return TriedCall(call, memory, groups)

    def guards_before_running(self, call: ScopeCall) -> Guards:
        """Guards on everything that the call may read, found by its code alone."""
        return self.guards(call, self.names_before_running(call))

    def guards(
        self, call: ScopeCall, accessed: AccessedNames, addresses: Collection[int] = ()
    ) -> Guards:
        module = call.scope.module
        roots = {"": module, "forward": call.scope.forward, **call.constants()}
        known = [*module.parameters(), *module.buffers()]
        others = tensors_of_others(self.model, addresses, known)
        others |= fp8.tensors_of(module)
        return Guards(
            roots,
            accessed,
            addresses,
            tensors=others,
            outside=[module],
            assigned=call.scope.assigned.compared(),
        )

    def check_identities(self, call: ScopeCall, guards: Guards) -> None:
        """Checks that no input is an object that the code compares with others by identity.

        Raises:
            CaptureError: if the code may ask whether an input is a tensor that it knows.
        """
        found = call.signature.mismatch_of_memory(call.leaves, (), guards.asked_for)
        if found is not None:
            raise CaptureError(found.message)

    def names_before_running(self, call: ScopeCall) -> AccessedNames:
        """Names that the call may read, found by its code alone; nothing is run."""
        return names_before_running(
            [call.scope.forward],
            call.scope.module.modules(),
            functools.partial(self.guards, call),
        )

    def known(self) -> list[Tensor]:
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *fp8.tensors_of(self.model).values(),
        ]

    def aliases(self, call: ScopeCall) -> ParameterAliases:
        return ParameterAliases([call.scope.module])

    @contextlib.contextmanager
    def _forward(
        self, call: ScopeCall, *, with_hooks: bool = False
    ) -> Iterator[tuple[TriedForward, tuple[Any, list[Any]]]]:
        """Context around a trial run of a forward; inside it, the run's changes are in force.

        It also gives the outputs with their history, and the leaves that they come from.
        """
        leaves = call.detached_leaves()
        inputs = tensor_leaves(leaves)
        names = [call.signature.leaves[index].name for index in call.signature.tensors()]
        named = dict(zip(names, inputs, strict=True))
        with Snapshot(self.backend) as before:
            known = [*self.known(), *inputs]
            run = TrialRun(self.backend, known, before=before, inputs=named)
            hooks: contextlib.AbstractContextManager[dict[str, Any]] = contextlib.nullcontext({})
            if with_hooks:
                hooks = call.forward_hooks()
            beside, aliases = fp8.Autocast().beside(leaves), self.aliases(call)
            with hooks as produced, aliases.installed(), beside as uses, run:
                outputs = produced["output"] = _run(call, leaves)
            if uses.fp8:
                fp8.register(call.scope.module)
            run.check(asked=bytecode_names.OF_HISTORY)
            flat, structure = pytree.tree_flatten(outputs)
            _check_outputs(flat, inputs)
            run.trace.check_outputs(flat)
            self._check_not_kept(outputs, call, run.accessed)
            tried = TriedForward(
                run=run,
                outputs=[leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat],
                structure=structure,
                written=[(tensor, tensor.detach().clone()) for tensor in before.tensors],
                counted=before.counted(),
                scales=fp8.Fp8State().named_values(),
                draws=before.has_drawn(),
                uses_fp8=uses.fp8,
            )
            yield tried, (outputs, leaves)

    def _check_not_kept(self, outputs: Any, call: ScopeCall, accessed: AccessedNames) -> None:
        returned = {id(each) for each in containers_in(outputs)}
        contents = self.guards(call, accessed).contents if returned else ()
        kept = next((each.name for each, _ in contents if id(each.holder) in returned), None)
        if kept is not None:
            raise CaptureError(
                f"it returns the container {kept!r}, which it keeps, and a replay would return "
                f"another one with the same elements: return a copy of it"
            )

    def _forward_and_backward(
        self, call: ScopeCall, linked: Sequence[int]
    ) -> tuple[tuple[TrialRun, TrialRun], CallMemory, set[int], Node | None]:
        """Runs both once; gives also the addresses of the outputs.

        No backward runs, and a node of the caller's graph is given, if the outputs depend on one: a
        value that an earlier call has left brings its history until it is found to be an input.
        """
        meter, first = self.backend.meter(), torch._C._autograd._get_sequence_nr()
        with meter, self._forward(call, with_hooks=True) as (tried, (outputs, leaves)):
            forward, saved = meter.peak(), meter.alive()
            produced = tensor_leaves(outputs)
            older = history_before(produced, first)
            backward = self._backward(call, tried, () if older else produced, meter)
            inputs = {id(tensor): tensor for tensor in tensor_leaves(leaves)}
            of_others = nbytes([leaves[index] for index in linked])
            memory = CallMemory(
                scope=call.scope.name,
                inputs=nbytes(inputs.values()) - of_others,
                linked=of_others,
                outputs=nbytes([o for o in produced if not any(o is leaf for leaf in leaves)]),
                saved=saved,
                forward=forward,
                backward=meter.peak(),
                gradients=nbytes([o for o in produced if o.requires_grad]),
                weights=nbytes(p for p in leaves_behind(produced) if id(p) not in inputs),
            )
            handed = set(map(address, produced))
        return (tried.run, backward), memory, handed, older

    def _backward(
        self, call: ScopeCall, tried: TriedForward, produced: Sequence[Tensor], meter: Any
    ) -> TrialRun:
        differentiable = [output for output in produced if output.requires_grad]
        gradients = [torch.ones_like(output) for output in differentiable]
        found_grads = [(p, p.grad) for p in self.model.parameters()]
        with Snapshot(gradients_of=self.model.parameters()) as before:
            run = TrialRun(self.backend, before=before, strict=False, behind=tried.run)
            if differentiable:
                wanted = leaves_behind(differentiable)
                meter.restart()
                with call.backward_hooks(gradients) as found, run:
                    found += torch.autograd.grad(
                        differentiable, wanted, gradients, allow_unused=True
                    )
                run.check()
            self._check_no_gradients(found_grads, before.tensors)
        return run

    def _check_no_gradients(
        self, found: Sequence[tuple[Any, Any]], tensors: Sequence[Tensor]
    ) -> None:
        written = {address(tensor) for tensor in tensors}
        for parameter, gradient in found:
            if parameter.grad is not gradient or (
                gradient is not None and address(gradient) in written
            ):
                raise CaptureError(
                    f"its backward accumulates into .grad of a parameter {tuple(parameter.shape)} "
                    f"by itself: return the gradient from the autograd function instead"
                )


class Tried:
    """A call as the warm-up tried it; it is tried again if it has changed before its capture.

    A capture runs a call beside the real one, too. That changes nothing because the trial run has
    shown that the call changes nothing in Python and runs no hooks. If the values that its Python
    could read have changed since, the call is tried again before it is captured.

    Attributes:
        accessed: which Python a real run of the call has run.
    """

    def __init__(self, trials: Trials, call: ScopeCall, accessed: AccessedNames) -> None:
        self._trials, self._reads = trials, accessed
        self._guards = trials.guards(call, accessed)

    def again_if_changed(self, call: ScopeCall) -> None:
        """Tries the call again if it has changed; what the call can reach stays as it is.

        Raises:
            CaptureError: for what cannot be captured now.
        """
        if self._guards.mismatch() is None:
            return
        self._trials.guards(call, self._reads).check_hooks()
        reached = self._trials.names_before_running(call)
        guards = self._trials.guards(call, AccessedNames.together(self._reads, reached))
        with Snapshot(guards=[guards]):
            self._trials.forward_and_backward(call, self._reads)
            guards.check_unchanged()
        self._guards = self._trials.guards(call, self._reads)


def containers_in(tree: Any) -> list[Any]:
    """The containers in a pytree that somebody may change: lists, dictionaries and the like."""
    found: list[Any] = []

    def note(node: Any) -> bool:
        found.append(node)
        return False

    leaves = pytree.tree_leaves(tree, is_leaf=note)
    alone = set(map(id, leaves))
    return [each for each in found if not isinstance(each, tuple) and id(each) not in alone]


def _run(call: ScopeCall, leaves: Sequence[Any]) -> Any:
    try:
        return call.run(leaves)[0]
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise CaptureError(f"an input is modified in place, {MODIFIED_INPUT}") from error


def _check_history(older: Node | None) -> None:
    if older is not None:
        raise CaptureError(
            f"it uses a tensor of an earlier call with its history ({older.name()}), and a "
            f"backward of the capture would go through it: pass the tensor as an argument, or "
            f"detach() it"
        )


def _check_settles(tried: int) -> None:
    if tried == _MOST_RUNS:
        raise CaptureError(
            "every run of it assigns tensors to other attributes or entries of dictionaries than "
            "the runs before: assign them to the same ones"
        )


def _check_same_operations(*directions: Sequence[Trace]) -> None:
    """Checks that all runs of each direction did the same operations.

    Raises:
        CaptureError: if a run did other operations than the first one.
    """
    for runs in directions:
        for other in runs[1:]:
            differing = differing_op(runs[0], other)
            if differing is not None:
                raise CaptureError(
                    f"two runs of the same call differ: {differing}: it depends on state that "
                    f"Python keeps (a counter, random, time), and a replay runs no Python"
                )


def check_dropout_of_cudnn(name: str, module: nn.Module) -> None:
    """Checks that no recurrent module has dropout whose random state only cuDNN knows.

    Raises:
        CaptureError: if a recurrent module on a GPU drops out between its layers.
    """
    if not isinstance(module, nn.RNNBase) or module.num_layers == 1 or not module.training:
        return
    if module.dropout and next(module.parameters()).is_cuda and torch.backends.cudnn.enabled:
        raise CaptureError(
            f"module {name or 'model'!r} ({type(module).__name__}) draws its dropout inside of "
            f"cuDNN, from a state that nobody can put back: set its dropout to 0 and put "
            f"nn.Dropout between modules of one layer, or choose scopes without it"
        )


def check_capturable(call: ScopeCall, state: TorchState, *, is_observed: bool) -> None:
    """Checks that a graph can serve the call.

    Args:
        is_observed: whether warm-up steps have shown that no other code uses its weights' casts.

    Raises:
        CaptureError: if the call is made in a way that no graph can serve.
    """
    unsupported = call.signature.unsupported() or fp8.unsupported(call.scope.module)
    if unsupported is not None:
        raise CaptureError(unsupported)
    for name, module in call.scope.module.named_modules():
        check_dropout_of_cudnn(name, module)
    if state.has_autocast_cache and not (is_observed and all(map(_is_not_cached, call.leaves))):
        raise CaptureError(
            "autocast caches casts of weights and of leaves, and code around the call may use "
            "them, too: use torch.autocast(..., cache_enabled=False)"
        )


def _is_not_cached(leaf: Any) -> bool:
    """Whether autocast does not cache casts of an input, because it is no leaf with a gradient."""
    return not (isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf)


def _check_outputs(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> None:
    for output in outputs:
        if _has_tensors_inside(output):
            kind = type(output).__name__
            raise CaptureError(
                f"it returns a {kind}, which holds tensors and is no pytree: a replay would hand "
                f"out the one of the capture for ever. Decorate {kind} with "
                f"moe_graphs.staged.record, or call torch.utils._pytree.register_dataclass({kind})"
            )
        if isinstance(output, Tensor) and not any(output is each for each in inputs):
            _check_output(output, inputs)


def _has_tensors_inside(value: Any) -> bool:
    """Whether an object that is no pytree holds tensors, which would be lost on the way."""
    held = getattr(value, "__dict__", {}).values() if not isinstance(value, nn.Module) else ()
    return any(isinstance(each, Tensor) for each in held)


def _check_output(output: Tensor, inputs: Sequence[Tensor]) -> None:
    shape = tuple(output.shape)
    if output.numel() and address(output) in {address(each) for each in inputs}:
        raise CaptureError(
            f"output {shape} is a view of an input: what is done to one of them in place has to "
            f"be seen in the other, which a graph does not do: return a clone() of it"
        )
    if output.__dict__ and not isinstance(output, nn.Parameter):
        raise CaptureError(
            f"output {shape} carries the attribute {min(output.__dict__)!r}, which would be lost: "
            f"return it as an output of its own"
        )
