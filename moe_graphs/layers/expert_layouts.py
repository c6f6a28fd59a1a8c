"""Conversion of a user's experts into the layout of ``MoELayer`` and back.

Three layouts are known: a ``ModuleList`` of SwiGLU networks (``gate_proj``, ``up_proj``,
``down_proj``, or Mixtral's ``w1``, ``w3``, ``w2``, or one ``gate_up_proj``), one module with all
experts' weights stacked (``gate_up_proj``, ``down_proj``, as in transformers 5), and the same
stacked weights in a dictionary.

Shapes: D model, F ffn, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Names of the projections gate, up and down, or gate-up and down. The first row that fits is taken.
NAMES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate", "up", "down"),
    ("w_gate", "w_up", "w_down"),
    ("gate_up_proj", "down_proj"),
    ("gate_up", "down"),
)
Experts = nn.Module | Mapping[str, Tensor]


@dataclass(frozen=True)
class ExpertLayout:
    """The weights of all experts where their owner has them.

    Attributes:
        weights: for each expert the weights of its projections, gate, up and down or gate-up and
            down: ``[out, in]`` or, if ``transposed``, ``[in, out]``. The weights are views of the
            owner's memory.
        transposed: whether a weight's first dimension is its input dimension.
    """

    weights: tuple[tuple[Tensor, ...], ...]
    transposed: bool

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Copy the weights to our layout: ``w1 [E, D, 2F]`` (gate, up) and ``w2 [E, F, D]``."""
        rows = [[w if self.transposed else w.T for w in expert] for expert in self.weights]
        w1_ED2F = torch.stack([torch.cat(expert[:-1], dim=1) for expert in rows])
        return w1_ED2F, torch.stack([expert[-1] for expert in rows])

    @torch.no_grad()
    def load(self, w1_ED2F: Tensor, w2_EFD: Tensor) -> None:
        """Copy weights of our layout into the owner's memory."""
        for expert, w1_D2F, w2_FD in zip(self.weights, w1_ED2F, w2_EFD, strict=True):
            sources = (*w1_D2F.chunk(len(expert) - 1, dim=1), w2_FD)
            for weight, source in zip(expert, sources, strict=True):
                weight.copy_(source if self.transposed else source.T)


def layout_of(
    experts: Experts, num_experts: int, hidden_size: int, names: Sequence[str] | None = None
) -> ExpertLayout:
    """Find the weights of ``experts``.

    Args:
        experts: see the top of this file.
        names: the attributes (or keys) that hold gate, up and down, or gate-up and down; needed
            if they are not in ``NAMES``.

    Raises:
        ValueError: a weight is missing, has a bias or another shape, or an expert of a
            ``ModuleList`` computes something else than ``down(silu(gate(x)) * up(x))``.
    """
    if isinstance(experts, nn.ModuleList):
        found = tuple(_projections(each, names, f"expert {i}") for i, each in enumerate(experts))
        layout = ExpertLayout(found, transposed=False)
        _check_shapes(layout, num_experts, hidden_size)
        for index, each in enumerate(experts):
            _check_computes_swiglu(each, found[index], index)
        return layout
    stacks = _projections(experts, names, "the experts")
    if {weight.dim() for weight in stacks} != {3}:
        shapes = [list(weight.shape) for weight in stacks]
        raise ValueError(
            f"from_experts: stacked weights have shapes [experts, out, in], got {shapes}; give a "
            f"ModuleList of experts or weights with one row of experts"
        )
    down = stacks[-1]
    if down.shape[1] == down.shape[2]:
        raise ValueError(
            f"from_experts: the down-projection is {list(down.shape)}, so its shape does not say "
            f"which dimension is the hidden one; build MoELayer and call "
            f"layer.experts.load_stacked_weights(w1 [E, D, 2F], w2 [E, F, D])"
        )
    layout = ExpertLayout(tuple(zip(*stacks, strict=True)), transposed=down.shape[2] == hidden_size)
    _check_shapes(layout, num_experts, hidden_size)
    return layout


