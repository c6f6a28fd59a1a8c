"""The experts that a model chooses: recorded, used again in another pass, and counted.

Reinforcement learning trains on the experts that the rollout, or the old policy's forward, has
chosen (routing replay, router replay, R2 and R3)::

    with torch.no_grad(), routing.record(model) as choices:
        old = model(tokens)
    with routing.replay(model, choices):
        new = model(tokens)
    new.loss.backward()

The weights of the given experts are computed anew, so gradients flow to the router; losses of the
router count the given experts.

Which experts work is seen by a watch::

    watch = routing.watch(model)  # before graphs are captured
    train()
    print(watch.report())

Shapes: L layers with experts, T tokens of a call, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.engine.side_outputs import Deferred, are_noted
from moe_graphs.errors import CheckError
from moe_graphs.layers.expert_load import ExpertLoad
from moe_graphs.layers.moe import MoEStages
from moe_graphs.layers.topk_routers import pass_through, router_of
from moe_graphs.staged import carried_block, recomputed_within

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
    with _Block(model, seats, "record", [None] * len(seats)) as block:
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
    with _Block(model, seats, "replay", _checked(seats, choices)):
        yield


def watch(model: nn.Module) -> Watch:
    """Count the pairs that each expert of a model gets, from now until ``close()``.

    Call it before graphs are captured: a graph that does not count does not serve a model that is
    watched. The counters are on the device, and nothing waits for it before somebody reads them.

    Raises:
        ValueError: the model has no layers whose choice is known, or it is watched already.
    """
    seats = _seats(model)
    if any(seat.read(_WATCHED)["expert_load"] is not None for seat in seats):
        raise ValueError("routing.watch: the model is watched already: close() the first watch")
    return Watch(seats)


@dataclass(frozen=True)
class LayerLoad:
    """The load of the experts of one layer since the last reset.

    Attributes:
        name: the name of the layer.
        pairs: pairs of tokens and experts, by expert.
        aux_loss: the router's losses in the last forward, coefficients applied. None for layers of
            other libraries, whose losses the model makes.
    """

    name: str
    pairs: tuple[int, ...]
    aux_loss: float | None

    @property
    def max_over_mean(self) -> float:
        """The largest number of pairs over the mean; 1 is balanced, 0 means no tokens."""
        return max(self.pairs) * len(self.pairs) / max(1, sum(self.pairs))

    @property
    def unused(self) -> int:
        """The number of experts that no token has chosen."""
        return self.pairs.count(0)


@dataclass(frozen=True)
class LoadReport:
    """The load of the experts of all layers; ``print`` shows a row for each layer."""

    layers: tuple[LayerLoad, ...]

    def scalars(self) -> dict[str, float]:
        """Numbers for a log, over all layers.

        ``experts/max_over_mean`` is that of the worst layer, ``experts/unused`` and
        ``experts/aux_loss`` are sums; the last one is there if some layers have such losses.
        """
        found = {
            "experts/max_over_mean": max(layer.max_over_mean for layer in self.layers),
            "experts/unused": float(sum(layer.unused for layer in self.layers)),
        }
        losses = [layer.aux_loss for layer in self.layers if layer.aux_loss is not None]
        return {**found, "experts/aux_loss": sum(losses)} if losses else found

    @classmethod
    def of_ranks(cls, reports: Sequence[LoadReport]) -> LoadReport:
        """The load of all ranks together: sums of pairs, and means of losses, by layer."""
        found: dict[str, list[LayerLoad]] = {}
        for layer in itertools.chain.from_iterable(report.layers for report in reports):
            found.setdefault(layer.name, []).append(layer)
        return cls(tuple(_together(layers) for layers in found.values()))

    def write(self, writer: Any, step: int) -> None:
        """Write ``scalars()``, and both loads of each layer, to a ``SummaryWriter``."""
        for name, value in self.scalars().items():
            writer.add_scalar(name, value, step)
        for layer in self.layers:
            writer.add_scalar(f"experts/max_over_mean/{layer.name}", layer.max_over_mean, step)
            writer.add_scalar(f"experts/unused/{layer.name}", layer.unused, step)

    def __str__(self) -> str:
        width = max(len("layer"), *(len(layer.name) for layer in self.layers))
        lines = [f"{'layer':{width}}  max/mean  unused    aux loss  most chosen"]
        for layer in self.layers:
            best = sorted(range(len(layer.pairs)), key=lambda e: -layer.pairs[e])[:4]
            loss = "-" if layer.aux_loss is None else f"{layer.aux_loss:.5f}"
            lines.append(
                f"{layer.name:{width}}  {layer.max_over_mean:8.2f}  {layer.unused:6d}  {loss:>10}"
                f"  {' '.join(map(str, best))}"
            )
        return "\n".join(lines)


def _together(layers: Sequence[LayerLoad]) -> LayerLoad:
    pairs = tuple(map(sum, zip(*(layer.pairs for layer in layers), strict=True)))
    losses = [layer.aux_loss for layer in layers if layer.aux_loss is not None]
    return LayerLoad(layers[0].name, pairs, sum(losses) / len(losses) if losses else None)


class Watch:
    """Counters of a model, as ``watch`` makes them.

    Attributes:
        loads: the counters on the device, by the name of the layer.
    """

    def __init__(self, seats: Sequence[_Seat]) -> None:
        self._seats, self.loads = seats, dict[str, ExpertLoad]()
        self._before = [seat.read(_WATCHED) for seat in seats]
        for seat in seats:
            place = next(seat.module.parameters()).device
            load = ExpertLoad(seat.num_experts, seat.has_aux_loss, place)
            self.loads[seat.name] = load
            state = {"expert_load": load}
            seat.write(state if seat.forward is None else {**state, "forward": seat.forward})

    def report(self) -> LoadReport:
        """Read what the experts got since the last reset. Waits for the device."""
        layers = []
        for name, load in self.loads.items():
            aux_loss = load.aux_loss.item() if load.has_aux_loss else None
            layers.append(LayerLoad(name, tuple(load.pairs_E.tolist()), aux_loss))
        return LoadReport(tuple(layers))

    def reset(self) -> None:
        """Zero the counters, without waiting for the device."""
        for load in self.loads.values():
            load.zero()

    def close(self) -> None:
        """End the counting; the model is as it was before."""
        for seat, before in zip(self._seats, self._before, strict=True):
            seat.write(before)


# ---- the block


_STATE = ("routing_pass", "experts_TK", "forward")
_WATCHED = ("expert_load", "forward")


@dataclass(frozen=True)
class _Seat:
    """A place of a model where experts are chosen.

    Attributes:
        name: the name of the layer with experts.
        module: the module whose attributes ``routing_pass`` and ``experts_TK`` say what its
            forward does: a layer of ours, or a router of another library.
        top_k: K, None if the module does not say.
        has_aux_loss: whether the module makes losses of its own.
        forward: the forward that a router of another library has in a block or while it is watched.
    """

    name: str
    module: Any
    num_experts: int
    top_k: int | None
    has_aux_loss: bool = False
    forward: Any = None

    def read(self, names: Sequence[str] = _STATE) -> dict[str, Any]:
        return {name: vars(self.module).get(name) for name in names}

    def write(self, state: dict[str, Any]) -> None:
        attributes = vars(self.module)
        for name, value in state.items():
            if value is None:
                attributes.pop(name, None)
            else:
                attributes[name] = value


class _Block:
    """The state of all seats within one block; a recomputation enters it again."""

    def __init__(
        self, model: nn.Module, seats: Sequence[_Seat], kind: str, given: Sequence[Tensor | None]
    ) -> None:
        self._model, self._seats, self._kind, self._given = model, seats, kind, given
        if any(seat.read()["routing_pass"] is not None for seat in seats):
            raise ValueError("routing: a block of record or replay is open for this model already")

    def __enter__(self) -> _Block:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.entered())
        self._stack.enter_context(carried_block(self.entered))
        self._stack.enter_context(_carried_by_checkpoints(self._model))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        before = [seat.read() for seat in self._seats]
        try:
            for seat, given in zip(self._seats, self._given, strict=True):
                state = {"routing_pass": self._kind, "experts_TK": given}
                seat.write(state if seat.forward is None else {**state, "forward": seat.forward})
            yield
        finally:
            for seat, state in zip(self._seats, before, strict=True):
                seat.write(state)

    def choices(self) -> list[Tensor]:
        found = [seat.read()["experts_TK"] for seat in self._seats]
        missing = [seat.name for seat, each in zip(self._seats, found, strict=True) if each is None]
        if missing:
            raise ValueError(
                f"routing.record: layer {missing[0]!r} was not called in the block "
                f"({len(missing)} of {len(self._seats)} layers)"
            )
        return found


_CHECKPOINT = "_gradient_checkpointing_func"  # of transformers' modules


class _Carried(functools.partial):  # type: ignore[type-arg]
    """A checkpoint function whose recomputation enters again the blocks that are open now."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return super().__call__(recomputed_within(function), *args)


