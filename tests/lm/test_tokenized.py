"""Text as a tokenizer's ids: nothing lost, nothing made twice, nothing beyond the vocabulary."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from hf_texts import BEGIN, END, VOCABULARY, texts, write_texts, write_tokenizer
from moe_graphs.lm.data import (
    Corpus,
    Documents,
    HeldOut,
    TrainingBatches,
    concatenate,
    corpus_at,
)
from moe_graphs.lm.tokenized import CACHE, TokenizedText, load_tokenizer, tokenize


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return corpus_at(write_texts(tmp_path_factory.mktemp("text")))


def tokenized(corpus: Corpus, directory: Path, **options) -> TokenizedText:
    text, _ = tokenize(
        corpus, load_tokenizer(directory), vocab_size=VOCABULARY, sequence_length=16, **options
    )
    return text


def one_by_one(documents: Documents) -> list[list[int]]:
    edges = documents.offsets.tolist()
    return [documents.ids_T[a:b].tolist() for a, b in itertools.pairwise(edges)]


def test_every_document_comes_back_from_its_tokens(corpus, directory):
    text = tokenized(corpus, directory)
    for documents, contents in (
        (text.train_documents, corpus.train),
        (text.held_out_documents, corpus.held_out),
    ):
        assert documents.ids_T.dtype == torch.uint16
        pieces = one_by_one(documents)
        assert [text.decode(ids[:-1]).encode() for ids in pieces] == list(contents)
        assert {text.decode(ids[-1:]) for ids in pieces} == {END}
        assert documents.content_bytes == sum(map(len, contents)) + len(contents)
        assert len(documents.ids_T) < documents.content_bytes / 2, "pairs were merged"
    assert sorted(corpus.train + corpus.held_out) == sorted(t.encode() for t in texts())


def test_what_the_tokenizer_puts_before_a_text_stays(corpus, tmp_path):
    text = tokenized(corpus, write_tokenizer(tmp_path, begin=True))
    content = corpus.train[0].decode()
    assert text.decode(one_by_one(text.train_documents)[0]) == f"{BEGIN}{content}{END}"


@pytest.mark.parametrize("sequence_length", [7, 16])
def test_packed_sequences_are_the_documents_one_after_the_other(corpus, directory, sequence_length):
    documents = tokenized(corpus, directory).train_documents
    batches = TrainingBatches(documents, sequence_length=sequence_length, batch_size=1, seed=5)
    windows = torch.cat([batches.batch(n) for n in range(batches.batches_per_epoch)])
    in_order = windows[batches._starts_N.argsort()]
    assert torch.equal(in_order[1:, 0], in_order[:-1, -1]), "each goes on where the last ended"
    stream = in_order[:, 1:].flatten().tolist()
    assert len(stream) + batches.left_over == len(documents.ids_T)
    assert batches.left_over < sequence_length
    separator = int(documents.ids_T[-1])
    left = one_by_one(documents)
    assert windows[batches._starts_N.argmin(), 0] == separator
    while separator in stream:
        end = stream.index(separator) + 1
        left.remove(stream[:end])
        del stream[:end]
    (cut,) = left  # by the end of the last window
    assert cut[: len(stream)] == stream


def test_held_out_tokens_count_once_and_their_bytes_are_known(corpus, directory):
    text = tokenized(corpus, directory)
    held_out = HeldOut.of(text.held_out_documents, sequence_length=16, context=8)
    counted = held_out.targets_NS[held_out.targets_NS >= 0]
    assert torch.equal(counted, text.held_out_documents.ids_T.long())
    ratio = len(text.held_out_content) / len(counted)
    assert held_out.bytes_per_token == ratio
    assert held_out.bits_per_byte(1.0) == pytest.approx(1 / (0.6931471805599453 * ratio))
    assert held_out.nats_per_token(held_out.bits_per_byte(2.5)) == pytest.approx(2.5)


def test_at_least_one_sequence_is_held_out(corpus, directory):
    size = {"vocab_size": VOCABULARY}
    few, _ = tokenize(corpus, load_tokenizer(directory), **size, sequence_length=16)
    assert few.held_out_content == concatenate(corpus.held_out)[1:]
    some, _ = tokenize(corpus, load_tokenizer(directory), **size, sequence_length=500)
    assert 500 <= len(some.held_out_documents.ids_T) < 600
    assert some.held_out_content.startswith(few.held_out_content)
    both = one_by_one(some.held_out_documents) + one_by_one(some.train_documents)
    whole = one_by_one(few.held_out_documents) + one_by_one(few.train_documents)
    assert sorted(both) == sorted(whole)
    with pytest.raises(ValueError, match="no more tokens than one sequence of 5000"):
        tokenize(corpus, load_tokenizer(directory), **size, sequence_length=5000)


def test_ids_are_made_once_for_a_text_and_a_tokenizer(corpus, directory, tmp_path):
    tokenizer, size = load_tokenizer(directory), {"vocab_size": VOCABULARY, "sequence_length": 16}
    first, path = tokenize(corpus, tokenizer, **size, write=tmp_path, read=[tmp_path])
    assert path is None
    again, path = tokenize(corpus, tokenizer, **size, read=[tmp_path / "elsewhere", tmp_path])
    assert path == tmp_path / CACHE
    for name in ("train_documents", "held_out_documents"):
        made, read = getattr(first, name), getattr(again, name)
        assert torch.equal(made.ids_T.int(), read.ids_T.int())
        assert torch.equal(made.offsets, read.offsets)
        assert made.identity == read.identity
        assert made.identity.keys() == {"text", "tokenizer"}
    other = load_tokenizer(write_tokenizer(tmp_path / "other", vocabulary=VOCABULARY - 20))
    less = Corpus(corpus.source, corpus.train[1:], corpus.held_out)
    for changed in ((corpus, other), (less, tokenizer)):
        assert tokenize(*changed, **size, read=[tmp_path])[1] is None
    (tmp_path / CACHE).write_bytes((tmp_path / CACHE).read_bytes()[:-9])
    assert tokenize(corpus, tokenizer, **size, read=[tmp_path])[1] is None


def test_a_large_vocabulary_takes_four_bytes_a_token(corpus, directory):
    tokenizer = load_tokenizer(directory)
    tokenizer.tokenizer.add_tokens([f"<{n}>" for n in range(70_000)])
    corpus = Corpus("a test", (*corpus.train, b"<69999>"), corpus.held_out)
    text, _ = tokenize(corpus, tokenizer, vocab_size=VOCABULARY + 70_000, sequence_length=16)
    assert text.train_documents.ids_T.dtype == torch.int32
    assert one_by_one(text.train_documents)[-1][0] == VOCABULARY + 69_999


def test_a_token_beyond_the_vocabulary_is_named(corpus, directory):
    tokenizer = load_tokenizer(directory)
    largest = max(tokenized(corpus, directory).train_documents.ids_T.tolist())
    name = tokenizer.name(largest)
    with pytest.raises(ValueError, match=f"'{name}' the id {largest}, .* vocabulary of {largest}:"):
        tokenize(corpus, tokenizer, vocab_size=largest, sequence_length=16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "no .*tokenizer.json: give --tokenizer"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be read"),
        (
            lambda d: (d / "tokenizer_config.json").write_text("{"),
            "tokenizer_config.json is no JSON",
        ),
        (lambda d: (d / "tokenizer_config.json").unlink(), "names no end-of-sequence token"),
        (
            lambda d: (d / "tokenizer_config.json").write_text('{"eos_token": "</s>"}'),
            "names no end-of-sequence token .*'</s>'",
        ),
    ],
)
def test_a_directory_without_a_tokenizer_is_refused(tmp_path, change, words):
    change(write_tokenizer(tmp_path))
    with pytest.raises(ValueError, match=words):
        load_tokenizer(tmp_path)


def test_the_end_of_sequence_is_found_where_it_is_named(tmp_path):
    write_tokenizer(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": {"content": END, "lstrip": False}}))
    assert load_tokenizer(tmp_path).separator == 0
    settings.unlink()
    for number in (1, [1, 0]):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": number}))
        assert load_tokenizer(tmp_path).separator_token == BEGIN


def test_without_the_package_there_is_a_line(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'moe_graphs\[hf\]'"):
        load_tokenizer(directory)


def test_lines_of_json_are_documents_and_others_are_counted(tmp_path):
    lines = [
        '{"text": "one\\n"}',
        "",
        '{"title": "no text"}',
        "[1]",
        '{"text": 3}',
        "{",
        '{"text": ""}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": "two"}']))
    for found in (corpus_at(tmp_path), corpus_at(tmp_path / "a.jsonl")):
        assert sorted(found.train + found.held_out) == [b"one\n", b"two"]
        assert found.skipped == {'line of JSON without a "text"': 4, "empty": 1}
