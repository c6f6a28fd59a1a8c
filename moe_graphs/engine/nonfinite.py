"""Names the first operation of a training step whose output is not finite.

A graph holds kernels and no names, so a replay that gives a NaN does not say where the NaN comes
from. But eager computes the same bits. So the step runs as always, and only if it leaves something
that is not finite, everything is put back and the step runs once more, eagerly and watched.

The watch sees each operation that passes torch's dispatcher, in the forward, in the backward and in
the update. It does not see what a Triton kernel writes that no operator wraps; then it names the
first operation that reads such a value.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from torch.optim import Optimizer

from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.guards.bytecode_names import AccessedNames
from moe_graphs.engine.guards.guards import Guards
from moe_graphs.engine.snapshot import Snapshot
from moe_graphs.engine.tensors import tensor_leaves, unwrap
from moe_graphs.engine.tracing import DispatchMode, frame_of_the_user
from moe_graphs.engine.verify import Anywhere
from moe_graphs.engine.whole_step.optimizers import FirstStepState
from moe_graphs.errors import NonFiniteError

T = TypeVar("T")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_MAKE_MEMORY = frozenset(getattr(torch.ops.aten, name) for name in _EMPTY)


def find_nonfinite(
    step: Callable[[], T],
    eagerly: Callable[[], object],
    *,
    model: nn.Module,
    backend: Backend,
    optimizers: Sequence[Optimizer] = (),
    state: Sequence[object] = (),
    anywhere: Anywhere = bool,
) -> T:
    """Runs ``step()``. If it leaves something that is not finite, finds the operation.

    Before the step everything that it may change is copied to the host, so a step takes longer.

    Args:
        eagerly: runs the same step without graphs.
        state: other objects that the step changes: tensors, a ``DeviceStep``.
        anywhere: tells whether something is true on any rank. All ranks run the step again, or
            none does.

    Raises:
        NonFiniteError: if the results, gradients, parameters, buffers or optimizers' states are not
            finite after the step. Everything is as it was before the step then, except state that
            only Python keeps.
    """
    kept = {id(t): t for t in _kept(model, optimizers, state)}.values()
    of_first_step = FirstStepState(optimizers)
    parameters = list(model.parameters())
    before = Snapshot(
        backend, values=kept, on_host=True, gradients_of=parameters, python_random=True
    )
    result = step()
    left = _not_finite(_left(model, optimizers, result))
    if not anywhere(bool(left)):
        return result
    _put_back(before, of_first_step)
    start = _not_finite(_named(model))
    watch = NonFiniteWatch(model)
    try:
        with watch:
            again = eagerly()
        still = _not_finite(_left(model, optimizers, again))
    finally:
        _put_back(before, of_first_step)
    raise NonFiniteError(_message(left, start, still, watch), *list(watch.found.values())[:1])


def _put_back(before: Snapshot, of_first_step: FirstStepState) -> None:
    of_first_step.take_away()
    before.put_back()


def _kept(
    model: nn.Module, optimizers: Sequence[Optimizer], state: Sequence[object]
) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    yield from tensor_leaves([list(optimizer.state.values()) for optimizer in optimizers])
    yield from tensor_leaves([group for each in optimizers for group in each.param_groups])
    everything = {f"state[{number}]": each for number, each in enumerate(state)}
    yield from Guards({}, AccessedNames(), everything=everything).tensors


# ---- what is not finite, by name


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"parameter {name!r}", p) for name, p in model.named_parameters())
    yield from ((f"buffer {name!r}", buffer) for name, buffer in model.named_buffers())


def _left(
    model: nn.Module, optimizers: Sequence[Optimizer], result: object
) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"result {number}", each) for number, each in enumerate(tensor_leaves(result)))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"the gradient of {name!r}", parameter.grad
    yield from _named(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for updated, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    yield f"{key!r} of the optimizer for {names.get(id(updated))!r}", value


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the tensors that are not finite. Waits for the device once per tensor."""
    return [name for name, tensor in tensors if _is_bad(tensor)]


@torch.no_grad()
def _is_bad(tensor: Tensor) -> bool:
    tensor = unwrap(tensor).detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return False
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not bool(tensor.isfinite().all())


@torch.no_grad()
def _has_nan(tensor: Tensor) -> bool:
    return _is_bad(tensor) and bool(unwrap(tensor).detach().isnan().any())


# ---- the watch


@dataclass(frozen=True)
class NonFiniteOperation:
    """An operation whose output is not finite.

    Attributes:
        operation: its name, as in ``aten.log``.
        phase: "forward", "backward", or "update".
        module: name of the module whose forward runs it, or has run what it is the backward of;
            "" is the model itself, None is outside of the model.
        line: the user's line, of the forward if the operation is a backward.
        inputs: per tensor among its arguments, dtype, shape and range.
        output: dtype, shape and range of the output.
    """

    operation: str
    phase: str
    module: str | None
    line: str
    inputs: tuple[str, ...]
    output: str

    def __str__(self) -> str:
        where = "outside of the model" if self.module is None else f"module {self.module!r}"
        rows = [f"{self.operation} ({self.phase}, {where}) at {self.line}"]
        rows += [f"  input {number}: {each}" for number, each in enumerate(self.inputs)]
        return ";\n".join([*rows, f"  output: {self.output}"])


