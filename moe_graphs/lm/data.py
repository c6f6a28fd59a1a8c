"""Text for a byte-level language model: found, split by content, packed into fixed lengths.

S sequence length, N windows of a stream.
"""

from __future__ import annotations

import hashlib
import platform
import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

SEPARATOR = b"\x00"
"""Stands before every document and after the last one. Files that contain it are not text."""

_HELD_OUT_PERCENT = 5
_PIECE_BYTES = 16 * 1024
# One generated file (pydoc_data/topics.py, 757 KB) would be 70 % of the library's held-out bytes.
_LARGEST_BYTES = 512 * 1024


@dataclass(frozen=True)
class Corpus:
    """Documents on two sides, each in the order of its content's hash, so machines agree.

    Attributes:
        skipped: how many files were left out, by reason.
    """

    source: str
    train: tuple[bytes, ...]
    held_out: tuple[bytes, ...]
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def train_bytes(self) -> int:
        return sum(map(len, self.train))

    @property
    def held_out_bytes(self) -> int:
        return sum(map(len, self.held_out))


def standard_library() -> Corpus:
    """The Python sources of this interpreter's standard library: about 11 MB.

    Without installed packages; without tests, which many distributions leave out, so that the
    text is the same wherever the Python version is; without files over 512 KiB (counted), which
    are generated.
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

    Raises:
        ValueError: if there is nothing at ``path``, or too little for both sides of the split.
    """
    if path.is_file():
        documents, skipped = _read([path])
        pieces = [piece for document in documents for piece in _cut(document)]
        return _corpus(f"{path}, in pieces of {_PIECE_BYTES // 1024} KiB", pieces, skipped)
    if not path.is_dir():
        raise ValueError(f"data: nothing at {path}: give a directory of text files, or one file")
    paths = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.parts))
    return _corpus(str(path), *_read(paths))


def is_held_out(document: bytes) -> bool:
    """About one document in twenty. By content alone: a copy of a file is on its side too."""
    digest = hashlib.sha256(document).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _HELD_OUT_PERCENT


def concatenate(documents: Iterable[bytes]) -> bytes:
    """Documents as one stream, a separator before each of them and one at the end."""
    return SEPARATOR + b"".join(document + SEPARATOR for document in documents)


def _read(paths: Iterable[Path], largest: int | None = None) -> tuple[list[bytes], dict[str, int]]:
    documents: list[bytes] = []
    skipped: dict[str, int] = {}
    for path in filter(Path.is_file, paths):
        try:
            content = path.read_bytes()
        except OSError:
            reason = "unreadable"
        else:
            reason = _why_not(content, largest)
        if reason is None:
            documents.append(content)
        else:
            skipped[reason] = skipped.get(reason, 0) + 1
    return documents, skipped


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
    held_out = tuple(document for document in unique if is_held_out(document))
    train = tuple(document for document in unique if not is_held_out(document))
    if not train or not held_out:
        raise ValueError(
            f"data: {source} has {len(unique)} different documents, {len(train)} to train on and "
            f"{len(held_out)} held out (one in {100 // _HELD_OUT_PERCENT}, by hash): give more text"
        )
    return Corpus(source, train, held_out, skipped)


def _cut(document: bytes) -> list[bytes]:
    """Pieces of whole lines, each just over the piece size (longer where a line is longer)."""
    pieces, start = [], 0
    while start < len(document):
        newline = document.find(b"\n", start + _PIECE_BYTES)
        end = len(document) if newline < 0 else newline + 1
        pieces.append(document[start:end])
        start = end
    return pieces


class TrainingBatches:
    """Batches of packed windows as a function of the step alone: resuming needs no state.

    In every epoch the documents are shuffled and packed anew, then the windows are shuffled; the
    seed and the epoch's number decide both. What is left over at the end of an epoch (less than
    one batch) is not seen in that epoch.
    """

    def __init__(
        self, documents: tuple[bytes, ...], *, sequence_length: int, batch_size: int, seed: int
    ) -> None:
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        self._documents = documents
        stream_bytes = sum(map(len, documents)) + len(documents) + 1
        self.batches_per_epoch = (stream_bytes - 1) // sequence_length // batch_size
        if self.batches_per_epoch == 0:
            raise ValueError(
                f"batch_size: {batch_size} sequences of {sequence_length} bytes are more than the "
                f"{stream_bytes} bytes to train on: give more text, or a smaller batch"
            )
        self._epoch = -1
        self._stream = torch.empty(0, dtype=torch.uint8)
        self._starts_N = torch.empty(0, dtype=torch.int64)

    def describe(self) -> str:
        """The text in a few words, others for another text."""
        digest = hashlib.sha256(concatenate(self._documents)).hexdigest()
        return f"{len(self._documents)} documents, sha256 {digest[:16]}"

    def batch(self, step: int) -> torch.Tensor:
        """Step ``step``'s windows, uint8 ``[batch_size, S + 1]``, freshly allocated."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._pack(epoch)
        starts_B = self._starts_N[index * self.batch_size : (index + 1) * self.batch_size]
        return self._stream[starts_B[:, None] + torch.arange(self.sequence_length + 1)]

    def _pack(self, epoch: int) -> None:
        # A string seeds by its hash: no pair (seed, epoch) shares its order with another pair.
        generator = random.Random(f"{self.seed} {epoch}")
        order = list(self._documents)
        generator.shuffle(order)
        self._stream = torch.frombuffer(bytearray(concatenate(order)), dtype=torch.uint8)
        # Windows overlap by one byte: the last target of one is the first input of the next.
        starts = list(range(0, len(self._stream) - self.sequence_length, self.sequence_length))
        generator.shuffle(starts)
        self._starts_N = torch.tensor(starts)
        self._epoch = epoch


@dataclass(frozen=True)
class HeldOut:
    """The held-out documents as one stream, cut into windows in which every byte counts once.

    Attributes:
        content: what is predicted, and what compressors are given: the stream without its first
            separator.
        inputs_NS, targets_NS: int64; windows overlap by ``context`` bytes, whose second
            prediction is not counted: there, as in the padding at the end, the target is -100.
    """

    content: bytes
    inputs_NS: torch.Tensor
    targets_NS: torch.Tensor

    @classmethod
    def of(cls, documents: tuple[bytes, ...], *, sequence_length: int, context: int) -> HeldOut:
        if not 0 <= context < sequence_length:
            raise ValueError(f"context: {context} must be from 0 to {sequence_length} - 1")
        stream = concatenate(documents)
        stride = sequence_length - context
        count = 1 + max(0, -(-(len(stream) - 1 - sequence_length) // stride))
        starts_N1 = torch.arange(count)[:, None] * stride
        positions_NS = starts_N1 + torch.arange(sequence_length)
        bytes_ = torch.frombuffer(bytearray(stream), dtype=torch.uint8).long()
        padded = torch.nn.functional.pad(bytes_, (0, sequence_length))
        targets_NS = padded[positions_NS + 1]
        repeated_NS = (torch.arange(sequence_length) < context) & (starts_N1 > 0)
        targets_NS[repeated_NS | (positions_NS + 1 >= len(stream))] = -100
        return cls(stream[1:], padded[positions_NS], targets_NS)

    def sample(self, windows: int) -> HeldOut:
        """At most ``windows`` of the windows, evenly spread; ``content`` stays the whole."""
        step = max(1, len(self.inputs_NS) // max(1, windows))
        return HeldOut(
            self.content, self.inputs_NS[::step][:windows], self.targets_NS[::step][:windows]
        )
