"""transformers' models under Lightning, evaluated, saved and resumed: the same bit for bit."""

from __future__ import annotations

import pytest
import torch

from lightning_runs import QUIET, assert_same, pl, trainer
from moe_graphs import GraphConfig
from moe_graphs.integrations.lightning import GraphScopes, GraphWholeSteps
from moe_graphs.integrations.transformers import accelerate_model
from training_runs import DEVICES

pytest.importorskip("transformers", reason="needs the extra hf")
from hf_families import tiny

pytestmark = QUIET
ACCUMULATED = 2
UPDATES = {"cpu": 16, "cuda": 60}
CALLBACKS = {
    "scopes": lambda: GraphScopes(GraphConfig("model.model.layers.*", warmup_steps=2)),
    "whole steps": lambda: GraphWholeSteps(warmup_steps=2),
}


class Finetuning(pl.LightningModule):
    def __init__(self, device: str) -> None:
        super().__init__()
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = tiny("qwen3_moe", "grouped_mm", moe_intermediate_size=64)
        self.model = model.to(dtype)
        accelerate_model(self.model, whole_steps=True)
        self.losses: list[torch.Tensor] = []
        self.logged: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self):
        capturable = next(self.parameters()).is_cuda
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True, capturable=capturable)


def fit(folder, device, *callbacks, ckpt=None):
    updates = UPDATES[device]
    saved = pl.callbacks.ModelCheckpoint(
        folder, "{epoch}", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1
    )
    torch.manual_seed(0)
    module = Finetuning(device)
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(3, 128, (ACCUMULATED * updates, 16), generator=generator)
    train = torch.utils.data.DataLoader(texts, batch_size=2)
    evaluate = torch.utils.data.DataLoader(texts[:4], batch_size=2)
    run = trainer(
        folder, device, saved, *callbacks, max_epochs=2, accumulate_grad_batches=ACCUMULATED,
        val_check_interval=ACCUMULATED * updates // 8, enable_checkpointing=True,
    )  # fmt: skip
    run.fit(module, train, evaluate, ckpt_path=ckpt)
    return module.cpu(), folder / "epoch=0.ckpt"


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", CALLBACKS)
@pytest.mark.long
def test_it_is_lightnings_training(tmp_path, device, kind):
    eager, _ = fit(tmp_path / "eager", device)
    callback = CALLBACKS[kind]()
    graphed, checkpoint = fit(tmp_path / "graphed", device, callback)
    reports = [callback.report] if kind == "scopes" else callback.reports
    assert all(report.replayed > 0 for report in reports)
    assert_same(eager, graphed)
    resumed, _ = fit(tmp_path / "resumed", device, CALLBACKS[kind](), ckpt=checkpoint)
    half = UPDATES[device] // 2 * ACCUMULATED
    assert len(resumed.losses) == half
    torch.testing.assert_close(resumed.losses, eager.losses[half:], rtol=0, atol=0)
    torch.testing.assert_close(resumed.state_dict(), eager.state_dict(), rtol=0, atol=0)
