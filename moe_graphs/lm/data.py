"""Text for a language model: found, split by content, packed into fixed lengths.

T tokens of all documents, D documents, B sequences, S sequence length, N windows of a stream.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import random
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

SEPARATOR = b"\x00"
"""Separator before every document and after the last one. Files that contain it are not text."""

_HELD_OUT_PERCENT = 5
_PIECE_BYTES = 16 * 1024
# A larger generated file (pydoc_data/topics.py, 757 KB) would be 70 % of the library's held-out
# bytes.
_LARGEST_BYTES = 512 * 1024


@dataclass(frozen=True)
class Documents:
    """Documents as token ids, in one array.

    Attributes:
        ids_T: every document with the separator behind it, one after the other: uint8, uint16 or
            int32, perhaps in a mapped file.
        offsets: int64 ``[D + 1]``, where in ``ids_T`` each document begins; the last entry is T.
        content_bytes: size of the documents as UTF-8, with one byte for every separator.
        identity: what the documents were made from, by name; it differs for different documents.
        unit: what a token is.
    """

    ids_T: torch.Tensor
    offsets: torch.Tensor
    content_bytes: int
    identity: Mapping[str, str]
    unit: str = "tokens"

    @classmethod
    def of_bytes(cls, documents: Sequence[bytes]) -> Documents:
        """Makes documents whose tokens are bytes."""
        stream = bytearray(concatenate(documents))
        ids_T = torch.frombuffer(stream, dtype=torch.uint8)[1:]
        lengths = torch.tensor([0, *(len(document) + 1 for document in documents)])
        return cls(ids_T, lengths.cumsum(0), len(ids_T), identity(documents), "bytes")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def separator(self) -> int:
        """The token behind every document, which is the first input of the next one."""
        return int(self.ids_T[-1])

    @property
    def bytes_per_token(self) -> float:
        return self.content_bytes / len(self.ids_T)


class Text(Protocol):
    """Documents to train on and held-out documents, and what their tokens mean.

    Attributes:
        skipped: how many documents were left out, by reason.
        held_out_content: the held-out documents as bytes, a separator behind each.
    """

    @property
    def source(self) -> str: ...

    @property
    def skipped(self) -> Mapping[str, int]: ...

    @property
    def train_documents(self) -> Documents: ...

    @property
    def held_out_documents(self) -> Documents: ...

    @property
    def held_out_content(self) -> bytes: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Corpus:
    """The ``Text`` whose tokens are bytes.

    Documents are in the order of their content's hash, so all machines have the same order.
    """

    source: str
    train: tuple[bytes, ...]
    held_out: tuple[bytes, ...]
    skipped: dict[str, int] = field(default_factory=dict)

    @cached_property
    def train_documents(self) -> Documents:
        return Documents.of_bytes(self.train)

    @cached_property
    def held_out_documents(self) -> Documents:
        return Documents.of_bytes(self.held_out)

    @property
    def held_out_content(self) -> bytes:
        return concatenate(self.held_out)[1:]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


def standard_library() -> Corpus:
    """The Python sources of this interpreter's standard library: about 11 MB.

    Installed packages are left out. Tests are left out, because many distributions leave them out,
    and the text is to be the same for one version of Python. Files over 512 KiB, which are
    generated, are left out and counted.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = (
        path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts)
    )
    source = f"the standard library of Python {platform.python_version()}"
    return _corpus(source, *_read(paths, _LARGEST_BYTES))


def corpus_at(path: Path) -> Corpus:
    """All text files below a directory, or one text file cut into pieces of about 16 KiB.

    A file named ``.jsonl`` has one document per line, the "text" of the line's object.

    Raises:
        ValueError: if there is nothing at ``path``, or too little for both sides of the split.
    """
    if path.is_file():
        documents, skipped = _read([path])
        if path.suffix == ".jsonl":
            return _corpus(str(path), documents, skipped)
        pieces = [piece for document in documents for piece in _cut(document)]
        return _corpus(f"{path}, in pieces of {_PIECE_BYTES // 1024} KiB", pieces, skipped)
    if not path.is_dir():
        raise ValueError(f"data: nothing at {path}: give a directory of text files, or one file")
    found = ((p, p.relative_to(path).parts) for p in path.rglob("*"))
    paths = (p for p, parts in found if not any(part.startswith(".") for part in parts))
    return _corpus(str(path), *_read(paths))


