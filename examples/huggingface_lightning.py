"""Trains a checkpoint of Hugging Face's with Lightning, a batch as one graph.

python examples/huggingface_lightning.py runs/checkpoint
"""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from huggingface_checkpoint import token_batches
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

from moe_graphs.integrations.lightning import GraphWholeSteps
from moe_graphs.integrations.transformers import accelerate_model
from moe_graphs.optim import AdamW

STEPS = 20


class Finetuning(pl.LightningModule):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
        print(accelerate_model(self.model, whole_steps=True))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-3)


def main(directory: Path) -> None:
    rows = token_batches(directory, STEPS).flatten(0, 1)
    trainer = pl.Trainer(
        max_steps=STEPS,
        precision="bf16-mixed",
        callbacks=[GraphWholeSteps()],
        default_root_dir="runs/lightning",
        logger=False,
    )
    trainer.fit(Finetuning(directory), DataLoader(TensorDataset(rows), batch_size=4))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
