"""The nodes that add gradients up, and the streams that they belong to.

Such a node belongs to the stream of its first use. While somebody holds a loss of an eager step it
lives on, and a captured backward would pull that stream into the capture, which CUDA refuses for
the default one (``cudaErrorStreamCaptureImplicit``). Data-parallel wrappers hold them for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from moe_graphs.engine.stand_for import stands_for_another
from moe_graphs.errors import CaptureError

_HOLDERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def forget_accumulators(model: nn.Module, more: Iterable[Tensor] = ()) -> None:
    """Lets the next forward make new nodes; a loss that is held keeps its own.

    more: that gradients are accumulated for besides the parameters of the model.

    Assigning data of another dtype is what makes autograd forget them. Nothing else changes. Does
    nothing within a wrapper whose hooks hang on these nodes.
    """
    if _holder(model) is not None:
        return
    for parameter in chain(model.parameters(), more):
        if parameter.requires_grad:
            data = parameter.data
            other = torch.float32 if data.dtype is torch.float64 else torch.float64
            parameter.data = _empty_like(data, other)
            parameter.data = data


def _empty_like(data: Tensor, dtype: torch.dtype) -> Tensor:
    if stands_for_another(data):  # a DTensor
        part = torch.empty(0, *data.shape[1:], dtype=dtype, device=data.device)
        kind: Any = type(data)
        return kind.from_local(part, data.device_mesh, data.placements, run_check=False)
    return torch.empty(0, dtype=dtype, device=data.device)


class Accumulators:
    """Hooks on the nodes of some parameters. The nodes are not kept: ``swap_tensors`` would mind.

    One that lives holds its parameter, whose references are counted: without more of them than
    before nothing can hang on a node.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._counts = [1] * len(self._parameters)
        self._hooks: list[list[dict]] = [[] for _ in self._parameters]

    def hooked(self) -> bool:
        counts = list(map(Tensor._use_count, self._parameters))
        if counts != self._counts:
            both = zip(counts, self._counts, strict=True)
            for index in [i for i, (now, before) in enumerate(both) if now != before]:
                self._hooks[index] = _hooks_of(self._parameters[index]) if counts[index] > 1 else []
            self._counts = counts
        return any(map(any, self._hooks))


def _hooks_of(parameter: Tensor) -> list[dict]:
    """torch shows them to nobody, but whoever adds one gets at the dictionary."""
    node = get_gradient_edge(parameter).node
    return [_dictionary_of(add(_nothing)) for add in (node.register_prehook, node.register_hook)]


def _nothing(*gradients: Any) -> None: ...


def _dictionary_of(handle: RemovableHandle) -> dict:
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def check_hooks(model: nn.Module) -> None:
    """
    Raises:
        CaptureError: if hooks would be lost with the nodes that they hang on.
    """
    if _holder(model) is None and Accumulators(model.parameters()).hooked():
        raise CaptureError(
            "gradient accumulators have hooks, which a captured step does not run: register them "
            "on the parameters (register_hook, register_post_accumulate_grad_hook)"
        )


def check_streams(model: nn.Module, stale: list[str]) -> None:
    """``stale``: parameters whose gradients are not added up on the stream of the capture.

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
    """The name of a wrapper (torch's or another's) whose hooks hang on accumulators."""
    kinds = (type(module).__name__ for module in model.modules())
    return next((kind for kind in kinds if kind in _HOLDERS), None)
