"""Programs as values: they can be printed, compared, made smaller and run again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

ENGINES = ("scopes", "callables", "step")


@dataclass(frozen=True)
class BodySpec:
    """Specification of a body in ``bodies.BODIES``; containers have parts."""

    kind: str
    parts: tuple[BodySpec, ...] = ()

    def kinds(self) -> Iterator[str]:
        yield self.kind
        for part in self.parts:
            yield from part.kinds()


@dataclass(frozen=True)
class BlockSpec:
    """Specification of a block; ``scope`` is "block", its "part" (the body), or "none"."""

    body: BodySpec = BodySpec("plain")
    interface: str = "block"
    wiring: str = "chain"
    scope: str = "block"


@dataclass(frozen=True)
class Event:
    """Specification of an event in ``step``; the event chooses by the number ``pick``."""

    step: int
    kind: str
    pick: int


@dataclass(frozen=True)
class Program:
    """A training script.

    engine: the way of capturing: "scopes" (``graph``), "callables", "step" (``FullIteration``).
    own_layers: names of scopes if the model is the package's language model.
    order: the order of the microbatches' forwards and backwards.
    steps: optimizer steps, of which two are warm-up.
    zero: what ``zero_grad`` does: "none", "zeros", or "never" (gradients add up for ever).
    optimizer_inside: whether the update is part of the step function (engine "step").
    declares_generator: whether the engine is told of the generator that some bodies draw from.
    """

    seed: int
    engine: str = "scopes"
    blocks: tuple[BlockSpec, ...] = (BlockSpec(),)
    own_layers: str = ""
    microbatches: int = 1
    order: str = "accumulate"
    optimizer: str = "sgd"
    optimizer_inside: bool = False
    zero: str = "none"
    steps: int = 7
    events: tuple[Event, ...] = ()
    on_mismatch: str = "eager"
    input_grad: bool = False
    declares_generator: bool = False

    def features(self) -> list[str]:
        """The fields that differ from the plainest program, for a table."""
        found = [self.own_layers] if self.own_layers else []
        for block in self.blocks:
            found += [kind for kind in block.body.kinds() if kind != "plain"]
            found += [block.interface] if block.interface != "block" else []
            found += [f"~{block.wiring}"] if block.wiring != "chain" else []
            found += [f"scope={block.scope}"] if block.scope != "block" else []
        plain = Program(0)
        for field in ("order", "optimizer", "optimizer_inside", "zero", "on_mismatch"):
            value = getattr(self, field)
            found += [f"{field}={value}"] if value != getattr(plain, field) else []
        found += ["input_grad"] if self.input_grad else []
        found += ["generator declared"] if self.declares_generator else []
        found += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        return found + [f"!{event.kind}" for event in self.events]

    def without_event(self, index: int) -> Program:
        return replace(self, events=self.events[:index] + self.events[index + 1 :])
