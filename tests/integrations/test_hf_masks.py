"""Whole steps build no masks: only where a model's are known to be causal, and never silently."""

from __future__ import annotations

import pytest
import torch

import moe_graphs
from moe_graphs.integrations.transformers import accelerate_model, static_batch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
from hf_families import FAMILIES, implementation_of, skip_unknown, tiny, tokens  # noqa: E402

NOTHING = dict(experts=False, norms=False, residuals=False, rotary=False, loss=False)
BY_MASK_ALONE = {
    "phimoe": "sliding_window",
    "llama4_text": "attention_chunk_size",
    "doge": "sliding_window",
}
# By hand or with more than a causal mask, and what the note says of it.
UNKNOWN = {
    "doge": "DogeAttention.prepare_dynamic_mask makes masks by hand",
    "gemma3_text": "gives masks or_mask_function",
    "glm_moe_dsa": "looks at _attn_implementation by itself",
    "bert": "not causal",
    "bart": "create_bidirectional_mask",
    "phi4_multimodal": "create_bidirectional_mask",
}


def masks_of(accelerated):
    return next(change for change in accelerated.changes if change.part == "masks")


def window_of(family, length):
    """A window of so many tokens where it lives in the mask alone; no noise in routers."""
    window = {} if family not in BY_MASK_ALONE else {BY_MASK_ALONE[family]: length}
    return dict(router_jitter_noise=0.0, input_jitter_noise=0.0, **window)


@pytest.mark.parametrize("family", BY_MASK_ALONE)
def test_a_window_that_lives_in_the_mask_alone_is_kept(family):
    skip_unknown(family)
    model = tiny(family, None, **window_of(family, 8))
    expected = model(tokens(), use_cache=False).logits
    unlimited = tiny(family, None, **window_of(family, 64))(tokens(), use_cache=False).logits
    assert not torch.allclose(expected, unlimited)
    changed = masks_of(accelerate_model(model, **NOTHING, whole_steps=True)).done
    if not changed:
        assert torch.equal(model(tokens()).logits, expected)
        return
    for called in (model, model.model):
        with pytest.raises(ValueError, match=f"{BY_MASK_ALONE[family]}=8 needs a mask at 16"):
            called(tokens())
    model.eval()
    assert torch.equal(model(tokens(), use_cache=False).logits, expected)


@pytest.mark.parametrize("length", [16, 17])
@pytest.mark.parametrize("family", ["phimoe", "llama4_text", "mixtral"])
def test_rows_within_a_window_need_no_mask(family, length):
    skip_unknown(family)
    model = tiny(family, None, **(dict(sliding_window=length) | window_of(family, length)))
    expected = model(tokens(), use_cache=False).logits
    accelerated = accelerate_model(model, **NOTHING, whole_steps=True)
    assert f"up to {length} tokens" in masks_of(accelerated).note
    torch.testing.assert_close(model(tokens()).logits, expected)


@pytest.mark.parametrize("family", [*FAMILIES, "llama", "gpt2", "llama4_text", *UNKNOWN])
def test_what_is_known_to_be_causal_computes_as_with_the_masks_of_transformers(family):
    skip_unknown(family)
    heads = dict(num_key_value_heads=4) if family == "glm_moe_dsa" else {}
    model = tiny(family, implementation_of(family), **window_of(family, 16), **heads)
    model.eval()  # without dropout
    expected = model(tokens(), use_cache=False).logits
    accelerated = accelerate_model(model, **NOTHING, whole_steps=True)
    assert torch.equal(model(tokens(), use_cache=False).logits, expected)
    assert masks_of(accelerated).done == (
        family not in UNKNOWN and accelerated.model.config._attn_implementation == "sdpa"
    )
    accelerated.undo()
    assert torch.equal(model(tokens(), use_cache=False).logits, expected)


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_model_whose_masks_are_not_known_is_left_by_name(family):
    skip_unknown(family)
    model = tiny(family, None)
    forward = type(model.base_model).forward
    change = masks_of(accelerate_model(model, **NOTHING, whole_steps=True))
    assert not change.done
    assert UNKNOWN[family] in change.note
    assert "as before" in change.note
    inner = type(model.base_model).forward
    assert getattr(inner, "__wrapped__", inner) in (forward, getattr(forward, "__wrapped__", None))


