"""Updates within the backward: the bits of ordinary steps, one gradient at a time, and clipping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_graphs
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.optim import AdamW, Muon
from moe_graphs.training.capturable import tensor_hyperparameters
from moe_graphs.training.grad_norm import clip_grad_norm, total_norm
from moe_graphs.training.update_in_backward import UpdateInBackward
from training_runs import DEVICES

STEPS = 6
on_devices = pytest.mark.parametrize("device", DEVICES)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8-bit states, rounded stochastically": dict(
        state_dtype=torch.uint8, stochastic_rounding=True, seed=3
    ),
    "averages": dict(ema_decay=0.9),
}


def build(device: str, dtype: torch.dtype | None = None) -> LanguageModel:
    """A tiny model, in bf16 on a GPU, where experts take no fp32."""
    if dtype is None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=64,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        ffn_hidden_size=64,
        moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=64),
    )
    return LanguageModel(config, device=device, dtype=dtype)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]


def batch(step: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(64, (2, 17), generator=generator).to(device)


def backward(model: nn.Module, tokens: Tensor) -> Tensor:
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    loss.backward()
    return loss.detach()


def everything(model: nn.Module, optimizer: AdamW, losses: list[Tensor]) -> list[Tensor]:
    states = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return [*losses, *model.parameters(), *(v for v in states if isinstance(v, Tensor))]


def train(model: nn.Module, optimizer: AdamW, device: str, **given: Any) -> list[Tensor]:
    clip, graphs = given.get("clip"), given.get("graphs")
    losses = []
    for step in range(STEPS):
        if graphs is None:
            losses.append(backward(model, batch(step, device)))
        else:
            with graphs.step():
                losses.append(backward(model, batch(step, device)))
        if clip is not None:
            clip(step, model)
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, optimizer, losses)


@on_devices
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_has_the_bits_of_ordinary_steps(options, device):
    dtype = torch.bfloat16 if "seed" in options else None
    model = build(device, dtype)
    other = copy.deepcopy(model)
    expected = train(other, AdamW(groups_of(other), lr=1e-2, **options), device)
    optimizer = AdamW(groups_of(model), lr=1e-2, **options)
    UpdateInBackward(optimizer)
    found = train(model, optimizer, device)
    assert all(map(torch.equal, found, expected))


def test_a_weight_decay_that_is_a_tensor_is_applied_as_well():
    model = build("cpu")
    other = copy.deepcopy(model)
    results = []
    for trained, in_backward in ((other, False), (model, True)):
        optimizer = AdamW(trained.parameters(), lr=1e-2, weight_decay=0.5)
        tensor_hyperparameters(optimizer, weight_decay=True)
        if in_backward:
            UpdateInBackward(optimizer)
        results.append(train(trained, optimizer, "cpu"))
    assert all(map(torch.equal, *results))


class Tied(nn.Module):
    """One matrix at both ends, which gets its gradient from two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(64, 64), nn.Linear(64, 64)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.layer(self.embedding(tokens)) @ self.embedding.weight.T
        self.loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self


@on_devices
def test_a_weight_with_two_uses_is_updated_once(device):
    torch.manual_seed(0)
    model = Tied().to(device)
    other = copy.deepcopy(model)
    expected = train(other, AdamW(other.parameters(), lr=1e-2), device)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    UpdateInBackward(optimizer)
    assert all(map(torch.equal, train(model, optimizer, device), expected))


def test_muon_has_the_bits_of_ordinary_steps():
    model = build("cpu")
    other = copy.deepcopy(model)
    results = []
    for trained, in_backward in ((other, False), (model, True)):
        matrices, others = groups_of(trained)
        optimizer = Muon([matrices | dict(muon=True), others | dict(muon=False)], lr=1e-2)
        if in_backward:
            UpdateInBackward(optimizer)
        results.append(train(trained, optimizer, "cpu"))
    assert all(map(torch.equal, *results))


