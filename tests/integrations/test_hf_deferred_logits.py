"""Logits of an accelerated model are made only where somebody reads them."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from moe_graphs.integrations.transformers import accelerate_model

pytest.importorskip("transformers", reason="needs the extra hf")
from hf_families import implementation_of, tiny, tokens
from moe_graphs.integrations.transformers.deferred_logits import DeferredLogits

# Gemma 2 caps its logits, Granite divides them, Cohere multiplies them.
FAMILIES = {
    "qwen3_moe": {},
    "llama": {},
    "gemma2": {"final_logit_softcapping": 0.3},
    "granitemoe": {"logits_scaling": 0.2},
    "cohere": {"logit_scale": 3.0},
}
pytestmark = pytest.mark.parametrize("family", FAMILIES)


def both(family: str):
    """A model of transformers, and its accelerated copy."""
    theirs = tiny(family, implementation_of(family), **FAMILIES[family])
    ours = copy.deepcopy(theirs)
    return theirs, ours, accelerate_model(ours, graphs=False)


def asked(accelerated) -> dict[str, int]:
    """The functions that have asked for whole logits."""
    return {line.what: line.count for line in accelerated.since() if line.part == "logits"}


def test_a_training_step_makes_no_logits(family):
    theirs, ours, accelerated = both(family)
    output = ours(input_ids=tokens(), labels=tokens())
    torch.testing.assert_close(output.loss, theirs(input_ids=tokens(), labels=tokens()).loss)
    output.loss.backward()
    assert isinstance(output.logits, DeferredLogits)
    assert output.logits.shape == (*tokens().shape, ours.config.vocab_size)
    assert asked(accelerated) == {}


@pytest.mark.parametrize("backward_of", ["logits", "both"])
def test_logits_that_are_read_are_transformers(family, backward_of):
    theirs, ours, accelerated = both(family)
    losses = []
    for model in (theirs, ours):
        output = model(input_ids=tokens(), labels=tokens())
        loss = output.logits.float().square().mean() + output.logits[..., 0].sum()
        if backward_of == "both":
            loss = loss + output.loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0])
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = gradients[name].grad
        scale = expected.abs().max().clamp(min=1e-6)
        assert (parameter.grad - expected).abs().max() <= 1e-4 * scale, name
    assert sum(asked(accelerated).values()) == 1
    assert "asked for whole logits" in str(accelerated)


def test_gradients_of_the_loss_are_transformers(family):
    theirs, ours, _ = both(family)
    for model in (theirs, ours):
        options = {"num_items_in_batch": 40} if family != "llama" else {}
        model(input_ids=tokens(), labels=tokens(), **options).loss.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = gradients[name].grad
        scale = expected.abs().max().clamp(min=1e-6)
        assert (parameter.grad - expected).abs().max() <= 1e-4 * scale, name


def test_metrics_without_gradients(family):
    """TRL computes entropies and accuracies from detached logits in every step."""
    theirs, ours, _ = both(family)
    found = []
    for model in (theirs, ours):
        output = model(input_ids=tokens(), labels=tokens())
        with torch.no_grad():
            logits = output.logits.detach()
            log_p = logits.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1).mean()
        output.loss.backward()
        found.append((entropy, (logits.argmax(-1) == tokens()).float().mean()))
    torch.testing.assert_close(found[1], found[0])


def test_evaluation_and_no_grad_have_plain_logits(family):
    theirs, ours, _ = both(family)
    with torch.no_grad():
        assert type(ours(input_ids=tokens()).logits) is torch.Tensor
    theirs.eval()
    ours.eval()
    found = ours(input_ids=tokens()).logits
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, theirs(input_ids=tokens()).logits, atol=1e-5, rtol=1e-4)


def test_under_autocast_their_dtype_is_that_of_linear(family):
    theirs, ours, _ = both(family)
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(input_ids=tokens(), labels=tokens())
        assert output.logits.dtype == theirs(input_ids=tokens()).logits.dtype == torch.bfloat16
        logits = output.logits + 0
    assert logits.dtype == torch.bfloat16


def test_they_are_saved_and_copied_as_plain_tensors(family):
    _, ours, _ = both(family)
    logits = ours(input_ids=tokens()).logits
    kept = io.BytesIO()
    torch.save(logits.detach(), kept)
    kept.seek(0)
    assert torch.equal(torch.load(kept), logits.detach())
    assert type(copy.deepcopy(logits.detach())) is torch.Tensor


def test_undone_the_head_is_transformers_own(family):
    theirs, ours, accelerated = both(family)
    accelerated.undo()
    head = ours.get_output_embeddings()
    assert type(head) is torch.nn.Linear
    assert vars(head).keys() == vars(theirs.get_output_embeddings()).keys()
    assert type(ours(input_ids=tokens()).logits) is torch.Tensor


def test_a_head_with_a_bias_is_left(family):
    model = tiny(family, implementation_of(family))
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    accelerated = accelerate_model(model, graphs=False)
    (line,) = [change for change in accelerated.changes if change.part == "logits"]
    assert not line.done
    assert type(model(input_ids=tokens()).logits) is torch.Tensor


def test_only_what_a_rule_has_is_deferred(family):
    """Scaled without gradients, by a tensor or capped twice, logits are made."""
    _, ours, accelerated = both(family)
    logits = ours(input_ids=tokens(), labels=tokens()).logits
    halved = logits * 0.5 / 3
    assert isinstance(halved, DeferredLogits)
    assert asked(accelerated) == {}
    torch.testing.assert_close(halved + 0, (logits + 0) * 0.5 / 3)
    with torch.no_grad():
        assert not (logits * 2).requires_grad
    for made in (logits * torch.tensor(2.0), logits * -1, torch.tanh(torch.tanh(logits))):
        assert type(made) is torch.Tensor
