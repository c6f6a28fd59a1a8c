"""Updates within the backward under transformers' Trainer, with graphs and checkpointing."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
from hf_families import Texts, tiny  # noqa: E402
from moe_graphs.integrations.transformers import GraphCallback  # noqa: E402
from moe_graphs.optim import AdamW  # noqa: E402
from moe_graphs.training.update_in_backward import UpdateInBackward  # noqa: E402

STEPS = 6


def train(folder, *, in_backward, graphs, checkpointing):
    model = tiny("qwen3_moe", "grouped_mm")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if in_backward:
        UpdateInBackward(optimizer)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, max_grad_norm=0,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    callback = GraphCallback(graphs=graphs)
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Texts(40),
        callbacks=[callback],
        optimizers=(optimizer, None),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, list(model.parameters()), callback.report


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_has_the_bits_of_ordinary_steps(checkpointing, tmp_path):
    given = dict(checkpointing=checkpointing)
    losses, parameters, _ = train(tmp_path / "a", in_backward=False, graphs=False, **given)
    for graphs in (False, True):
        found = train(tmp_path / "b", in_backward=True, graphs=graphs, **given)
        assert found[0] == losses
        assert all(map(torch.equal, found[1], parameters))
    assert found[2].matched == 2 * (STEPS - 3)
    assert found[2].eager_calls == {"warmup": 6}
