"""Generator of random programs from seeds."""

from __future__ import annotations

import random
from dataclasses import replace

from programs import bodies_python, events
from programs.blocks import INTERFACES, WIRINGS
from programs.bodies import BODIES, CONTAINERS
from programs.specification import BlockSpec, BodySpec, Event, Program

OWN_SCOPES = ("attn", "mlp", "attn,mlp", "attn,moe", "attn,moe_router", "full",
              "attn,moe_router,moe_preprocess", "moe,mlp", "moe_router,moe_preprocess")  # fmt: skip
STEPS = 7
assert "draws_numpy" in BODIES, bodies_python
_SIMPLE = sorted(set(BODIES) - set(CONTAINERS))
_ORDERS = ("accumulate", "accumulate", "accumulate", "all_then_all", "last_first", "interleaved",
           "summed", "forward_left_alone", "fed_back")  # fmt: skip
_OPTIMIZERS = ("sgd", "momentum", "adamw", "foreach", "rmsprop")


def generate(seed: int) -> Program:
    """Make the program of a seed; most programs have few odd things, so that a failure is clear."""
    draw = random.Random(seed)
    engine = draw.choices(("scopes", "callables", "step"), (6, 2, 3))[0]
    own_layers = draw.choice(OWN_SCOPES) if engine != "callables" and draw.random() < 0.06 else ""
    order = draw.choice(_ORDERS)
    inside = engine == "step" and draw.random() < 0.5
    program = Program(
        seed,
        engine,
        () if own_layers else _blocks(draw),
        own_layers if engine == "scopes" else "full" if own_layers else "",
        microbatches=1 if draw.random() < 0.5 and order == "accumulate" else draw.choice((2, 3)),
        order=order,
        optimizer=draw.choice(("sgd", "momentum", "fused") if inside else _OPTIMIZERS),
        optimizer_inside=inside,
        zero=draw.choice(("none", "none", "none", "zeros", "never")),
        steps=STEPS,
        events=_events(draw, engine),
        on_mismatch=draw.choice(_ON_MISMATCH[engine]),
        input_grad=engine != "step" and draw.random() < 0.15,
        declares_generator=draw.random() < 0.5,
    )
    return replace(program, input_grad=False) if own_layers else program


_ON_MISMATCH = {
    "scopes": ("eager", "eager", "eager", "error"),
    "callables": ("eager", "eager", "eager", "error"),
    "step": ("eager", "error", "recapture"),
}


def _blocks(draw: random.Random) -> tuple[BlockSpec, ...]:
    found = [_block(draw) for _ in range(draw.choice((1, 2, 2, 3)))]
    if len(found) > 2 and draw.random() < 0.4:
        found[-1] = found[0]
    if all(block.scope == "none" for block in found):
        found[0] = replace(found[0], scope="block")
    return tuple(found)


def _block(draw: random.Random) -> BlockSpec:
    return BlockSpec(
        _body(draw),
        draw.choice(sorted(INTERFACES)) if draw.random() < 0.5 else "block",
        draw.choice(sorted(WIRINGS)) if draw.random() < 0.5 else "chain",
        draw.choices(("block", "part", "none"), (6, 2, 1))[0],
    )


def _body(draw: random.Random, depth: int = 0) -> BodySpec:
    chance = draw.random()
    if chance < 0.25:
        return BodySpec("plain")
    if chance < 0.45 and depth < 2:
        kind = draw.choice(CONTAINERS)
        count = 2 if kind == "sequence" else 1
        return BodySpec(kind, tuple(_body(draw, depth + 1) for _ in range(count)))
    return BodySpec(draw.choice(_SIMPLE))


def _events(draw: random.Random, engine: str) -> tuple[Event, ...]:
    """Draw events, most of them after the third step, which captures."""
    kinds = [sorted(table) for table in (events.BEFORE, events.PLANS, events.WITHIN)]
    found = []
    for _ in range(draw.choice((0, 1, 1, 2, 3, 4))):
        table = draw.choices(kinds, (5, 4, 2))[0]
        step = draw.choice((0, 1, 2, 3, 3, 4, 4, 4, 5))
        found.append(Event(step, draw.choice(table), draw.randrange(10_000)))
    return tuple(sorted(found, key=lambda event: event.step))
