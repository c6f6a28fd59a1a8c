"""PEFT's models: the same training with graphs and without, in either order, under Trainer too."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra peft")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
from grids import by_turns  # noqa: E402
from hf_families import Texts, tiny  # noqa: E402
from moe_graphs.integrations.transformers import (  # noqa: E402
    GraphCallback,
    accelerate_model,
    causal_lm_loss,
)

FAMILIES = ("qwen3_moe", "llama")
STEPS = 6


def base(family):
    return tiny(family, "grouped_mm" if family == "qwen3_moe" else None)


def with_lora(model, task_type="CAUSAL_LM"):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=task_type)
    return peft.get_peft_model(model, config)


def losses(model, accelerated):
    """The losses of six steps of a loop that asks for nothing, and the trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(3, 128, (2, 16), generator=generator)
        with accelerated.step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(p.detach() for p in trained)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_changed_on_the_model_that_uses_it(family):
    model = with_lora(base(family))
    inner = model.get_base_model()
    before = inner.loss_function
    accelerated = accelerate_model(model, graphs=False)
    (change,) = [change for change in accelerated.changes if change.part == "loss"]
    assert change.done
    assert inner.loss_function is causal_lm_loss
    assert "loss_function" not in vars(model)
    accelerated.undo()
    assert inner.loss_function is before
    assert "_loss_function" not in vars(inner)


@pytest.mark.parametrize(("task_type", "family"), by_turns(["CAUSAL_LM", None], FAMILIES))
def test_both_orders_replay_and_ask_for_nothing(family, task_type):
    model = with_lora(base(family), task_type)
    expected = losses(model, accelerate_model(model, graphs=False))
    for lora_first in (True, False):
        model = base(family)
        if lora_first:
            model = with_lora(model, task_type)
        accelerated = accelerate_model(model)
        if not lora_first:
            model = with_lora(model, task_type)
        found = losses(model, accelerated)
        if lora_first:
            assert all(map(torch.equal, expected, found))
        else:  # PEFT's own forward, which rounds otherwise
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert ("apply PEFT before" in str(accelerated)) is not lora_first
        report = accelerated.graphs.report()
        assert report.eager_calls == {"warmup": 2 * 3}, lora_first
        assert report.matched == 2 * (STEPS - 3), lora_first


def trained(family, callback, folder):
    """The losses that Trainer logs, and the trained parameters."""
    model = with_lora(base(family))
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
        save_steps=STEPS, report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Texts(40), callbacks=[callback])
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return model, logged, [p.detach() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_ends_saves_and_leaves_the_model_as_it_was(family, tmp_path):
    callback = GraphCallback()
    model, logged, parameters = trained(family, callback, tmp_path / "graphed")
    plain = trained(family, GraphCallback(graphs=False), tmp_path / "plain")
    assert logged == plain[1]
    assert all(map(torch.equal, parameters, plain[2]))
    assert callback.report.matched == 2 * (STEPS - 3)
    saved = tmp_path / "graphed" / f"checkpoint-{STEPS}" / "adapter_model.safetensors"
    assert saved.is_file()
    inner = model.get_base_model()
    assert "_loss_function" not in vars(inner)
    assert not inner.base_model._forward_pre_hooks