def is_held_out(document: bytes) -> bool:
    """Whether a document is held out, which is so for about one in twenty.

    The content alone decides, so a copy of a file is on the same side.
    """
    digest = hashlib.sha256(document).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _HELD_OUT_PERCENT


def concatenate(documents: Iterable[bytes]) -> bytes:
    """Documents as one stream, a separator before each of them and one at the end."""
    return SEPARATOR + b"".join(document + SEPARATOR for document in documents)


def identity(documents: Sequence[bytes]) -> dict[str, str]:
    """Identity of ``Documents``: their number, and the hash of the output of ``concatenate``."""
    digest = hashlib.sha256(SEPARATOR)
    for document in documents:
        digest.update(document + SEPARATOR)
    return {"text": f"{len(documents)} documents, sha256 {digest.hexdigest()[:16]}"}


def _read(paths: Iterable[Path], largest: int | None = None) -> tuple[list[bytes], dict[str, int]]:
    documents: list[bytes] = []
    skipped: dict[str, int] = {}
    for path in filter(Path.is_file, paths):
        for content, reason in _documents_of(path):
            reason = reason or _why_not(content, largest)
            if reason is None:
                documents.append(content)
            else:
                skipped[reason] = skipped.get(reason, 0) + 1
    return documents, skipped


def _documents_of(path: Path) -> Iterator[tuple[bytes, str | None]]:
    """Documents of a file or directory, each with the reason why it cannot be read, or None."""
    try:
        content = path.read_bytes()
    except OSError:
        yield b"", "unreadable"
        return
    if path.suffix != ".jsonl":
        yield content, None
        return
    for line in filter(bytes.strip, content.splitlines()):
        try:
            yield json.loads(line)["text"].encode(), None
        except (ValueError, KeyError, TypeError, AttributeError):
            yield b"", 'line of JSON without a "text"'


def _why_not(content: bytes, largest: int | None) -> str | None:
    if not content:
        return "empty"
    if largest is not None and len(content) > largest:
        return f"over {largest // 1024} KiB"
    if SEPARATOR in content:
        return "contains a zero byte"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _corpus(source: str, documents: list[bytes], skipped: dict[str, int]) -> Corpus:
    unique = sorted(set(documents), key=lambda document: hashlib.sha256(document).digest())
    if len(unique) < len(documents):
        skipped = {**skipped, "duplicate": len(documents) - len(unique)}
    if len(unique) < 2:
        raise ValueError(
            f"data: {source} has {len(unique)} different documents, and one at least is held out: "
            f"give more text (left out: {skipped or 'none'})"
        )
    held_out = tuple(document for document in unique if is_held_out(document))
    train = tuple(document for document in unique if not is_held_out(document))
    if not train or not held_out:  # too few for one in twenty
        held_out, train = tuple(unique[:1]), tuple(unique[1:])
    return Corpus(source, train, held_out, skipped)


def _cut(document: bytes) -> list[bytes]:
    """Pieces of whole lines, each just over the piece size (longer if a line is longer)."""
    pieces, start = [], 0
    while start < len(document):
        newline = document.find(b"\n", start + _PIECE_BYTES)
        end = len(document) if newline < 0 else newline + 1
        pieces.append(document[start:end])
        start = end
    return pieces


