"""Programs with mutable state: a table that takes every kind once, and random ones by seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from programs.known_silent import KNOWN
from programs.mutable_sources import (
    PLACES,
    PLAIN_PLACE,
    PLAIN_READER,
    PLAIN_SPELLING,
    READERS,
    SPELLINGS,
    Piece,
)
from programs.mutable_states import STATES
from programs.mutating import MutableProgram, Outcome, label
from programs.specification import ENGINES

# States that stand for all others where a spelling, a reader or a place is tried.
_OF_SPELLINGS = ("attribute of an object", "dict", "dataclass")
_OF_READERS = ("attribute of an object", "closure over a list")
_OF_PLACES = (
    "attribute of an object",
    "global",
    "class attribute",
    "class registry",
    "closure",
    "counter of a class",
)
LETTERS = {"scopes": "s", "callables": "c", "step": "f"}


def table() -> Iterator[MutableProgram]:
    """Yield every state, then every spelling, reader and place with few states."""
    pieces = [(Piece(state), PLAIN_PLACE) for state in STATES]
    pieces += [
        (Piece(state, reader="step"), PLAIN_PLACE) for state in STATES if "the step" in state
    ]
    pieces += [(Piece("attribute named step", reader="model"), PLAIN_PLACE)]
    pieces += [
        (Piece(s, spelling), PLAIN_PLACE) for s in _OF_SPELLINGS for spelling in SPELLINGS[1:]
    ]
    pieces += [
        (Piece(s, PLAIN_SPELLING, reader), PLAIN_PLACE)
        for s in _OF_READERS
        for reader in READERS
        if reader != PLAIN_READER
    ]
    pieces += [(Piece(s), place) for s in _OF_PLACES for place in PLACES[1:]]
    for piece, place in pieces:
        is_repeated = piece.state == "dataclass" and piece.spelling != PLAIN_SPELLING
        if piece.is_possible and not (is_repeated and "asdict" not in piece.spelling):
            yield MutableProgram((piece,), place)


def generate(seed: int) -> MutableProgram:
    """The program of a seed; half of its pieces are plain, so that a failure is clear."""
    draw = random.Random(seed)
    place = PLAIN_PLACE if draw.random() < 0.5 else draw.choice(PLACES[1:])
    pieces = tuple(_piece(draw, place) for _ in range(draw.choice((1, 1, 2, 3))))
    return MutableProgram(pieces, place, ENGINES[seed % len(ENGINES)])


def _piece(draw: random.Random, place: str) -> Piece:
    while True:
        state = draw.choice(list(STATES))
        reader = PLAIN_READER if draw.random() < 0.7 else draw.choice(list(READERS))
        reader = "step" if "the step" in state else reader
        spellings = [each for each in SPELLINGS[1:] if Piece(state, each, reader).is_possible]
        is_plain = draw.random() < 0.5 or not spellings
        piece = Piece(state, PLAIN_SPELLING if is_plain else draw.choice(spellings), reader)
        if piece.is_possible and piece.fits(place):
            return piece


def known_of(program: MutableProgram, engine: str) -> set[str]:
    """Names of what is known to be silent in a program of the table."""
    own = label(program.pieces[0], program.place)
    letter = LETTERS[engine]
    return {
        name
        for name, engines in KNOWN.items()
        if name.partition(": ")[0] == own and letter in engines
    }


def is_known(outcome: Outcome) -> bool:
    """Whether a cause in the table of known silent differences explains an outcome.

    A cause is the mutation of the state, or what is not plain about the piece.
    """
    piece, place = outcome.piece, outcome.program.place
    plain = f"{piece.state}: {outcome.name.partition(': ')[2]}"
    odd = {piece.spelling, piece.reader, place} - {PLAIN_SPELLING, PLAIN_READER, PLAIN_PLACE}
    letter = LETTERS[outcome.program.engine]
    return any(
        name == plain or odd & set(name.partition(": ")[0].split(" | ")[1:])
        for name, engines in KNOWN.items()
        if letter in engines
    )
