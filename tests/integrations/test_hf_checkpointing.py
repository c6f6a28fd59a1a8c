"""Gradient checkpointing of transformers, before and after acceleration, in graphs of layers."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
from grids import by_turns  # noqa: E402
from hf_families import counted, implementation_of, tiny  # noqa: E402
from moe_graphs import GraphWarning  # noqa: E402
from moe_graphs.integrations.transformers import accelerate_model  # noqa: E402

STEPS, LAYERS = 7, 2


def switch(model, kind="enable", **options):
    newer = hasattr(model, "activation_checkpointing_enable")
    name = "activation" if newer else "gradient"
    given = {f"{name}_checkpointing_kwargs": options} if options else {}
    getattr(model, f"{name}_checkpointing_{kind}")(**given)


def made(family="qwen3_moe", dropout=0.1):
    model = tiny(family, implementation_of(family))
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    return model.train()


def trained(model, accelerated, between=None, microbatches=2, flags=()):
    """Losses, gradients, parameters and a random number, after ``STEPS`` steps."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters())
    left = []
    for number in range(STEPS):
        if between is not None:
            between(model, number)
        with accelerated.step():
            for _ in range(microbatches):
                tokens = torch.randint(3, 128, (2, 16)).to(model.device)
                output = model(input_ids=tokens, labels=tokens, **dict.fromkeys(flags, True))
                output.loss.backward()
                left.append(output.loss.detach())
        left += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    left += [p.detach().clone() for p in model.parameters()]
    return [*left, torch.rand(2, device=model.device)]


def compared(before=None, between=None, family="qwen3_moe", device="cpu", flags=(), **options):
    """The report of a run with graphs that was compared with one without, and both models."""
    found = []
    for graphs in (False, True):
        model = made(family).to(device)
        if before is not None:
            before(model)
        accelerated = accelerate_model(model, graphs=graphs, **options)
        found.append(trained(model, accelerated, between, flags=flags))
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
    return accelerated.graphs.report(), accelerated, model


@pytest.mark.parametrize(
    ("reentrant", "family"), by_turns([False, True], ["qwen3_moe", "gpt_oss", "llama"])
)
def test_on_before_acceleration(family, reentrant):
    report, accelerated, _ = compared(
        lambda model: switch(model, use_reentrant=reentrant), family=family
    )
    assert counted(report) == {"warmup": 3 * 2 * LAYERS}
    assert report.matched == (STEPS - 3) * 2 * LAYERS
    assert all(scope.recomputed_bytes > 0 for scope in report.scopes)
    assert "gradient checkpointing" not in str(accelerated)


def test_on_after_acceleration():
    def enable(model, number):
        if number == 0:
            switch(model)

    report, _, _ = compared(between=enable)
    assert counted(report) == {"warmup": 3 * 2 * LAYERS}
    assert report.matched == (STEPS - 3) * 2 * LAYERS
    assert all(scope.recomputed_bytes > 0 for scope in report.scopes)


def test_off_and_another_kind_while_graphs_live_run_eagerly_and_are_counted():
    def between(model, number):
        if number in (0, 6):
            switch(model, use_reentrant=False)
        if number == 4:
            switch(model, "disable")
        if number == 5:
            switch(model, use_reentrant=True)

    with pytest.warns(GraphWarning, match="checkpointing of this scope was switched"):
        report, _, _ = compared(between=between)
    expected = {"warmup": 3 * 2 * LAYERS, "checkpointing": 2 * 2 * LAYERS}
    assert counted(report) == expected
    assert report.matched == 2 * 2 * LAYERS


@pytest.mark.parametrize("kind", ["own function", "every second layer"])
def test_what_is_not_known_runs_eagerly_by_name(kind):
    def own(function, *args):
        return checkpoint(function, *args, use_reentrant=False)

    def before(model):
        switch(model)
        if kind == "own function":
            for layer in model.model.layers:
                layer._gradient_checkpointing_func = own
        else:
            model.model.layers[1].gradient_checkpointing = False

    report, accelerated, _ = compared(before)
    if kind == "own function":
        assert counted(report) == {"gradient_checkpointing": STEPS * 2 * LAYERS}
        assert "gradient checkpointing by a function that is not known" in str(accelerated)
    else:
        assert counted(report) == {"warmup": 3 * 2 * LAYERS}
        assert [scope.recomputed_bytes > 0 for scope in report.scopes] == [True, False]


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.long)])
def test_outputs_that_flags_ask_for(reentrant):
    report, _, _ = compared(
        lambda model: switch(model, use_reentrant=reentrant), flags=("output_router_logits",)
    )
    if reentrant:  # they have no history there, so the auxiliary loss has no gradient
        assert counted(report) == {"output_router_logits": STEPS * 2 * LAYERS}
    else:
        assert counted(report) == {"warmup": 3 * 2 * LAYERS}
        assert report.matched == (STEPS - 3) * 2 * LAYERS


def test_evaluation_between_steps():
    def evaluate(model, number):
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.arange(3, 19)[None])
        model.train()

    report, _, _ = compared(switch, evaluate)
    assert counted(report) == {"warmup": 3 * 2 * LAYERS, "no_grad": STEPS * LAYERS}
    assert report.matched == (STEPS - 3) * 2 * LAYERS


def test_copies_and_the_undone_model_checkpoint_as_before():
    _, accelerated, model = compared(switch)
    copied = copy.deepcopy(model)
    accelerated.undo()
    for each in (copied, model):
        for layer in each.model.layers:
            function = layer._gradient_checkpointing_func
            assert type(function) is functools.partial
            assert function.func is checkpoint
            assert layer.gradient_checkpointing


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")  # flash attention's backward adds with atomics
@pytest.mark.parametrize("reentrant", [False, True])
def test_on_a_gpu(reentrant):
    report, _, _ = compared(
        lambda model: switch(model.to(torch.bfloat16), use_reentrant=reentrant), device="cuda"
    )
    assert counted(report) == {"warmup": 3 * 2 * LAYERS}
    assert report.matched == (STEPS - 3) * 2 * LAYERS


@pytest.mark.gpu
def test_pools_on_a_gpu_are_smaller():
    """Captures need eager memory once, so what graphs keep is compared."""
    pools = []
    for checkpointed in (False, True):
        model = tiny("llama", "eager", num_hidden_layers=8).to(torch.bfloat16).cuda()
        if checkpointed:
            switch(model)
        accelerated = accelerate_model(model)
        tokens = torch.randint(3, 128, (64, 64), device="cuda")
        for _ in range(6):
            with accelerated.step():
                model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()
        report = accelerated.graphs.report()
        pools.append(report.pool_bytes)
        assert counted(report) == {"warmup": 3 * 8}
        accelerated.undo()
    assert pools[1] < pools[0]
