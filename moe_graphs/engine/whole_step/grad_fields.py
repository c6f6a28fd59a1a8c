"""``.grad`` of every parameter in a captured step, and autograd's nodes that add gradients up."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from moe_graphs.engine.backends.backend import Graph
from moe_graphs.engine.buffer_lease import BufferLease, wait_for_autograd
from moe_graphs.engine.tensors import Mismatch, copy_all, is_wrapped, unwrap
from moe_graphs.errors import CaptureError

Gradients = list[torch.Tensor | None]
_GRAD_OF = attrgetter("grad")


class GradUse(enum.Enum):
    """The use that a captured step makes of the ``.grad`` that it finds."""

    DROPS = "forgets it, so the step may find anything (``zero_grad()`` at its beginning)"
    ADDS = "a backward adds to it, so None is as good as zeros"
    NEEDS = "reads or writes it in another way"
    IGNORES = "leaves it alone, as far as the operations of the step show"


class GradField(NamedTuple):
    """The ``.grad`` of a parameter in a captured step.

    Attributes:
        use: what the step does with the ``.grad`` that it finds.
        found: memory of the ``.grad`` that the step was captured with, or None. If the ``.grad`` is
            a part of a buffer, this is that very memory, because others may read it there.
        left: ``.grad`` after the step: memory of the graph, which the next replay writes again.
    """

    name: str
    parameter: Tensor
    use: GradUse
    found: Tensor | None
    left: Tensor | None


class StaticGradients:
    """The ``.grad`` fields that a captured step does not ignore.

    A replay does with ``.grad`` whatever the step does: fill, accumulate, zero or drop it.
    """

    def __init__(self, fields: Iterable[GradField]) -> None:
        rows = [row for row in fields if row.use is not GradUse.IGNORES]
        self.found, self.left = [row.found for row in rows], [row.left for row in rows]
        # Most steps find nothing and leave nothing; one loop in C is enough to see that.
        self._unset = {
            name: p for name, p, use, found, _ in rows if found is None and use is not GradUse.DROPS
        }
        self._set = [(p, found) for _, p, _, found, _ in rows if found is not None]
        self._needed = {
            name: p
            for name, p, use, found, _ in rows
            if found is not None and (use is GradUse.NEEDS or is_part(found))
        }
        self._after = [row for row in rows if row.left is not None or row.name not in self._unset]
        self._leases: dict[str, tuple[torch.Tensor, bool, BufferLease]] = {}

    def settled(self) -> None:
        """Ends the capture: from now on every holder of a gradient is a caller."""
        for device in {row.left.device for row in self._after if row.left is not None}:
            wait_for_autograd(device)
        for name, parameter, _, found, left in self._after:
            if left is not None and not is_part(left):
                lease = BufferLease(left, parameter=parameter, standing=True)
                self._leases[name] = parameter, left is found, lease

    def mismatch(self) -> Mismatch | None:
        if not all(map(is_, map(_GRAD_OF, self._unset.values()), repeat(None))):
            name = next(name for name, p in self._unset.items() if p.grad is not None)
            message = (
                f"{name}.grad was None when the step was captured and is not now: an eager "
                f"step would add to it, the graph overwrites it: call zero_grad() before "
                f"every step, or within it"
            )
            return Mismatch("gradients_left", message)
        for name, parameter in self._needed.items():
            if parameter.grad is None:
                message = (
                    f"{name}.grad was there when the step was captured, as a part of a buffer or "
                    f"without a backward that adds to it, and is None now: call "
                    f"zero_grad(set_to_none=False)"
                )
                return Mismatch("gradients_gone", message)
        for name, (parameter, adds, lease) in self._leases.items():
            if adds and parameter.grad is lease.standing:
                continue  # the step adds to what it finds there
            if not lease.reclaim():
                message = (
                    f"a view of {name}.grad of an earlier step is still held, and the graph would "
                    f"write there: clone what is to be kept"
                )
                return Mismatch("gradients_held", message)
        return None

    def finds_as_captured(self) -> bool:
        """Whether the step finds a ``.grad`` wherever it found one when it was captured."""
        return all(parameter.grad is not None for parameter, _ in self._set)

    def replay(self, graph: Graph) -> None:
        """Replays the graph with the present gradients, whichever tensors hold them now.

        Their values are copied to the memory that the graph reads, and back to these tensors
        afterwards. At the end every ``.grad`` is what the step leaves.
        """
        others, zeros = [], []
        for parameter, found in self._set:
            if parameter.grad is None:
                zeros.append(found)
            elif not _lies_at(parameter.grad, found):
                others.append((unwrap(parameter.grad), unwrap(found)))
        if zeros:
            torch._foreach_zero_(list(map(unwrap, zeros)))
        copy_all([found for _, found in others], [other for other, _ in others])
        graph.replay()
        copy_all([other for other, _ in others], [found for _, found in others])
        self._attach()

    def _attach(self) -> None:
        for name, parameter, _, found, left in self._after:
            if left is not None and left is found and parameter.grad is not None:
                continue  # the step has added to it, wherever it is
            if name in self._leases:
                left = self._leases[name][-1].standing
            if parameter.grad is not left:
                parameter.grad = left


def keep_apart(parameters: Sequence[torch.Tensor], found: Gradients) -> None:
    """Gives new gradients of sharded parameters memory of their own.

    FSDP2 makes the gradients of a group as parts of one buffer, so they could not be reclaimed one
    by one.
    """
    for parameter, before in zip(parameters, found, strict=True):
        after = parameter.grad
        is_new = after is not before and after is not None and is_wrapped(after)
        if after is not None and is_new and is_part(after):
            parameter.grad = after.detach().clone()


def gradients_of(parameters: Sequence[torch.Tensor]) -> Gradients:
    return [parameter.grad for parameter in parameters]


def set_gradients(parameters: Sequence[torch.Tensor], gradients: Gradients) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def gradients_to_find(
    parameters: Sequence[torch.Tensor], entry: Gradients, uses: Sequence[GradUse]
) -> Gradients:
    """The gradients to capture the step with, given those that it is called with."""
    found: Gradients = []
    for parameter, gradient, use in zip(parameters, entry, uses, strict=True):
        if gradient is None or use is GradUse.DROPS:
            found.append(None)
            continue
        if gradient.layout is not torch.strided:
            raise CaptureError("a gradient is sparse, which a graph cannot hold: use sparse=False")
        static = torch.empty_like(parameter, requires_grad=False)
        found.append(gradient.detach() if is_part(gradient) else static.copy_(gradient))
    return found


def _lies_at(gradient: torch.Tensor, found: torch.Tensor) -> bool:
    return unwrap(gradient).data_ptr() == unwrap(found).data_ptr()


def is_part(gradient: torch.Tensor) -> bool:
    """Whether a gradient is a part of a larger buffer."""
    gradient = unwrap(gradient)
    return gradient.untyped_storage().nbytes() > gradient.nbytes


# ---- the nodes that add gradients up, and the streams that they belong to
# Such a node belongs to the stream of its first use. It lives on while somebody holds a loss of an
# eager step. A captured backward would then pull that stream into the capture, which CUDA refuses
# for the default stream (``cudaErrorStreamCaptureImplicit``). Data-parallel wrappers hold these
# nodes for good.

_HOLDERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def forget_accumulators(model: nn.Module, more: Iterable[Tensor] = ()) -> None:
    """Lets the next forward make new nodes; a loss that is held keeps its own nodes.

    Autograd forgets the nodes when data of another dtype is assigned. Nothing else changes. Inside
    a wrapper whose hooks are on these nodes, this function does nothing.

    Args:
        more: further tensors that gradients are accumulated for, besides the model's parameters.
    """
    if _holder(model) is not None:
        return
    for parameter in chain(model.parameters(), more):
        if parameter.requires_grad:
            data = parameter.data
            other = torch.float32 if data.dtype is torch.float64 else torch.float64
            parameter.data = _empty_like(data, other)
            parameter.data = data


def _empty_like(data: Any, dtype: torch.dtype) -> Tensor:
    if is_wrapped(data):  # a DTensor
        part = torch.empty(0, *data.shape[1:], dtype=dtype, device=data.device)
        kind: Any = type(data)
        return kind.from_local(part, data.device_mesh, data.placements, run_check=False)
    return torch.empty(0, dtype=dtype, device=data.device)


class Accumulators:
    """Hooks on the gradient accumulators of some parameters.

    The accumulators are not kept, because ``swap_tensors`` refuses parameters that have one. An
    accumulator that lives holds its parameter, so the references to the parameter are counted. If
    there are no more of them than before, no hook can have been added.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._counts = [1] * len(self._parameters)
        self._hooks: list[list[dict[int, Any]]] = [[] for _ in self._parameters]

    def hooked(self) -> bool:
        kind: Any = Tensor
        counts = list(map(kind._use_count, self._parameters))
        if counts != self._counts:
            both = zip(counts, self._counts, strict=True)
            for index in [i for i, (now, before) in enumerate(both) if now != before]:
                self._hooks[index] = _hooks_of(self._parameters[index]) if counts[index] > 1 else []
            self._counts = counts
        return any(map(any, self._hooks))


