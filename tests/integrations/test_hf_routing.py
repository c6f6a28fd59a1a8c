"""Experts of one pass that are used in another, for blocks of transformers and for swapped ones."""

from __future__ import annotations

import copy

import pytest
import torch

from moe_graphs import FullIteration, routing
from moe_graphs.integrations.transformers import accelerate_model, swap_moe_layers

pytest.importorskip("transformers", reason="needs the extra hf")
from hf_families import FAMILIES, loss_and_gradients, skip_unknown, tiny, tokens

LONG = pytest.mark.long
TOKENS, EXPERTS, TOP_K = 32, 8, 2  # of a batch of ``tokens()`` and of the tiny models
SHORT = {"qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe", "afmoe", "deepseek_v4"}
OPTIONS = {"deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]}}
PLACES = [
    pytest.param(family, marks=() if family in SHORT else LONG)
    for family in FAMILIES
    if family != "phimoe"
]


def model_of(family: str) -> torch.nn.Module:
    """A tiny model whose routers prefer experts clearly."""
    skip_unknown(family)
    model = tiny(family, "grouped_mm", **OPTIONS.get(family, {}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.normal_()
    return model


def other_choices(layers: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(layers, TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("family", PLACES)
def test_own_choices_again_are_bitwise_the_plain_pass(family):
    model = model_of(family)
    plain = loss_and_gradients(model, tokens())
    with routing.record(model) as choices:
        recorded = loss_and_gradients(model, tokens())
    assert {each.shape for each in choices} == {(TOKENS, TOP_K)}
    with routing.replay(model, choices):
        replayed = loss_and_gradients(model, tokens())
    assert same(plain, recorded)
    assert same(plain, replayed)
    with routing.replay(model, other_choices(len(choices))):
        assert not same(plain, loss_and_gradients(model, tokens()))
    assert same(plain, loss_and_gradients(model, tokens()))  # nothing is left of the blocks


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=LONG)])
def test_swapped_blocks_compute_the_same_for_given_experts(family):
    model, found = model_of(family), []
    choices = other_choices(2)
    for swapped in (False, True):
        if swapped:
            assert [each.count for each in swap_moe_layers(model).changes if each.done] == [2]
        with routing.replay(model, choices):
            found.append(loss_and_gradients(model, tokens()))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*chooses experts from now on")
def test_a_router_that_was_changed_after_the_swap_takes_given_experts_too():
    model = model_of("qwen3_moe")
    swap_moe_layers(model)
    for module in model.modules():
        if hasattr(module, "why_own"):
            module.gate.register_forward_hook(lambda *_: None)
    with routing.record(model) as choices:
        plain = loss_and_gradients(model, tokens())
    with routing.replay(model, choices):
        assert same(plain, loss_and_gradients(model, tokens()))
    with routing.replay(model, other_choices(2)):
        assert not same(plain, loss_and_gradients(model, tokens()))


def train(
    family: str, *, graphs: bool, kind: str, use_reentrant: bool | None
) -> list[torch.Tensor]:
    """Two microbatches a step with choices of their own; backwards after both blocks."""
    model = model_of(family)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    accelerated = accelerate_model(model, graphs=graphs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for step in range(5):
        losses = []
        with accelerated.step():
            for number in (2 * step, 2 * step + 1):
                replaying = routing.replay(model, other_choices(2, number))
                ids = tokens().roll(number, 1)
                with replaying if kind == "replay" else routing.record(model) as choices:
                    losses.append(model(input_ids=ids, labels=ids).loss)
                found += choices or []
            for loss in losses:
                loss.backward()
        found += [*losses, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    if graphs:
        report = accelerated.graphs.report()
        assert report.eager_calls.keys() == {"warmup"}
        assert report.replayed > 0
    return found


@pytest.mark.filterwarnings("ignore:.*use_cache")
@pytest.mark.parametrize(
    ("family", "kind", "use_reentrant"),
    [
        ("qwen3_moe", "replay", False),  # swapped blocks
        # transformers' own
        pytest.param("gpt_oss", "replay", False, marks=LONG),
        ("gpt_oss", "record", None),
        pytest.param("qwen3_moe", "replay", None, marks=LONG),
        pytest.param("qwen3_moe", "replay", True, marks=LONG),
        pytest.param("qwen3_moe", "record", False, marks=LONG),
        pytest.param("gpt_oss", "replay", True, marks=LONG),
    ],
)
def test_graphs_of_layers_are_bitwise_eager(family, kind, use_reentrant):
    runs = [
        train(family, graphs=graphs, kind=kind, use_reentrant=use_reentrant)
        for graphs in (False, True)
    ]
    assert len(runs[0]) == len(runs[1])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_without_graphs_recomputes_with_the_choices_of_the_forward(use_reentrant):
    runs = []
    for checkpointing in (False, True):
        model, losses = model_of("qwen3_moe"), []
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        for seed in (1, 2):
            with routing.replay(model, other_choices(2, seed)):
                losses.append(model(input_ids=tokens(), labels=tokens(), use_cache=False).loss)
        for loss in losses:
            loss.backward()
        runs.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *runs))


def test_a_whole_step_takes_choices_as_input():
    def steps(whole: bool) -> list[torch.Tensor]:
        model = model_of("gpt_oss")
        accelerate_model(model, whole_steps=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            with routing.replay(model, batch["choices"]):
                loss = model(input_ids=batch["ids"], labels=batch["ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = FullIteration(step, model=model, optimizer=optimizer, on_mismatch="error")
        batches = [{"ids": tokens().roll(i, 1), "choices": other_choices(2, i)} for i in range(5)]
        losses = [(run if whole else step)(batch).clone() for batch in batches]
        assert not whole or run.report().replayed > 0
        return [*losses, *(p.detach() for p in model.parameters())]

    assert all(map(torch.equal, steps(False), steps(True)))


def test_a_policy_in_fp32_is_nearer_to_its_rollout_in_bf16_on_the_experts_of_the_rollout():
    """The reason for routing replay; without it, 19 % of the tokens choose other experts here."""
    sizes = dict(num_experts_per_tok=8, num_hidden_layers=4)
    experts = dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 64)
    policy, ids = tiny("deepseek_v3", "grouped_mm", **sizes, **experts), tokens()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "proj" in name:
                parameter.mul_(3)

    def log_probabilities(model):
        logits = model(input_ids=ids).logits.float()
        return logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])

    rollout = copy.deepcopy(policy).bfloat16()
    with torch.no_grad():
        with routing.record(rollout) as choices:
            old = log_probabilities(rollout)
        plain = (log_probabilities(policy) - old).abs().mean()
        with routing.replay(policy, choices):
            replayed = (log_probabilities(policy) - old).abs().mean()
    assert replayed < plain / 3


@pytest.mark.parametrize(
    ("family", "is_swapped"),
    [("qwen3_moe", True), ("qwen3_moe", False), pytest.param("deepseek_v4", False, marks=LONG)],
)
def test_a_watch_counts_what_a_model_chooses(family, is_swapped):
    model = model_of(family)
    if is_swapped:
        swap_moe_layers(model)
    plain = loss_and_gradients(model, tokens())
    watch = routing.watch(model)
    with routing.record(model) as choices:
        assert same(plain, loss_and_gradients(model, tokens()))
    assert same(plain, loss_and_gradients(model, tokens()))
    counts = [2 * each.flatten().bincount(minlength=EXPERTS) for each in choices]
    report = watch.report()
    assert [layer.pairs for layer in report.layers] == [tuple(each.tolist()) for each in counts]
    assert report.scalars().keys() == {"experts/max_over_mean", "experts/unused"}
    watch.close()
    assert same(plain, loss_and_gradients(model, tokens()))
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_family_that_chooses_without_topk_is_refused():
    model = tiny("phimoe", "grouped_mm")
    with pytest.raises(ValueError, match="PhimoeSparseMoeBlock has 0 routers"):
        routing.record(model).__enter__()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_graphs_on_a_gpu_are_bitwise_eager(family):
    runs = []
    for graphs in (False, True):
        model = model_of(family).to("cuda", torch.bfloat16)
        accelerated, losses = accelerate_model(model, graphs=graphs), []
        for number in range(5):
            ids = tokens("cuda").roll(number, 1)
            with accelerated.step():
                with routing.replay(model, other_choices(2, number).cuda()):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            losses.append(loss.detach())
        runs.append([*losses, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *runs))
