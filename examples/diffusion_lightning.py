"""A small UNet learns to draw digits: fp16, loss scaling, a graph for whole batches, in Lightning.

    python examples/diffusion_lightning.py            # on a GPU: whole steps as one graph
    python examples/diffusion_lightning.py --eager    # the same without graphs

Noise and times are drawn inside the graph, new ones at every replay. On a machine without a GPU it
runs in bf16 on the project's CPU recorder, slowly: add ``--epochs 1``. Without scikit-learn the
images are random squares.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from unet import UNet, rates

from moe_graphs.integrations.lightning import GraphWholeSteps


class Denoiser(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.unet = UNet(width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (images,) = batch
        noise, times = torch.randn_like(images), torch.rand(len(images), device=images.device)
        signal_rate, noise_rate = rates(times)
        noisy = signal_rate * images + noise_rate * noise
        loss = F.mse_loss(self.unet(noisy, times).float(), noise)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True, capturable=True)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 50))
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]

    @torch.no_grad()
    def sample(self, count: int, steps: int = 50) -> Tensor:
        """Images from noise, by DDIM."""
        images = torch.randn(count, 1, 8, 8, device=self.device)
        grid = torch.linspace(0.98, 0.0, steps + 1, device=self.device)
        for now, then in itertools.pairwise(grid):
            noise = self.unet(images, now.expand(count))
            signal_rate, noise_rate = rates(now.expand(count))
            clean = ((images - noise_rate * noise) / signal_rate).clamp(-1, 1)
            signal_rate, noise_rate = rates(then.expand(count))
            images = signal_rate * clean + noise_rate * noise
        return images


def digits() -> Tensor:
    """``[1797, 1, 8, 8]`` between -1 and 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        images = -torch.ones(1797, 1, 8, 8)
        for image, (row, column) in zip(images, torch.randint(5, (1797, 2)), strict=True):
            image[:, row : row + 4, column : column + 4] = 1.0
        return images
    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1


def draw(images: Tensor) -> str:
    shades = " .:-=+*#%@"
    levels = ((images[:, 0] + 1) / 2 * 9.99).clamp(0, 9).int().tolist()
    return "\n".join(
        "   ".join("".join(2 * shades[level] for level in image[row]) for image in levels)
        for row in range(8)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    pl.seed_everything(0)
    on_gpu = torch.cuda.is_available()
    images = TensorDataset(digits())
    batches = BatchSampler(RandomSampler(images), options.batch_size, drop_last=True)
    loader = DataLoader(images, sampler=batches, batch_size=None)  # one gather a batch
    module = Denoiser(options.width)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision="16-mixed" if on_gpu else "bf16-mixed",
        callbacks=[] if options.eager else [GraphWholeSteps()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    started = time.perf_counter()
    trainer.fit(module, loader)
    seconds = time.perf_counter() - started
    print(
        f"{trainer.global_step} steps in {seconds:.1f} s, loss {trainer.logged_metrics['loss']:.4f}"
    )
    print(draw(module.eval().sample(6).cpu()))


if __name__ == "__main__":
    main()
