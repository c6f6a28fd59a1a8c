"""The model of a program, from its specification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from programs import blocks, bodies, bodies_python
from programs.specification import BlockSpec, BodySpec, Program

assert "draws_numpy" in bodies.BODIES, bodies_python
VOCABULARY = 11


@dataclass
class Result:
    """Result of a forward: the hidden state, and ``terms`` for the loss."""

    hidden: torch.Tensor
    terms: list[torch.Tensor] = field(default_factory=list)


class Trunk(nn.Module):
    """Blocks ``b0``, ``b1``, ... behind an eager stem. ``wirings`` says what stands around each."""

    def __init__(self, specs: tuple[BlockSpec, ...]) -> None:
        super().__init__()
        self.stem = nn.Linear(bodies.WIDTH, bodies.WIDTH)
        self.wirings = tuple(spec.wiring for spec in specs)
        for number, spec in enumerate(specs):
            self.add_module(f"b{number}", _block(spec))
        self.has_shared = len(specs) > 2 and specs[0] == specs[-1]
        if self.has_shared:  # the last block is the first one again
            setattr(self, f"b{len(specs) - 1}", self.b0)

    def blocks(self) -> list[nn.Module]:
        return [getattr(self, f"b{number}") for number in range(len(self.wirings))]

    def forward(self, x: torch.Tensor) -> Result:
        h, terms = self.stem(x), []
        for wiring, block in zip(self.wirings, self.blocks(), strict=True):
            h, more = blocks.WIRINGS[wiring](block, h, x)
            terms += more
        for module in self.modules():
            if isinstance(module, bodies_python.SideChannel) and module.aux is not None:
                terms.append(module.aux)
        return Result(h, terms)


class OwnLayers(nn.Module):
    """The language model of the package, for scopes that are lists of names."""

    def __init__(self) -> None:
        super().__init__()
        moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=4, aux_loss_coef=0.01)
        self.lm = LanguageModel(
            TransformerConfig(
                hidden_size=8,
                num_layers=2,
                num_heads=2,
                ffn_hidden_size=8,
                vocab_size=VOCABULARY,
                max_sequence_length=8,
                hidden_dropout=0.1,
                moe=moe,
                moe_layers=(False, True),
            )
        )
        self.lm.init_weights(0.1)

    def blocks(self) -> list[nn.Module]:
        return list(self.lm.layers)

    def forward(self, tokens: torch.Tensor) -> Result:
        output = self.lm(tokens[:, :-1])
        logits = output.logits_BSV.flatten(0, 1)
        loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
        return Result(output.logits_BSV, [loss, output.aux_loss])


def build(program: Program) -> nn.Module:
    torch.default_generator.manual_seed(program.seed)
    return OwnLayers() if program.own_layers else Trunk(program.blocks)


def _block(spec: BlockSpec) -> nn.Module:
    return blocks.INTERFACES[spec.interface](_body(spec.body))


def _body(spec: BodySpec) -> nn.Module:
    return bodies.BODIES[spec.kind](*map(_body, spec.parts))


def visible(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of a model's modules besides tensors: numbers, strings, lengths of lists."""
    for name, module in model.named_modules():
        for key, value in sorted(vars(module).items()):
            if type(value) in _PLAIN:
                yield f"{name}.{key}", value
            elif type(value) is list and all(type(each) in _PLAIN for each in value):
                yield f"{name}.{key}", tuple(value)
            elif isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value
        yield f"{name} has", sorted(k for k in vars(module) if k not in MADE_BY_GRAPHS)


_PLAIN = (bool, int, float, str)
MADE_BY_GRAPHS = {"forward", "__getstate__", "reset", "graphs", "backward_weight", "backward_dw"}
