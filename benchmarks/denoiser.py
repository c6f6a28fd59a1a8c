"""The UNet of `examples/diffusion_lightning.py` as a training step: fp16, scaler, clipping.

Shapes: B images, 1 channel, 8x8 pixels.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from contenders import BATCHES, Contender, Run, adamw
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from unet import UNet, rates

CLIP_NORM = 1.0


@dataclass(frozen=True)
class DenoiserSetting:
    """Setting of the UNet, with the attributes of ``contenders.Setting``."""

    name: str = "diffusion"
    width: int = 64
    batch_size: int = 128
    dtype: torch.dtype = torch.float16
    rounds: int = 7
    steps: int = 20
    host_steps: int = 3
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Number of images of a step."""
        return self.batch_size

    def describe(self) -> str:
        return (
            f"UNet of width {self.width}, {self.batch_size} images of 8x8, autocast to "
            f"{str(self.dtype).removeprefix('torch.')}, loss scaling, clipping"
        )

    def run(self, contender: Contender, dispatcher: str, device: torch.device) -> DenoiserRun:
        return DenoiserRun(self, contender, device)

    def tiny(self, device: torch.device) -> DenoiserSetting:
        dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        return replace(self, width=16, batch_size=4, dtype=dtype, rounds=2, steps=2)


class DenoiserRun(Run):
    """Run of the UNet; noise and times are drawn within the step.

    Whole steps scale and clip with ``DeviceStep``, other contenders with torch's functions.
    """

    def __init__(
        self, setting: DenoiserSetting, contender: Contender, device: torch.device
    ) -> None:
        torch.manual_seed(setting.seed)
        model = UNet(setting.width).to(device)
        optimizer, self.dtype = adamw(model, contender.our_adamw), setting.dtype
        self.device_step: DeviceStep | None = None
        self.scaler = torch.amp.GradScaler(device.type)
        if contender.full_iteration:
            self.scaler = GradScaler(device)
            self.device_step = DeviceStep(
                optimizer, scaler=self.scaler, clip_norm=CLIP_NORM, set_to_none=True
            )
        images = torch.rand(BATCHES, setting.batch_size, 1, 8, 8, device=device) * 2 - 1
        super().__init__(contender, model, optimizer, images, [self.scaler])

    def forward_backward(self, batch: Tensor) -> Tensor:
        noise, times = torch.randn_like(batch), torch.rand(len(batch), device=batch.device)
        signal_rate, noise_rate = rates(times)
        noisy = signal_rate * batch + noise_rate * noise
        # The cache of autocast has nothing to do here: each weight is used once.
        with torch.autocast(batch.device.type, self.dtype, cache_enabled=False):
            predicted = self.forward(noisy, times)
        loss = functional.mse_loss(predicted.float(), noise)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def update(self) -> None:
        if self.device_step is not None:
            self.device_step()
            return
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
