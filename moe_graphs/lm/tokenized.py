"""Text as the ids of a Hugging Face tokenizer: tokenised once, kept in a file beside the run.

T tokens of all documents, D documents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_graphs.lm.data import Corpus, Documents, identity

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE = "tokens.safetensors"
_KEY = "made of"
_AT_ONCE = 1 << 22  # bytes of documents in memory with all that a tokenizer says of them


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the token that ends a document.

    Attributes:
        separator: the id of ``separator_token``.
        digest: a hash that differs for different tokenizers or separators.
    """

    directory: Path
    tokenizer: Tokenizer
    separator: int
    separator_token: str
    digest: str

    def encode(self, documents: Iterable[bytes]) -> Iterator[list[int]]:
        """The ids of each document, without a separator at the end.

        They include ids that the tokenizer itself puts before a document, as Llama's does.
        """
        for some in _parts(documents):
            for encoding in self.tokenizer.encode_batch(some):
                ids = encoding.ids
                yield ids[:-1] if ids[-1:] == [self.separator] else ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def name(self, token: int) -> str | None:
        return self.tokenizer.id_to_token(token)


def load_tokenizer(directory: Path) -> TextTokenizer:
    """Reads ``tokenizer.json`` and the end-of-sequence token.

    The token is that of ``tokenizer_config.json``, or else of ``config.json``.

    Raises:
        ValueError: if there is no such file, or it cannot be read; if there is no such token; or if
            the package ``tokenizers`` is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(
            "tokenizer: the package tokenizers is not installed: pip install 'moe_graphs[hf]'"
        ) from error
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"tokenizer: no {path}: give --tokenizer a directory with one (transformers writes it: "
            f"AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"tokenizer: {path} cannot be read: {error}") from error
    # Documents must not be cut, whatever truncation the file was saved with.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    token = _end_of_sequence(directory, tokenizer)
    separator = tokenizer.token_to_id(token)
    assert separator is not None
    digest = hashlib.sha256(content + token.encode()).hexdigest()[:16]
    return TextTokenizer(directory, tokenizer, separator, token, digest)


def _parts(documents: Iterable[bytes]) -> Iterator[list[str]]:
    part, size = [], 0
    for document in documents:
        part.append(document.decode())
        size += len(document)
        if size >= _AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def _end_of_sequence(directory: Path, tokenizer: Tokenizer) -> str:
    named = _json(directory / "tokenizer_config.json").get("eos_token")
    token = named.get("content") if isinstance(named, dict) else named
    if token is None:
        found = _json(directory / "config.json").get("eos_token_id")
        number = found[0] if isinstance(found, list) and found else found
        token = tokenizer.id_to_token(number) if isinstance(number, int) else None
    if token is None or tokenizer.token_to_id(token) is None:
        raise ValueError(
            f"tokenizer: {directory} names no end-of-sequence token to separate documents by "
            f"(found {token!r}): set eos_token in its tokenizer_config.json"
        )
    return token


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"tokenizer: {path} is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class TokenizedText:
    """The ``Text`` whose tokens are a tokenizer's."""

    source: str
    train_documents: Documents
    held_out_documents: Documents
    held_out_content: bytes
    tokenizer: TextTokenizer
    skipped: dict[str, int] = field(default_factory=dict)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


def tokenize(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    *,
    vocab_size: int,
    sequence_length: int,
    write: Path | None = None,
    read: Iterable[Path] = (),
) -> tuple[TokenizedText, Path | None]:
    """Every document of the corpus as ids.

    Args:
        vocab_size: size of the model's vocabulary.
        sequence_length: length of a sequence. At least one sequence of text is held out, so if
            there are few documents, more of them than one in twenty may be held out.
        write: a folder that keeps the ids for the next time; None writes nothing.
        read: folders that may hold them from the last time.

    Returns:
        The text, and the file that it was read from; None if it was tokenised.

    Raises:
        ValueError: if a token's id is beyond ``vocab_size``; the message names it.
    """
    corpus = _with_a_sequence_held_out(corpus, tokenizer, sequence_length)
    sides = {"train": corpus.train, "held_out": corpus.held_out}
    identities = {name: identity(documents) for name, documents in sides.items()}
    key = json.dumps([identities, tokenizer.digest])
    found = next(filter(None, (_cached(folder / CACHE, key) for folder in read)), None)
    tensors, path = found or (_tokenized(sides, tokenizer), None)
    made = []
    for name, documents in sides.items():
        ids_T, offsets = tensors[f"{name}.ids"], tensors[f"{name}.offsets"]
        ids_T = ids_T.view(torch.uint16) if ids_T.dtype == torch.int16 else ids_T
        largest = int(ids_T.int().max())
        if largest >= vocab_size:
            raise ValueError(
                f"tokenizer: {tokenizer.directory} gives {tokenizer.name(largest)!r} the id "
                f"{largest}, and the model has a vocabulary of {vocab_size}: take the tokenizer "
                f"that the model was trained with"
            )
        content_bytes = sum(map(len, documents)) + len(documents)
        names = {**identities[name], "tokenizer": f"sha256 {tokenizer.digest}"}
        made.append(Documents(ids_T, offsets, content_bytes, names))
    if path is None and write is not None:
        partial = write / f"{CACHE}.partial"
        save_file(tensors, partial, metadata={_KEY: key})
        partial.rename(write / CACHE)
    content = corpus.held_out_content
    train, held_out = made
    return TokenizedText(corpus.source, train, held_out, content, tokenizer, corpus.skipped), path


def _with_a_sequence_held_out(corpus: Corpus, tokenizer: TextTokenizer, length: int) -> Corpus:
    """Sides of the corpus; if the held-out side is too short, first documents move to it."""
    documents, count = (*corpus.held_out, *corpus.train), len(corpus.held_out)
    # Documents are encoded one at a time: the first few are nearly always enough.
    found = accumulate(len(next(tokenizer.encode([each]))) + 1 for each in documents)
    enough = next((n for n, tokens in enumerate(found, 1) if tokens >= length), len(documents))
    if enough <= count:
        return corpus
    if enough == len(documents):
        raise ValueError(
            f"data: {corpus.source} has no more tokens than one sequence of {length}, which is "
            f"held out: give more text, or a smaller --sequence-length"
        )
    return dataclasses.replace(corpus, held_out=documents[:enough], train=documents[enough:])


def _tokenized(
    sides: Mapping[str, Sequence[bytes]], tokenizer: TextTokenizer
) -> dict[str, torch.Tensor]:
    """Arrays as in the file: two bytes a token if that is enough, which safetensors calls int16."""
    tensors: dict[str, torch.Tensor] = {}
    for name, documents in sides.items():
        pieces = [
            torch.tensor([*ids, tokenizer.separator], dtype=torch.int32)
            for ids in tokenizer.encode(documents)
        ]
        ids_T = torch.cat(pieces)
        if ids_T.max() < 1 << 16:
            ids_T = ids_T.to(torch.uint16).view(torch.int16)
        lengths = torch.tensor([0, *map(len, pieces)])
        tensors |= {f"{name}.ids": ids_T, f"{name}.offsets": lengths.cumsum(0)}
    return tensors


def _cached(path: Path, key: str) -> tuple[dict[str, torch.Tensor], Path] | None:
    """Mapped contents of the file; None if it is missing, not whole, or of something else."""
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get(_KEY) != key:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}, path  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
