"""The network of ``diffusion_lightning.py``: a denoiser of 8x8 images."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    """UNet from 8x8 down to 1x1 and back, with skip connections."""

    frequencies: Tensor

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


def rates(times: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of image and noise at times 0 (image) to 1 (noise)."""
    angles = (times * math.pi / 2)[:, None, None, None]
    return angles.cos(), angles.sin()
