"""Whole steps of transformers' models, padded batches too: one graph, the same bits."""

from __future__ import annotations

import pytest
import torch

import moe_graphs
from moe_graphs.integrations.transformers import accelerate_model, static_batch

pytest.importorskip("transformers", reason="needs the extra hf")
from grids import by_turns
from hf_families import implementation_of, loss_and_gradients, skip_unknown, tiny, tokens
from training_runs import DEVICES

FAMILIES = ("llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe")
SHORT = ("llama", "qwen2_moe", "deepseek_v3")  # dense, with shared experts, with latent attention


def steps(family, batches, *, whole, device="cpu", reentrant=None):
    model = tiny(family, implementation_of(family), moe_intermediate_size=64)
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
    accelerate_model(model, whole_steps=True)
    on_device = dict(lr=torch.tensor(1e-3, device=device), capturable=device == "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **on_device)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step
    if whole:
        run = moe_graphs.FullIteration(step, model=model, optimizer=optimizer)
    losses = [run({n: t.to(device) for n, t in batch.items()}).clone() for batch in batches]
    if whole:
        assert run.report().matched == len(batches) - 3
    return [*losses, *(p.detach() for p in model.parameters())]


def batches(padding):
    for shift in range(6):
        ids = tokens().roll(shift, 1)
        real = torch.ones_like(ids)
        real[0, 16 - shift :] = 0  # the first batch has no padding
        if padding == "any":
            real = real.flip(1)
        yield static_batch(dict(input_ids=ids, attention_mask=real, labels=ids), padding)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in SHORT else pytest.mark.long) for f in FAMILIES]
)
def test_a_whole_step_is_eager_bit_for_bit(family):
    skip_unknown(family)
    given = list(batches("right"))
    runs = [steps(family, given, whole=whole) for whole in (False, True)]
    assert all(map(torch.equal, *runs))


def test_so_it_is_with_masks_of_four_dimensions():
    given = list(batches("any"))
    runs = [steps("qwen3_moe", given, whole=whole) for whole in (False, True)]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "reentrant"), by_turns(["qwen3_moe", "llama", "deepseek_v3"], [True, False])
)
def test_gradient_checkpointing_is_a_part_of_the_step(family, reentrant, device):
    given = list(batches("right"))
    options = dict(device=device, reentrant=reentrant)
    runs = [steps(family, given, whole=whole, **options) for whole in (False, True)]
    assert all(map(torch.equal, *runs))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("padding", ["right", "any"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_whole_step_on_a_gpu(family, padding):
    given = list(batches(padding))
    runs = [steps(family, given, whole=whole, device="cuda") for whole in (False, True)]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("padding", ["right", "any"])
def test_padded_batches_give_the_same_gradients(padding):
    """The gradients are those with its masks, to rounding; "any" pads on both sides."""
    real = torch.ones_like(tokens())
    real[0, 11:] = 0
    if padding == "any":
        real[1, :4] = 0
    labels = tokens().masked_fill(real == 0, -100)
    given = dict(input_ids=tokens(), attention_mask=real, labels=labels)
    model = tiny("qwen3_moe", "grouped_mm")

    def gradients(batch):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    expected = gradients(given)
    accelerate_model(model, experts=False, norms=False, rotary=False, loss=False, whole_steps=True)
    unlabelled = given | dict(labels=tokens())
    for want, got in zip(expected, gradients(static_batch(unlabelled, padding)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_without_it_the_error_says_what_to_do():
    model = tiny("llama", None)

    def step(tokens, use_cache=False):
        loss = model(input_ids=tokens, labels=tokens, use_cache=use_cache).loss
        loss.backward()
        model.zero_grad()
        return loss.detach()

    whole = moe_graphs.FullIteration(step, model=model, on_capture_error="error")
    with pytest.raises(moe_graphs.CaptureError, match=r"whole_steps=True"):
        for _ in range(4):
            whole(tokens())
    graphs = moe_graphs.graph(model, moe_graphs.GraphConfig("model.layers.*", on_mismatch="error"))
    with pytest.raises(moe_graphs.GraphError, match=r"use_cache=False"):
        for _ in range(4):
            with graphs.step():
                step(tokens(), use_cache=True)


def test_what_needs_a_mask_is_refused():
    model = tiny("mixtral", "grouped_mm", sliding_window=8)
    before = loss_and_gradients(model, tokens())
    accelerated = accelerate_model(model, whole_steps=True)
    with pytest.raises(ValueError, match="sliding_window=8 needs a mask at 16 tokens"):
        model(tokens())
    with pytest.raises(ValueError, match="static_batch"):
        model(tokens()[:, :8], torch.ones(2, 8))
    with pytest.raises(ValueError, match="sliding_window=8 needs a mask at 16 tokens"):
        model(tokens(), position_ids=torch.arange(8).repeat(2)[None])
    accelerated.undo()
    after = loss_and_gradients(model, tokens())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(ValueError, match="choose one"):
        accelerate_model(model, whole_steps=True, graphs=moe_graphs.GraphConfig("model.layers.*"))
    model.set_attn_implementation("eager")
    assert "set_attn_implementation" in str(accelerate_model(model, whole_steps=True))


def test_batches_are_refused():
    ids, left = tokens(), torch.ones_like(tokens())
    left[0, 0] = 0
    for options, message in (
        (dict(attention_mask=left), "padded on the left"),
        (dict(attention_mask=left[:, None]), "shape of input_ids"),
        (dict(padding="left"), "choose right or any"),
    ):
        padding = options.pop("padding", "right")
        with pytest.raises(ValueError, match=message):
            static_batch(dict(input_ids=ids, **options), padding)
