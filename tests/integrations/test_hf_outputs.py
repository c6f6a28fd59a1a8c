"""Every output flag of transformers, and checkpointing: training is bitwise that without graphs."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
from grids import by_turns  # noqa: E402
from hf_families import Texts, counted, implementation_of, tiny  # noqa: E402
from moe_graphs import GraphConfig  # noqa: E402
from moe_graphs.integrations.transformers import GraphCallback, accelerate_model  # noqa: E402

STEPS, LAYERS = 6, 2
KEYS = ("router_logits", "hidden_states", "attentions")
FLAGS = [("output_router_logits",), ("output_hidden_states",), ("output_attentions",)]
FLAGS.append(sum(FLAGS, ()))


def made(family="qwen3_moe"):
    model = tiny(family, implementation_of(family))
    model.set_attn_implementation("eager")  # SDPA has no attention weights to give
    return model


def step_of(model, accelerated, number, flags):
    """One step whose loss depends on everything that was asked for."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, 128, (2, 16), generator=generator)
    with accelerated.step():
        output = model(input_ids=tokens, labels=tokens, **dict.fromkeys(flags, True))
        found = [tensor for key in KEYS for tensor in output.get(key) or ()]
        loss = output.loss + sum(tensor.square().mean() for tensor in found)
        loss.backward()
    return [loss.detach(), *(tensor.detach().clone() for tensor in found)]


def run(model, accelerated, flags_of, between=None):
    """Losses, everything that was given out, and the parameters."""
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for number in range(STEPS):
        if between is not None:
            between(model, number)
        found += step_of(model, accelerated, number, flags_of(number))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach() for p in model.parameters())]


def both(flags_of, family="qwen3_moe", between=None, **options):
    """The report of a run with graphs that was compared with one without."""
    model = made(family)
    expected = run(model, accelerate_model(model, graphs=False), flags_of, between)
    model = made(family)
    accelerated = accelerate_model(model, **options)
    found = run(model, accelerated, flags_of, between)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return accelerated.graphs.report()


@pytest.mark.parametrize(
    ("flags", "family"),
    by_turns(["+".join(each) for each in FLAGS], ["llama", "mixtral", "gpt_oss", "qwen3_moe"]),
)
def test_what_a_flag_asks_for_leaves_the_graphs(flags, family):
    flags = tuple(flags.split("+"))
    if family == "llama":  # a dense model has no routers
        flags = tuple(flag for flag in flags if flag != "output_router_logits")
    report = both(lambda number: flags, family)
    assert report.eager_calls == {"warmup": 3 * LAYERS}
    assert report.matched == (STEPS - 3) * LAYERS


def test_a_flag_that_comes_and_goes_runs_eagerly_and_is_counted():
    report = both(lambda number: ("output_router_logits",) if number == 4 else ())
    assert report.matched == (STEPS - 4) * LAYERS
    assert report.eager_calls == {"warmup": 3 * LAYERS, "structure": LAYERS}


def test_evaluation_with_flags_between_replays():
    def evaluate(model, number):
        with torch.no_grad():
            output = model(input_ids=torch.arange(3, 19)[None], output_router_logits=True)
        assert len(output.router_logits) == LAYERS

    report = both(lambda number: (), between=evaluate)
    assert report.matched == (STEPS - 3) * LAYERS
    assert report.eager_calls == {"warmup": 3 * LAYERS, "no_grad": STEPS * LAYERS}


def test_a_part_of_a_block_that_holds_the_router_runs_eagerly_by_name():
    parts = GraphConfig("moe_router,moe_preprocess")
    report = both(lambda number: ("output_router_logits",), graphs=parts)
    assert report.eager_calls == {"output_router_logits": STEPS * LAYERS}


@pytest.mark.parametrize(("flag", "since"), by_turns([None, "output_router_logits"], [0, 4]))
def test_checkpointing_after_acceleration(since, flag):
    flags = () if flag is None else (flag,)

    def enable(model, number):
        if number == since:
            newer = hasattr(model, "activation_checkpointing_enable")
            name = "activation" if newer else "gradient"
            getattr(model, f"{name}_checkpointing_enable")()

    report = both(lambda number: flags, between=enable)
    # Graphs of layers that keep their activations do not serve layers that recompute them.
    late = {"checkpointing": (STEPS - since) * LAYERS} if since else {}
    assert counted(report) == {"warmup": 3 * LAYERS, **late}
    assert report.matched == ((since or STEPS) - 3) * LAYERS


def test_checkpointing_that_ends_in_the_warm_up():
    def between(model, number):
        for layer in model.model.layers:
            layer.gradient_checkpointing = number < 1
            layer._gradient_checkpointing_func = functools.partial(
                torch.utils.checkpoint.checkpoint, use_reentrant=False
            )

    report = both(lambda number: ("output_router_logits",), between=between)
    assert counted(report) == {"warmup": 3 * LAYERS}
    assert report.matched == (STEPS - 3) * LAYERS
    assert not any(scope.recomputed_bytes for scope in report.scopes)


def test_undo_and_copies_collect_as_before():
    model = made()
    accelerated = accelerate_model(model)
    run(model, accelerated, lambda number: FLAGS[-1])
    copied = copy.deepcopy(model)
    tokens = torch.arange(3, 19)[None]
    flags = dict.fromkeys(FLAGS[-1], True)
    with torch.no_grad():
        output, of_copy = model(tokens, **flags), copied(tokens, **flags)
    accelerated.undo()
    for key in KEYS:
        assert all(map(torch.equal, output[key], of_copy[key]))
        assert len(output[key]) == len(model(tokens, **flags)[key])


def test_a_forward_that_raises_leaves_the_collector_as_it_was(monkeypatch):
    model = made()
    accelerated = accelerate_model(model)
    expected = step_of(model, accelerated, 0, FLAGS[0])
    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_of(model, accelerated, 0, FLAGS[0])
    monkeypatch.undo()
    assert all(map(torch.equal, step_of(model, accelerated, 0, FLAGS[0]), expected))


@pytest.mark.parametrize(
    "flag",
    ["output_router_logits", pytest.param("output_hidden_states", marks=pytest.mark.long)],
)
def test_trainer_trains_to_the_end_with_the_flag_in_the_configuration(flag, tmp_path):
    runs = []
    for graphs in (False, True):
        model = made()
        setattr(model.config, flag, True)
        callback = GraphCallback(graphs=graphs)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Texts(40), callbacks=[callback]
        )
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        runs.append([torch.tensor(losses), *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *runs))
    assert callback.report.matched == (STEPS - 3) * LAYERS