@contextlib.contextmanager
def _carried_by_checkpoints(model: nn.Module) -> Iterator[None]:
    """Lets gradient checkpointing of transformers recompute with the choices of the forward."""
    replaced = []
    for module in model.modules():
        found = vars(module).get(_CHECKPOINT)
        if type(found) is functools.partial:
            carried = _Carried(found.func, *found.args, **found.keywords)
            setattr(module, _CHECKPOINT, carried)
            replaced.append((module, carried, found))
    try:
        yield
    finally:
        for module, carried, found in replaced:
            if vars(module).get(_CHECKPOINT) is carried:
                setattr(module, _CHECKPOINT, found)


def _seats(model: nn.Module) -> list[_Seat]:
    """The layers of a model that choose experts, in the order of its modules."""
    found: list[_Seat] = []
    for name, module in model.named_modules():
        if isinstance(module, MoEStages):
            config = module.config
            losses = bool(config.aux_loss_coef or config.z_loss_coef)
            found.append(_Seat(name, module, config.num_experts, config.top_k, losses))
        elif isinstance(getattr(module, "experts", None), nn.Module):
            router = router_of(module)
            if router is not None:
                found.append(_seat_of_other(name, module.experts, router))
    if not found:
        raise ValueError("routing: the model has no layers with experts whose choice is known")
    return found


