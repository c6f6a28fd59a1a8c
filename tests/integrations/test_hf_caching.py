"""Rows packed by ``position_ids``, caches in training: one behaviour with graphs and without."""

from __future__ import annotations

import pytest
import torch

from moe_graphs.integrations.transformers import accelerate_model

pytest.importorskip("transformers", reason="needs the extra hf")
from hf_families import implementation_of, skip_unknown, tiny, tokens

LINEAR = ("qwen3_next", "qwen3_5_moe", "bailing_hybrid", "nemotron_h")


def positions():
    """Two documents in each row, of six and ten tokens."""
    return torch.cat([torch.arange(6), torch.arange(10)])[None].expand(2, 16)


def trained_on_packed_rows(family, graphs):
    model = tiny(family, implementation_of(family), num_key_value_heads=4)
    accelerated = accelerate_model(model, graphs=graphs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for shift in range(5):
        ids = tokens().roll(shift, 1)
        with accelerated.step():
            loss = model(input_ids=ids, position_ids=positions(), labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return accelerated, [*losses, *(p.detach() for p in model.parameters())]


# Attention, and two kinds of layers beside it; `test_hf_accelerated.py` has graphs of the others.
OFTEN = ("llama", "qwen3_next", "nemotron_h")


@pytest.mark.parametrize(
    "family",
    [
        f if f in OFTEN else pytest.param(f, marks=pytest.mark.long)
        for f in ("llama", "qwen3_moe", *LINEAR)
    ],
)
def test_packed_rows_are_bitwise_the_same_with_graphs_and_without(family):
    skip_unknown(family)
    (_, expected), (accelerated, found) = (
        trained_on_packed_rows(family, graphs) for graphs in (False, True)
    )
    assert accelerated.graphs.report().replayed > 0
    assert all(map(torch.equal, expected, found))


@pytest.mark.filterwarnings("ignore:.*outside_step:moe_graphs.GraphWarning")
@pytest.mark.parametrize("graphs", [False, True])
def test_packed_rows_are_what_transformers_computes_without_a_cache(graphs):
    model = tiny("llama", None)
    given = dict(input_ids=tokens(), position_ids=positions())
    expected, cached = model(**given, use_cache=False).logits, model(**given).logits
    accelerated = accelerate_model(model, norms=False, residuals=False, rotary=False, graphs=graphs)
    assert torch.equal(model(**given).logits, expected)
    assert not torch.allclose(cached, expected)  # by default documents see one another
    assert "do not see one another" in str(accelerated)
    accelerated.undo()
    assert torch.equal(model(**given).logits, cached)


@pytest.mark.filterwarnings("ignore:.*outside_step:moe_graphs.GraphWarning")
@pytest.mark.parametrize("options", [{"graphs": False}, {"graphs": True}, {"whole_steps": True}])
def test_a_cache_is_kept_where_it_is_asked_for(options):
    model = tiny("qwen3_moe", "grouped_mm")
    accelerated = accelerate_model(model, **options)
    assert model(tokens()).past_key_values is None
    assert model.model(tokens()).past_key_values is None
    asked = model(tokens(), use_cache=True)
    assert asked.past_key_values.get_seq_length() == 16
    model.eval()
    with torch.no_grad():
        assert model(tokens()).past_key_values.get_seq_length() == 16
    accelerated.undo()
    model.train()
    assert model(tokens()).past_key_values is not None


@pytest.mark.parametrize("family", ["xglm", "opt", "gpt2", "llama4_text"])
def test_heads_and_decoders_that_look_up_the_configuration_cache_nothing(family):
    skip_unknown(family)
    model = tiny(family, None)
    kind = type(model)
    assert model(tokens()).past_key_values is not None
    accelerated = accelerate_model(model)
    for _ in range(5):
        with accelerated.step():
            output = model(tokens(), labels=tokens())
            output.loss.backward()
        assert output.past_key_values is None
    assert accelerated.graphs.report().replayed > 0
    accelerated.undo()
    assert type(model) is kind
    assert model(tokens()).past_key_values is not None


def test_a_cache_given_by_position_is_kept():
    skip_unknown("bloom")
    model = tiny("bloom", None)
    accelerate_model(model, graphs=False)
    given = (tokens(), None, None, None, True)  # ids, cache, mask, embeddings
    assert model.transformer(*given).past_key_values is not None
    assert model.transformer(*given[:-1]).past_key_values is None