class NonFiniteWatch(DispatchMode):
    """A context that looks for the first operations whose outputs are not finite.

    Memory that no operation has written yet is set to zero, so that it holds no NaN by chance.

    Attributes:
        made: the first operation that makes an infinite value from finite ones.
        nan: the first operation that makes a NaN from inputs without a NaN. A mask of ``-inf`` is
            no error, but ``-inf`` minus ``-inf`` is one.
        read: the first operation that reads a NaN which no operation before it has made.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[str] = []
        # Autograd numbers its nodes. A node is made right before its operation runs.
        self._of_node: dict[int, tuple[str | None, str]] = {}
        self.made: NonFiniteOperation | None = None
        self.nan: NonFiniteOperation | None = None
        self.read: NonFiniteOperation | None = None

    @property
    def found(self) -> dict[str, NonFiniteOperation]:
        """The operations that were found, in the order in which they ran, with what each did."""
        found = {
            "the first infinity from finite values": self.made,
            "the first NaN": self.nan,
            "the first operation that reads a NaN": self.read,
        }
        return {what: operation for what, operation in found.items() if operation is not None}

    def __enter__(self) -> NonFiniteWatch:
        self._stack = contextlib.ExitStack()
        # Backwards run on this thread, where the running node is known.
        self._stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for handle in (
            of_all_modules.register_module_forward_pre_hook(self._enter_module),
            of_all_modules.register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._stack.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._stack.close()

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        inherited = self._running[-1] if self._running else ""
        self._running.append(self._names.get(module, inherited))

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._running:
            self._running.pop()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket in _MAKE_MEMORY:
            out = func(*args, **kwargs)
            return out.zero_() if isinstance(out, Tensor) and not out.is_meta else out
        self._note_node()
        if func.is_view or self.nan is not None or self.read is not None:
            return func(*args, **kwargs)
        inputs = tensor_leaves((args, kwargs))
        before = _Inputs(inputs) if func._schema.is_mutable else None
        out = func(*args, **kwargs)
        outputs = [*tensor_leaves(out), *([] if before is None else inputs)]
        bad = next((each for each in outputs if _is_bad(each)), None)
        if bad is not None:
            self._note(func, before or _Inputs(inputs), _has_constant((args, kwargs)), bad)
        return out

    def _note(self, func: Any, inputs: _Inputs, has_constant: bool, output: Tensor) -> None:
        if inputs.has_nan:
            self.read = self._described(func, inputs, output)
        elif _has_nan(output):
            self.nan = self._described(func, inputs, output)
        elif self.made is None and inputs.are_finite and not has_constant:
            self.made = self._described(func, inputs, output)

    def _note_node(self) -> None:
        if torch._C._current_autograd_node() is None and torch.is_grad_enabled():
            module = self._running[-1] if self._running else None
            self._of_node[torch._C._autograd._get_sequence_nr() - 1] = module, _user_line()

    def _described(self, func: Any, inputs: _Inputs, output: Tensor) -> NonFiniteOperation:
        node = torch._C._current_autograd_node()
        module, line = (self._running[-1] if self._running else None), _user_line()
        phase = "forward" if self._running or torch.is_grad_enabled() else "update"
        if node is not None:
            phase = "backward"
            module, line = self._of_node.get(node._sequence_nr(), (None, f"node {node.name()}"))
        name = str(func.overloadpacket)
        return NonFiniteOperation(name, phase, module, line, inputs.shown, _shown(output))


class _Inputs:
    """The tensors among the arguments of an operation, as they were before it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        bad = [each for each in tensors if _is_bad(each)]
        self.are_finite, self.has_nan = not bad, any(map(_has_nan, bad))
        self.shown = tuple(map(_shown, tensors))


def _has_constant(value: Any) -> bool:
    """Whether a number among the arguments is not finite, as in ``masked_fill(mask, -inf)``."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, (tuple, list)):
        return any(map(_has_constant, value))
    return isinstance(value, Mapping) and any(map(_has_constant, value.values()))


@torch.no_grad()
def _shown(tensor: Tensor) -> str:
    tensor = unwrap(tensor).detach()
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not tensor.numel() or tensor.is_complex() or tensor.dtype is torch.bool:
        return text
    if not tensor.is_floating_point():
        return f"{text}, from {tensor.min().item()} to {tensor.max().item()}"
    flat = tensor.reshape(-1).double()
    finite = flat[flat.isfinite()]
    if finite.numel():
        text += f", from {finite.min().item():.6g} to {finite.max().item():.6g}"
    counts = {"nan": flat.isnan(), "inf": flat == torch.inf, "-inf": flat == -torch.inf}
    found = [f"{int(each.sum())} {word}" for word, each in counts.items() if each.any()]
    return f"{text}, {', '.join(found)} of {flat.numel()}" if found else text


def _user_line() -> str:
    frame = frame_of_the_user(sys._getframe(1))
    return (
        "unknown source line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    )


def _message(
    left: Sequence[str], start: Sequence[str], still: Sequence[str], watch: NonFiniteWatch
) -> str:
    what = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
    message = f"the step left values that are not finite: {what or 'on another rank'}"
    if start:
        return f"{message}; {start[0]} was not finite before the step"
    if not watch.found:
        unseen = "the batch has them, or a Triton kernel that no operator wraps makes them"
        why = unseen if still else "everything is finite there, so the replay is to blame"
        return f"{message}; the step has run again eagerly: {why}"
    found = (f"{what}: {operation}" for what, operation in watch.found.items())
    return ";\n".join([message, *found])