def router_weight(router: nn.Module | Tensor) -> Tensor:
    """Weight ``[E, D]`` of a router that is a linear layer without bias, or the weight itself.

    Raises:
        ValueError: the router has a bias, or no such weight.
    """
    if getattr(router, "bias", None) is not None:
        raise ValueError("from_experts: the router has a bias, which MoELayer does not compute")
    weight = router if isinstance(router, Tensor) else getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(
            f"from_experts: the router ({type(router).__name__}) has no weight of shape "
            f"[num_experts, hidden_size]"
        )
    return weight


def _projections(owner: Experts, names: Sequence[str] | None, what: str) -> tuple[Tensor, ...]:
    """Weights of gate, up and down (or gate-up and down) by the first names that fit."""
    for candidate in [names] if names is not None else NAMES:
        found = [_member(owner, name) for name in candidate]
        if all(each is not None for each in found):
            return tuple(
                _weight(each, f"{what}'s {name}")
                for name, each in zip(candidate, found, strict=True)
            )
    has = [*owner] if isinstance(owner, Mapping) else _member_names(owner)
    raise ValueError(
        f"from_experts: {what} ({type(owner).__name__}) has {', '.join(has) or 'no weights'}; "
        f"looked for {' or '.join('/'.join(each) for each in ([names] if names else NAMES))}. "
        f"Name yours: names=('gate', 'up', 'down') or names=('gate_up', 'down'). Experts that "
        f"compute something else than down(silu(gate(x)) * up(x)) cannot be converted"
    )


def _member(owner: Experts, name: str) -> Any:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _member_names(owner: nn.Module) -> list[str]:
    children = [name for name, _ in owner.named_children()]
    return children + [name for name, _ in owner.named_parameters(recurse=False)]


def _weight(member: Any, what: str) -> Tensor:
    """Weight of a projection, which is a tensor or a module with a weight and no bias."""
    if isinstance(member, nn.Module):
        if getattr(member, "bias", None) is not None:
            raise ValueError(f"from_experts: {what} has a bias, which MoELayer does not compute")
        member = getattr(member, "weight", None)
    if not isinstance(member, Tensor) or not member.is_floating_point():
        raise ValueError(f"from_experts: {what} has no weight of floating-point numbers")
    return member.detach()


def _check_shapes(layout: ExpertLayout, num_experts: int, hidden_size: int) -> None:
    if len(layout.weights) != num_experts:
        raise ValueError(
            f"from_experts: {len(layout.weights)} experts, but the router scores {num_experts}"
        )
    ffn = layout.weights[0][-1].shape[0 if layout.transposed else 1]
    gates = len(layout.weights[0]) - 1
    shapes = [(2 * ffn // gates, hidden_size)] * gates + [(hidden_size, ffn)]
    expected = [shape[::-1] if layout.transposed else shape for shape in shapes]
    for index, expert in enumerate(layout.weights):
        got = [tuple(weight.shape) for weight in expert]
        if got != expected:
            raise ValueError(
                f"from_experts: expert {index} has weights of shapes {got}, expected {expected} "
                f"for hidden size {hidden_size} and ffn size {ffn}"
            )


@torch.no_grad()
def _check_computes_swiglu(expert: nn.Module, weights: tuple[Tensor, ...], index: int) -> None:
    """Run the expert on four random tokens and compare it with a SwiGLU of its weights."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(4, weights[0].shape[1], generator=generator)
    hidden = sample.to(weights[0].device, weights[0].dtype)
    gate, up = functional.linear(hidden, torch.cat(weights[:-1])).chunk(2, dim=-1)
    expected = functional.linear(functional.silu(gate) * up, weights[-1])
    was_training = expert.training
    try:
        output = expert.eval()(hidden)
    except Exception as error:
        raise ValueError(
            f"from_experts: expert {index} ({type(expert).__name__}) could not be called with a "
            f"[4, {hidden.shape[1]}] tensor: {type(error).__name__}: {error}"
        ) from error
    finally:
        expert.train(was_training)
    tolerance = 8 * torch.finfo(hidden.dtype).eps * expected.abs().max()
    difference = (output - expected).abs().max() if isinstance(output, Tensor) else None
    if difference is None or not difference <= tolerance:
        raise ValueError(
            f"from_experts: expert {index} ({type(expert).__name__}) does not compute "
            f"down(silu(gate(x)) * up(x)): its output differs by "
            f"{'a ' + type(output).__name__ if difference is None else f'{float(difference):.3g}'}"
            f". If gate and up are named the other way round, give names=(gate, up, down)"
        )
