"""A small UNet learns to draw digits: fp16, loss scaling, one graph per batch, through Lightning.

    python examples/diffusion_lightning.py            # on a GPU: whole steps as one graph
    python examples/diffusion_lightning.py --eager    # the same without graphs

Noise and times are drawn inside the graph, new ones at every replay. On a machine without a GPU it
runs in bf16 on the project's CPU recorder, slowly: add ``--epochs 1``. Without scikit-learn the
images are random squares.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from moe_graphs.integrations.lightning import GraphWholeSteps


class Block(nn.Module):
    """Two convolutions around a residual, shifted by the time's embedding."""

    def __init__(self, channels_in: int, channels_out: int, time_width: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.GroupNorm(8, channels_in), nn.GroupNorm(8, channels_out)
        self.conv_in = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.conv_out = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.shift = nn.Linear(time_width, channels_out)
        self.skip = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv_in(F.silu(self.norm_in(x))) + self.shift(time)[:, :, None, None]
        return self.skip(x) + self.conv_out(F.silu(self.norm_out(hidden)))


class UNet(nn.Module):
    """From 8x8 down to 1x1 and back, with skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, 5, width // 2)))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.first, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        sizes = [width, width, 2 * width, 4 * width]
        pairs = list(itertools.pairwise(sizes))
        self.down = nn.ModuleList(Block(a, b, width) for a, b in pairs)
        self.middle = Block(sizes[-1], sizes[-1], width)
        self.up = nn.ModuleList(Block(2 * b, a, width) for a, b in reversed(pairs))

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        hidden, skips = self.first(images), []
        for block in self.down:
            hidden = block(hidden, time)
            skips.append(hidden)
            hidden = F.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden, time)
        for block in self.up:
            hidden = F.interpolate(hidden, scale_factor=2.0)
            hidden = block(torch.cat([hidden, skips.pop()], 1), time)
        return self.last(hidden)


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

    def configure_optimizers(self):
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


def rates(times: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of image and noise at times 0 (image) to 1 (noise)."""
    angles = (times * math.pi / 2)[:, None, None, None]
    return angles.cos(), angles.sin()


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