def _seat_of_other(name: str, experts: Any, router: nn.Module) -> _Seat:
    count = getattr(experts, "num_experts", None)
    count = len(experts) if count is None else count
    forward = pass_through(router, count)
    return _Seat(name, router, count, getattr(router, "top_k", None), forward=forward)


# ---- choices that are given


def _checked(seats: Sequence[_Seat], choices: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The choices as int64 ``[T, K]`` within the range of the experts."""
    if len(choices) != len(seats):
        raise ValueError(
            f"routing.replay: choices of {len(choices)} layers for a model with {len(seats)} "
            f"layers with experts"
        )
    first, found = choices[0], list[Tensor]()
    for seat, given_TK in zip(seats, choices, strict=True):
        name, place = seat.name, next(seat.module.parameters()).device
        top_k = given_TK.shape[-1] if seat.top_k is None else seat.top_k
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


# Outcomes of checks of numbers on a GPU, which nobody has read yet.
_OUTCOMES = Deferred(
    lambda where, _: CheckError(
        f"{where}. This is read late, so that nothing waits for the device: look at the choices of "
        f"the blocks before this one"
    )
)


@torch.no_grad()
def _in_range(seats: Sequence[_Seat], choices: list[Tensor]) -> list[Tensor]:
    """The choices, each number clamped to the range of the experts, and an error for others."""
    pairs = zip(seats, choices, strict=True)
    safe_LTK = torch.stack([c.clamp(0, seat.num_experts - 1) for seat, c in pairs])
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