def _hooks_of(parameter: Tensor) -> list[dict[int, Any]]:
    """The dictionaries of hooks on a parameter's accumulator.

    torch shows them to nobody, but a new hook's handle leads to the dictionary.
    """
    node = get_gradient_edge(parameter).node
    return [_dictionary_of(add(_nothing)) for add in (node.register_prehook, node.register_hook)]


def _nothing(*gradients: Any) -> None: ...


def _dictionary_of(handle: RemovableHandle) -> dict[int, Any]:
    hooks = handle.hooks_dict_ref()
    assert hooks is not None
    handle.remove()
    return hooks


def check_hooks(model: nn.Module) -> None:
    """Checks that no hooks would be lost.

    Raises:
        CaptureError: if hooks would be lost together with the accumulators that have them.
    """
    if _holder(model) is None and Accumulators(model.parameters()).hooked():
        raise CaptureError(
            "gradient accumulators have hooks, which a captured step does not run: register them "
            "on the parameters (register_hook, register_post_accumulate_grad_hook)"
        )


def check_streams(model: nn.Module, stale: list[str]) -> None:
    """Checks that all gradients are added up on the stream of the capture.

    ``stale`` are the names of parameters for which this is not so.

    Raises:
        CaptureError: if there are any, with what to change.
    """
    if stale:
        kind = _holder(model) or "whatever holds their gradient accumulators"
        raise CaptureError(
            f"{kind} was built on another stream, where the gradients of {', '.join(stale[:3])} "
            f"and {max(0, len(stale) - 3)} more are accumulated: build it within 'with "
            f"torch.cuda.stream(stream):' and pass the same stream=stream to FullIteration"
        )


def _holder(model: nn.Module) -> str | None:
    """Class name of a wrapper (torch's or another's) whose hooks are on accumulators, or None."""
    kinds = (type(module).__name__ for module in model.modules())
    return next((kind for kind in kinds if kind in _HOLDERS), None)
