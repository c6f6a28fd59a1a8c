"""Minimiser: makes a failing program smaller while it fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from programs.running import Verdict, judge
from programs.specification import BlockSpec, BodySpec, Program

_PLAINER = {
    "microbatches": 1,
    "order": "accumulate",
    "zero": "none",
    "optimizer": "sgd",
    "optimizer_inside": False,
    "input_grad": False,
    "declares_generator": False,
    "on_mismatch": "eager",
}


def minimised(verdict: Verdict, budget: int = 60) -> Verdict:
    """Verdict of the smallest program that fails in the same way, found in ``budget`` runs."""
    best, is_smaller = verdict, True
    while is_smaller and budget > 0:
        is_smaller = False
        for candidate in _smaller(best.program):
            budget -= 1
            if budget < 0:
                break
            try:
                found = judge(candidate)
            except Exception:  # no program any more: an event has lost its object
                continue
            if found.outcome == verdict.outcome:
                best, is_smaller = found, True
                break
    return best


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one thing less; the largest differences come first."""
    blocks = program.blocks
    if len(blocks) > 1:
        for index in range(len(blocks)):
            yield replace(program, blocks=blocks[:index] + blocks[index + 1 :])
    for index in range(len(program.events)):
        yield program.without_event(index)
    for name, plain in _PLAINER.items():
        if getattr(program, name) != plain:
            yield replace(program, **{name: plain})
    for index, block in enumerate(blocks):
        for smaller in _smaller_blocks(block):
            yield replace(program, blocks=(*blocks[:index], smaller, *blocks[index + 1 :]))
    if program.steps > 3 and all(event.step < program.steps - 1 for event in program.events):
        yield replace(program, steps=program.steps - 1)


def _smaller_blocks(block: BlockSpec) -> Iterator[BlockSpec]:
    for name, plain in (("wiring", "chain"), ("interface", "block"), ("scope", "block")):
        if getattr(block, name) != plain and block.scope != "none":
            yield replace(block, **{name: plain})
    for smaller in _smaller_bodies(block.body):
        yield replace(block, body=smaller)


def _smaller_bodies(body: BodySpec) -> Iterator[BodySpec]:
    yield from body.parts
    if body.kind != "plain":
        yield BodySpec("plain")
    for index, part in enumerate(body.parts):
        for smaller in _smaller_bodies(part):
            yield replace(body, parts=(*body.parts[:index], smaller, *body.parts[index + 1 :]))
