"""Batches as transformers' tokenizers, processors and collators make them."""

from __future__ import annotations

import pytest
import torch

import moe_graphs
from moe_graphs.integrations.transformers import accelerate_model

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
from grids import by_turns  # noqa: E402
from hf_families import tiny, tokens  # noqa: E402

KINDS = [transformers.BatchEncoding, transformers.BatchFeature]


def batches(kind, count=6):
    for shift in range(count):
        ids = tokens().roll(shift, 1)
        yield kind({"input_ids": ids, "labels": ids.clone()})


def the_tokenizer():
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "a", "graph", "is", "replayed"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    kind = transformers.PreTrainedTokenizerFast
    return kind(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_loader_takes_them(kind):
    given = list(batches(kind))
    loader = moe_graphs.StaticLoader(given, "cpu")
    places = set()
    for expected, found in zip(given, loader, strict=True):
        assert type(found) is kind
        assert list(found) == ["input_ids", "labels"]
        assert torch.equal(found["input_ids"], expected["input_ids"])
        assert torch.equal(found.labels, expected["labels"])
        assert found["input_ids"] is not expected["input_ids"]
        places.add(found["input_ids"].data_ptr())
    assert len(places) == 2


def test_what_the_tokenizer_returns_goes_through():
    tokenizer = the_tokenizer()
    texts = ["a graph is replayed", "is a graph"]
    given = [tokenizer(texts, padding=True, return_tensors="pt") for _ in range(3)]
    for found in moe_graphs.StaticLoader(given, "cpu"):
        assert type(found) is transformers.BatchEncoding
        assert found.keys() == given[0].keys()
        assert torch.equal(found["attention_mask"], given[0]["attention_mask"])


def test_a_batch_that_differs_is_named():
    first, second = batches(transformers.BatchEncoding, 2)
    second["input_ids"] = second["input_ids"][:1]
    loader = moe_graphs.StaticLoader([first, second], "cpu")
    with pytest.raises(moe_graphs.GraphError, match=r"\['input_ids'\] was \[2, 16\]"):
        list(loader)
    del second["input_ids"]
    with pytest.raises(moe_graphs.GraphError, match="input_ids"):
        list(moe_graphs.StaticLoader([first, second], "cpu"))


@pytest.mark.parametrize(("static", "kind"), by_turns([False, True], KINDS))
def test_a_whole_step_takes_them_bit_for_bit(kind, static):
    runs = []
    for whole in (False, True):
        model = tiny("llama", None)
        accelerate_model(model, whole_steps=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)

        def step(batch, model=model, optimizer=optimizer):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = moe_graphs.FullIteration(step, model=model, optimizer=optimizer) if whole else step
        given = moe_graphs.StaticLoader(batches(kind), "cpu") if static else batches(kind)
        losses = [run(batch).clone() for batch in given]
        if whole:
            assert run.report().matched == 3
        runs.append([*losses, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *runs))