def test_a_configuration_that_is_not_causal_is_left():
    model = tiny("llama", None)
    model.config.is_causal = False
    change = masks_of(accelerate_model(model, **NOTHING, whole_steps=True))
    assert "is_causal=False" in change.note


def test_a_forward_that_reads_masks_by_hand_is_left(monkeypatch):
    from transformers.models.llama import modeling_llama

    def forward(self, hidden_states, **kwargs):
        if self.config._attn_implementation == "sdpa":
            hidden_states = -hidden_states
        return hidden_states

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    change = masks_of(accelerate_model(tiny("llama", None), **NOTHING, whole_steps=True))
    assert "looks at _attn_implementation by itself" in change.note


def padded():
    real = torch.ones_like(tokens())
    real[0, :5] = 0
    return real


def test_the_base_model_called_directly_does_not_ignore_the_mask():
    model = tiny("llama", None)
    expected = model.model(tokens(), attention_mask=padded(), use_cache=False)[0]
    accelerate_model(model, **NOTHING, whole_steps=True)
    with pytest.raises(ValueError, match="static_batch"):
        model.model(tokens(), attention_mask=padded())
    model.eval()
    assert torch.equal(model.model(tokens(), attention_mask=padded())[0], expected)


def test_linear_attention_takes_no_mask_of_four_dimensions():
    skip_unknown("qwen3_next")
    model = tiny("qwen3_next", "grouped_mm")
    accelerate_model(model, whole_steps=True)
    batch = static_batch(dict(input_ids=tokens(), attention_mask=padded()), "any")
    with pytest.raises(ValueError, match="linear attention read no padding"):
        model(**batch)
    with pytest.raises(ValueError, match="position_ids: in a whole step no mask is built"):
        model(tokens(), position_ids=torch.arange(16)[None])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
def test_generate_works_while_whole_steps_are_on(family, cache, training):
    model = tiny(family, implementation_of(family), sliding_window=8).eval()
    given = dict(attention_mask=padded(), max_new_tokens=6, do_sample=False, pad_token_id=0)
    if cache is not None:
        given |= dict(cache_implementation=cache, disable_compile=True)
    expected = model.generate(tokens(), **given)
    accelerate_model(model, **NOTHING, whole_steps=True)
    model.train(training)
    assert torch.equal(model.generate(tokens(), **given), expected)


def evaluated(model, path):
    model.eval()
    with torch.no_grad():
        model(tokens(), attention_mask=padded())
    model.train()


BETWEEN = {
    "generate": lambda model, path: model.generate(tokens()[:, :4], max_new_tokens=2),
    "evaluation": evaluated,
    "checkpoint": lambda model, path: model.save_pretrained(path),
}


@pytest.mark.parametrize(
    "between",
    [list(BETWEEN), *(pytest.param([each], marks=pytest.mark.long) for each in BETWEEN)],
    ids=" ".join,
)
def test_what_happens_between_whole_steps_leaves_their_graph(between, tmp_path):
    runs = []
    for happens in (False, True):
        model = tiny("qwen3_moe", "grouped_mm")
        model.config.dtype = torch.float32  # as from_pretrained has it
        accelerate_model(model, whole_steps=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)

        def step(ids, model=model, optimizer=optimizer):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        whole = moe_graphs.FullIteration(step, model=model, optimizer=optimizer)
        losses = []
        for shift in range(6):
            losses.append(whole(tokens().roll(shift, 1)).clone())
            for each in between if happens else ():
                BETWEEN[each](model, tmp_path)
        assert whole.report().matched == 3
        runs.append([*losses, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *runs))
