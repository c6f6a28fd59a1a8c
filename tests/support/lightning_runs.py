"""Small trainings under Lightning, whose every number is kept, to be compared bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch", reason="waits for lightning")

QUIET = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*dataloader_iter. "),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BATCHES, SIZE = 11, 4


class Regression(pl.LightningModule):
    """Dropout, logging and a rate that changes every step."""

    def __init__(self, optimizer: str = "AdamW", dropout: float = 0.25) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.GELU())
        self.head = nn.Linear(8, 1)
        self.optimizer_name = optimizer
        self.losses: list[torch.Tensor] = []
        self.logged: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = (self.head(self.body(inputs)) - targets).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"largest": inputs.max(), "mean": inputs.mean()})
        return {"loss": loss, "targets": targets.sum()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())
        self.log("seen", float(batch_idx))
        metrics = self.trainer.callback_metrics.items()
        self.logged.append({name: value.cpu().clone() for name, value in metrics})

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", (self.head(self.body(inputs)) - targets).square().mean())

    def configure_optimizers(self):
        kinds = {
            "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, capturable=True),
            "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        }
        optimizer = kinds[self.optimizer_name](self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader(bad_batch: int | None = None, partial: bool = False) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCHES * SIZE, 6, generator=generator)
    if bad_batch is not None:
        inputs[bad_batch * SIZE, 0] = float("inf")
    if partial:
        inputs = inputs[:-1]
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=SIZE)


def trainer(folder: Path, device: str, *callbacks: pl.Callback, **options) -> pl.Trainer:
    defaults = {
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 3,  # between training's batches, what graphs leave alone
        "log_every_n_steps": 1,
    }
    return pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{**defaults, **options},
    )


def fit(folder, device, *callbacks, make=Regression, train=None, ckpt=None, **options):
    torch.manual_seed(0)
    module = make()
    run = trainer(folder, device, *callbacks, **options)
    run.fit(module, train or loader(), loader(), ckpt_path=ckpt)
    return module.cpu(), run


def assert_same(left: pl.LightningModule, right: pl.LightningModule) -> None:
    """Bit for bit: parameters, losses and what was logged, at every batch, and where it ended."""
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(left.state_dict(), right.state_dict(), **exactly)
    torch.testing.assert_close(left.losses, right.losses, **exactly)
    torch.testing.assert_close(left.logged, right.logged, **exactly)
    assert left.trainer.global_step == right.trainer.global_step
    for kind in ("logged_metrics", "progress_bar_metrics"):
        metrics = [dict(getattr(each.trainer, kind)) for each in (left, right)]
        torch.testing.assert_close(*metrics, **exactly, check_device=False)