class TrainingBatches:
    """Batches of packed windows as a function of the step alone: resuming needs no state.

    In every epoch the documents are shuffled and packed anew, then the windows are shuffled. The
    seed and the epoch's number decide both orders. The rest at the end of an epoch (less than one
    batch, ``left_over`` tokens) is not seen in that epoch.
    """

    def __init__(
        self, documents: Documents, *, sequence_length: int, batch_size: int, seed: int
    ) -> None:
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        self.documents = documents
        tokens = len(documents.ids_T)
        self.batches_per_epoch = tokens // sequence_length // batch_size
        self.left_over = tokens - self.batches_per_epoch * batch_size * sequence_length
        if self.batches_per_epoch == 0:
            raise ValueError(
                f"batch_size: {batch_size} sequences of {sequence_length} {documents.unit} are "
                f"more than the {tokens} {documents.unit} to train on: give more text, or a "
                f"smaller batch"
            )
        self._epoch = -1
        # These are, for the epoch's stream, where each piece begins, in the stream and among the
        # documents' tokens.
        self._places = self._sources = self._starts_N = torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> torch.Tensor:
        """Windows ``[batch_size, S + 1]`` of a step in the documents' dtype, freshly allocated."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._pack(epoch)
        starts_B = self._starts_N[index * self.batch_size : (index + 1) * self.batch_size]
        positions_BS = starts_B[:, None] + torch.arange(self.sequence_length + 1)
        pieces_BS = torch.searchsorted(self._places, positions_BS, right=True) - 1
        sources_BS = self._sources[pieces_BS] + positions_BS - self._places[pieces_BS]
        return self.documents.ids_T[sources_BS]

    def _pack(self, epoch: int) -> None:
        # A string seeds by its hash: no pair (seed, epoch) shares its order with another pair.
        generator = random.Random(f"{self.seed} {epoch}")
        order = list(range(len(self.documents)))
        generator.shuffle(order)
        offsets, order_D = self.documents.offsets, torch.tensor(order)
        lengths = offsets.diff()[order_D]
        # The stream is a separator (the last token of all), then the documents.
        tokens = len(self.documents.ids_T)
        self._sources = torch.cat([torch.tensor([tokens - 1]), offsets[order_D]])
        self._places = torch.cat(
            [torch.zeros(1, dtype=torch.int64), 1 + lengths.cumsum(0) - lengths]
        )
        # Windows overlap by one token: the last target of one is the first input of the next.
        starts = list(range(0, tokens + 1 - self.sequence_length, self.sequence_length))
        generator.shuffle(starts)
        self._starts_N = torch.tensor(starts)
        self._epoch = epoch


@dataclass(frozen=True)
class HeldOut:
    """The held-out documents as one stream, cut into windows in which every token counts once.

    Attributes:
        inputs_NS, targets_NS: int64. Windows overlap by ``context`` tokens. The second prediction
            of these tokens is not counted: the target is -100 there, as in the padding at the end.
        bytes_per_token: average over all of the text, separators included.
    """

    inputs_NS: torch.Tensor
    targets_NS: torch.Tensor
    bytes_per_token: float

    @classmethod
    def of(cls, documents: Documents, *, sequence_length: int, context: int) -> HeldOut:
        if not 0 <= context < sequence_length:
            raise ValueError(f"context: {context} must be from 0 to {sequence_length} - 1")
        stream = torch.cat([documents.ids_T[-1:], documents.ids_T])
        stride = sequence_length - context
        count = 1 + max(0, -(-(len(stream) - 1 - sequence_length) // stride))
        starts_N1 = torch.arange(count)[:, None] * stride
        positions_NS = starts_N1 + torch.arange(sequence_length)
        padded = torch.nn.functional.pad(stream.long(), (0, sequence_length))
        targets_NS = padded[positions_NS + 1]
        repeated_NS = (torch.arange(sequence_length) < context) & (starts_N1 > 0)
        targets_NS[repeated_NS | (positions_NS + 1 >= len(stream))] = -100
        return cls(padded[positions_NS], targets_NS, documents.bytes_per_token)

    def bits_per_byte(self, nats_per_token: float) -> float:
        return nats_per_token / math.log(2) / self.bytes_per_token

    def nats_per_token(self, bits_per_byte: float) -> float:
        return bits_per_byte * math.log(2) * self.bytes_per_token

    def sample(self, windows: int) -> HeldOut:
        """A copy with at most ``windows`` of the windows, evenly spread."""
        step = max(1, len(self.inputs_NS) // max(1, windows))
        inputs_NS, targets_NS = self.inputs_NS[::step][:windows], self.targets_NS[::step][:windows]
        return HeldOut(inputs_NS, targets_NS, self.bytes_per_token)
