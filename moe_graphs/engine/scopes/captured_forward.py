"""From what a capture of a forward has produced to the values that replays need."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.autograd import LeafUses, has_hooks, leaves_behind
from moe_graphs.engine.backends.backend import Graph
from moe_graphs.engine.fp8 import Scales
from moe_graphs.engine.scopes.open_call import OpenCall
from moe_graphs.engine.scopes.recording import OutputLeaf, RecordedForward, Surroundings
from moe_graphs.engine.scopes.select import Exit
from moe_graphs.engine.scopes.trials import ScopeCall, TriedForward
from moe_graphs.engine.stand_ins import StandIns
from moe_graphs.engine.static_memory import target_of
from moe_graphs.engine.tracing import address
from moe_graphs.engine.values import is_plain, same_value
from moe_graphs.errors import CaptureError


class CapturedForward:
    """What a capture of a forward has produced, until it is described."""

    def __init__(
        self,
        call: ScopeCall,
        inputs: Sequence[Any],
        output: Any,
        exit: Exit | None,
        stand_ins: StandIns,
        saved: Saved,
        buffers: Sequence[Tensor],
    ) -> None:
        self._call, self._inputs, self._exit = call, inputs, exit
        self._stand_ins, self._saved = stand_ins, saved
        self._tensors = call.signature.tensors()
        self._numbers = {id(inputs[i]): i for i in reversed(self._tensors)}
        self._buffers = {id(buffer): buffer for buffer in buffers}
        self._flat, self._structure = pytree.tree_flatten(output)

    def described(
        self,
        graph: Graph,
        surroundings: Surroundings,
        tried: TriedForward,
        *,
        linked: frozenset[int],
        scales: Scales | None,
        split: bool,
    ) -> tuple[RecordedForward, OpenCall]:
        leaves, outputs = self._sources(tried.outputs)
        live = [output for output in outputs if output.requires_grad]
        open = self._open(live)
        saved, first = self._saved, self._call.signature.first
        loaded = tuple(i for i in self._tensors if first[i] == i)
        forward = RecordedForward(
            graph=graph,
            signature=self._call.signature,
            surroundings=surroundings,
            inputs=tuple(self._inputs),
            loaded=loaded,
            targets=tuple(target_of(self._inputs[i]) for i in loaded),
            linked=linked,
            outputs=tuple(output.detach() for output in outputs),
            differentiable=tuple(output.requires_grad for output in outputs),
            output_leaves=leaves,
            output_structure=self._structure,
            exit=self._exit,
            listed=tuple(self._listed(open, use) for use in open.uses.of),
            saved_outputs=tuple(o.detach() for o in outputs if saved.has(o)),
            saved_inputs=tuple(i for i in self._tensors if saved.has(self._inputs[i])),
            saved_of_model=tuple(filter(saved.has, self._of_model(open))),
            written=tuple(tensor for tensor, _ in tried.written),
            draws=tried.draws,
            scales=scales,
            is_split=split and bool(live),
            arguments=self._call.arguments.without_tensors(),
        )
        return forward, open

    def _sources(self, eager: Sequence[Any]) -> tuple[tuple[OutputLeaf, ...], list[Tensor]]:
        """eager: what another run has returned."""
        leaves, outputs = [], {}
        for leaf, before in zip(self._flat, eager, strict=True):
            original = self._original(leaf) if isinstance(leaf, Tensor) else leaf
            if id(leaf) in self._numbers:
                # The caller gets its own tensor back: what it does with it is none of the graph's.
                leaves.append(OutputLeaf("input", self._numbers[id(leaf)]))
            elif not isinstance(leaf, Tensor):
                _check_constant(leaf, before)
                leaves.append(OutputLeaf("constant", leaf))
            elif original is not leaf or id(leaf) in self._buffers:
                leaves.append(OutputLeaf("constant", original))
            else:
                outputs.setdefault(id(leaf), (len(outputs), leaf))
                leaves.append(OutputLeaf("graph", outputs[id(leaf)][0]))
        return tuple(leaves), [leaf for _, leaf in outputs.values()]

    def _of_model(self, open: OpenCall) -> list[Tensor]:
        return [*map(self._original, open.parameters), *self._buffers.values()]

    def _open(self, live: Sequence[Tensor]) -> OpenCall:
        wanted = {
            number: self._inputs[number]
            for number in sorted(self._numbers.values())
            if self._inputs[number].requires_grad
        }
        parameters = [leaf for leaf in leaves_behind(live) if id(leaf) not in self._numbers]
        for parameter in parameters:
            if has_hooks(parameter):  # of its own: it is no stand-in
                raise CaptureError(
                    f"a parameter {tuple(parameter.shape)} is reached past its module and has "
                    f"gradient hooks, which would run twice: register it as a parameter of a module"
                )
        inputs = list(wanted.values())
        uses = LeafUses(live, [*inputs, *parameters])
        return OpenCall(list(live), tuple(wanted), inputs, parameters, uses)

    def _listed(self, open: OpenCall, use: int) -> int | Tensor:
        if use < len(open.inputs):
            return open.numbers[use]
        return self._original(open.parameters[use - len(open.inputs)])

    def _original(self, tensor: Tensor) -> Tensor:
        return self._stand_ins.original(tensor)


def _check_constant(value: Any, before: Any) -> None:
    """
    Raises:
        CaptureError: if it is made anew in every call, and callers would share it.
    """
    if value is before or (is_plain(value) and same_value(value, before)):
        return
    if not isinstance(value, types.FunctionType):
        raise CaptureError(
            f"it returns a {type(value).__name__} that it makes anew in every call "
            f"({value!r:.60} after {before!r:.60}), and a replay would hand out the same one for "
            f"ever: return tensors, or what stays the same"
        )


class Saved:
    """The memory of the tensors that autograd saves within a block."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            yield

    def has(self, tensor: Tensor) -> bool:
        return address(tensor) in self._addresses

    def _note(self, tensor: Tensor) -> Tensor:
        self._addresses.add(address(tensor))
        return tensor
