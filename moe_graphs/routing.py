"""The experts that a pass through a model has chosen, used again in another pass.

Reinforcement learning trains on the experts that the rollout, or the old policy's forward, has
chosen (routing replay, router replay, R2 and R3)::

    with torch.no_grad(), routing.record(model) as choices:
        old = model(tokens)
    with routing.replay(model, choices):
        new = model(tokens)
    new.loss.backward()

The weights of the given experts are computed anew, so gradients flow to the router; losses of the
router count the given experts.

Shapes: L layers with experts, T tokens of a call, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.engine.checks import Deferred, are_noted
from moe_graphs.errors import CheckError
from moe_graphs.layers.moe import MoEStages
from moe_graphs.staged import carried_block

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record the experts that calls in the block choose.

    Nothing waits for the device, and graphs hold the choices as outputs. A graph that was captured
    without this block does not serve calls within it; they run eagerly and are counted.

    Returns:
        A list that is filled when the block ends: for each layer with experts, in the order of
        ``model.modules()``, int64 ``[T, K]`` on its device, best first. If the block has several
        calls of the model, the list has the choices of the last one.

    Raises:
        ValueError: the model has no layers whose choice is known, or a block is open already.
    """
    seats, choices = _seats(model), list[Tensor]()
    with _Block(seats, "record", [None] * len(seats)) as block:
        yield choices
        choices += block.choices()


@contextlib.contextmanager
def replay(model: nn.Module, choices: Tensor | Sequence[Tensor]) -> Iterator[None]:
    """Let calls in the block use the experts of ``choices``, forward and backward.

    The choices are inputs of graphs, which hold no other Python for them. The backward may run
    after the block. If you call torch's checkpoint yourself and the backward runs after the block,
    give ``staged.recomputed_within(function)`` to checkpoint in place of the function; otherwise
    checkpoint raises an error (``use_reentrant=False``).

    Args:
        choices: what ``record`` gives, or integers of another source: for each layer with experts
            ``[T, K]``, experts of a token distinct, on the layer's device; or all of them in one
            tensor ``[L, T, K]``. Tokens of padding need experts, too: any that are distinct.

    Raises:
        ValueError: another number of layers, another shape or dtype, another device, or an
            expert that is out of range or given twice.
        CheckError: the same about numbers on a GPU. They are read when a later block begins, so
            that nothing waits for the device.
    """
    seats = _seats(model)
    with _Block(seats, "replay", _checked(seats, choices)):
        yield


# ---- the block


class _Block:
    """The state of all seats within one block; a recomputation enters it again."""

    def __init__(self, seats: Sequence[Any], kind: str, given: Sequence[Tensor | None]) -> None:
        self._seats, self._kind, self._given = seats, kind, given
        if any(seat.routing_pass is not None for _, seat in seats):
            raise ValueError("routing: a block of record or replay is open for this model already")

    def __enter__(self) -> _Block:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.entered())
        self._stack.enter_context(carried_block(self.entered))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        before = [(seat.routing_pass, seat.experts_TK) for _, seat in self._seats]
        try:
            for (_, seat), given in zip(self._seats, self._given, strict=True):
                seat.routing_pass, seat.experts_TK = self._kind, given
            yield
        finally:
            for (_, seat), (kind, experts_TK) in zip(self._seats, before, strict=True):
                seat.routing_pass, seat.experts_TK = kind, experts_TK

    def choices(self) -> list[Tensor]:
        missing = [name for name, seat in self._seats if seat.experts_TK is None]
        if missing:
            raise ValueError(
                f"routing.record: layer {missing[0]!r} was not called in the block "
                f"({len(missing)} of {len(self._seats)} layers)"
            )
        return [seat.experts_TK for _, seat in self._seats]


def _seats(model: nn.Module) -> list[tuple[str, MoEStages]]:
    """The layers of a model that choose experts, by name."""
    found = [(n, module) for n, module in model.named_modules() if isinstance(module, MoEStages)]
    if not found:
        raise ValueError("routing: the model has no layers with experts whose choice is known")
    return found


# ---- choices that are given


def _checked(seats: Sequence[Any], choices: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The choices as int64 ``[T, K]`` within the range of the experts."""
    if len(choices) != len(seats):
        raise ValueError(
            f"routing.replay: choices of {len(choices)} layers for a model with {len(seats)} "
            f"layers with experts"
        )
    first, found = choices[0], list[Tensor]()
    for (name, seat), given_TK in zip(seats, choices, strict=True):
        top_k, place = seat.config.top_k, _place_of(seat)
        if given_TK.dtype not in _INTEGERS:
            raise ValueError(
                f"routing.replay: choices of {name!r} are {given_TK.dtype}, no integers"
            )
        if given_TK.dim() != 2 or given_TK.shape[1] != top_k or given_TK.shape != first.shape:
            raise ValueError(
                f"routing.replay: choices of {name!r} are {list(given_TK.shape)}, expected "
                f"[tokens, {top_k}] and as many tokens as in the first layer ({len(first)})"
            )
        if given_TK.device != place:
            raise ValueError(
                f"routing.replay: choices of {name!r} are on {given_TK.device}, the layer is on "
                f"{place}: move them"
            )
        found.append(given_TK.long())
    return _in_range(seats, found)


def _place_of(seat: nn.Module) -> torch.device:
    return next(seat.parameters()).device


# Outcomes of checks of numbers on a GPU, which nobody has read yet.
_OUTCOMES = Deferred(
    lambda where, _: CheckError(
        f"{where}. This is read late, so that nothing waits for the device: look at the choices of "
        f"the blocks before this one"
    )
)


@torch.no_grad()
def _in_range(seats: Sequence[Any], choices: list[Tensor]) -> list[Tensor]:
    """The choices, each number clamped to the range of the experts, and an error for others."""
    pairs = zip(seats, choices, strict=True)
    safe_LTK = torch.stack([c.clamp(0, seat.config.num_experts - 1) for (_, seat), c in pairs])
    outside = torch.stack(choices) != safe_LTK
    sorted_LTK = safe_LTK.sort(-1).values
    twice = (sorted_LTK[..., 1:] == sorted_LTK[..., :-1]).any()
    what = (
        "routing.replay: choices have a negative number, a number above the last expert, or the "
        "same expert twice in one token"
    )
    is_wrong = outside.any() | twice
    if is_wrong.is_cuda and not are_noted():
        _OUTCOMES.add(what, {("", False, 0): is_wrong})
        _OUTCOMES.poll()
    elif is_wrong:
        raise ValueError(what)
    return list(safe_LTK)