@on_devices
def test_no_gradient_outlives_the_next_one(device):
    model = build(device)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    UpdateInBackward(optimizer)
    counts = []

    def count(_: Tensor) -> None:
        counts.append(sum(p.grad is not None for p in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    backward(model, batch(0, device))
    assert counts == [0] * len(list(model.parameters()))


def by_previous_norm(max_norm: float) -> Any:
    """Clipping by the norm of the step before; in the first step each weight by its own."""
    norms: list[Tensor] = []

    def clip(step: int, model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters()]
        norms.append(total_norm(gradients))
        if step == 0:
            for parameter in model.parameters():
                clip_grad_norm([parameter], max_norm)
        else:
            factor = (max_norm / (norms[-2] + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)

    return clip


def by_own_norm(max_norm: float) -> Any:
    def clip(step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            clip_grad_norm([parameter], max_norm)

    return clip


@on_devices
@pytest.mark.parametrize(("clip_by", "reference"), [
    ("previous", by_previous_norm), ("weight", by_own_norm),
])  # fmt: skip
def test_it_clips_as_it_says(clip_by, reference, device):
    model = build(device)
    other = copy.deepcopy(model)
    expected = train(other, AdamW(other.parameters(), lr=1e-2), device, clip=reference(0.05))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    updates = UpdateInBackward(optimizer, max_norm=0.05, clip_by=clip_by)
    torch.testing.assert_close(train(model, optimizer, device), expected, rtol=1e-5, atol=1e-6)
    backward(other, batch(STEPS - 1, device))
    assert 0 < float(updates.grad_norm) < 100


@on_devices
def test_graphs_change_no_bit(device):
    model = build(device)
    other = copy.deepcopy(model)
    results = []
    for trained, scopes in ((other, None), (model, "attn,moe")):
        optimizer = AdamW(trained.parameters(), lr=1e-2)
        UpdateInBackward(optimizer, max_norm=0.05)
        graphs = None
        if scopes is not None:
            graphs = moe_graphs.graph(trained, moe_graphs.GraphConfig(scopes))
        results.append(train(trained, optimizer, device, graphs=graphs))
    assert all(map(torch.equal, *results))
    report = graphs.report()
    assert report.eager_calls.keys() == {"warmup"}
    assert report.matched == 2 * (STEPS - 3)
    # Memory in place would be that of all gradients.
    assert [scope.gradients_in_place for scope in report.scopes] == [0] * len(report.scopes)
    assert all(scope.copied_gradients["freed_in_backward"] for scope in report.scopes)


@on_devices
def test_whole_steps_change_no_bit(device):
    model = build(device)
    other = copy.deepcopy(model)
    results = []
    for trained, whole in ((other, False), (model, True)):
        optimizer = AdamW(trained.parameters(), lr=1e-2)
        updates = UpdateInBackward(optimizer, max_norm=0.05)

        def step(tokens: Tensor, trained=trained, optimizer=optimizer) -> Tensor:
            loss = backward(trained, tokens)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run: Any = step
        if whole:
            given = dict(model=trained, optimizer=optimizer, state=[updates])
            run = moe_graphs.FullIteration(step, **given)
        losses = [run(batch(number, device)).clone() for number in range(STEPS)]
        results.append(everything(trained, optimizer, losses))
    assert all(map(torch.equal, *results))
    assert run.report().matched == STEPS - 3


def test_a_run_goes_on_with_the_same_bits():
    model, results = build("cpu"), []
    optimizer = AdamW(model.parameters(), lr=1e-2)
    updates = UpdateInBackward(optimizer, max_norm=0.05)
    for resumed in (False, True):
        for step in range(2, 4) if resumed else range(4):
            if step == 2 and not resumed:
                saved = copy.deepcopy((model, optimizer.state_dict(), updates.state_dict()))
            backward(model, batch(step, "cpu"))
            optimizer.step()
        results.append(everything(model, optimizer, []))
        model = saved[0]
        for parameter in model.parameters():
            parameter._post_accumulate_grad_hooks = None
        optimizer = AdamW(model.parameters(), lr=1e-2)
        optimizer.load_state_dict(saved[1])
        updates = UpdateInBackward(optimizer, max_norm=0.05)
        updates.load_state_dict(saved[2])
    assert all(map(torch.equal, *results))


def test_closed_it_leaves_updates_to_steps():
    model = build("cpu")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    updates = UpdateInBackward(optimizer)
    backward(model, batch(0, "cpu"))
    optimizer.step()
    updates.close()
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, batch(1, "cpu"))
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_second_backward_of_a_step_is_an_error():
    model = build("cpu")
    UpdateInBackward(AdamW(model.parameters(), lr=1e-2))
    backward(model, batch(0, "cpu"))
    with pytest.raises(RuntimeError, match="a second backward within a step"):
        backward(model, batch(1, "cpu"))


def test_what_does_not_fit_is_an_error():
    model = build("cpu")
    with pytest.raises(TypeError, match="wants a moe_graphs.optim.AdamW, got SGD"):
        UpdateInBackward(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = AdamW(model.parameters())
    with pytest.raises(ValueError, match="max_norm: 0"):
        UpdateInBackward(optimizer, max_norm=0)
    with pytest.raises(ValueError, match="clip_by='layer': accepted are 'previous', 'weight'"):
        UpdateInBackward(optimizer, clip_by="layer")
