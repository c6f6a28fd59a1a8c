"""The optimizer's step behind a loss scaler of ours, which Lightning does not know how to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_graphs.integrations.lightning.names import pl
from moe_graphs.integrations.lightning.obstacles import (
    hook_owners,
    is_lightnings_own,
    is_overridden,
)
from moe_graphs.training.device_step import DeviceStep
from moe_graphs.training.grad_scaler import GradScaler

_NOT_CALLED = ("on_before_optimizer_step", "configure_gradient_clipping")


@dataclass(frozen=True)
class DeviceUpdate:
    """A ``DeviceStep`` in the place of the strategy's ``optimizer_step``.

    It unscales, clips by norm, updates or skips. The precision plugin saves and loads the scaler.
    """

    update: DeviceStep

    @classmethod
    def of(cls, trainer: pl.Trainer, module: pl.LightningModule) -> DeviceUpdate | None:
        """The update on the device; None without a scaler of ours.

        Raises:
            ValueError: for what would not be called or cannot be skipped.
        """
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if not isinstance(scaler, GradScaler):
            return None
        if is_lightnings_own(trainer.strategy, "ModelParallelStrategy"):
            raise ValueError(
                "scaler: moe_graphs' GradScaler does not go with ModelParallelStrategy, whose "
                "ranks see other gradients: use bf16-mixed or bf16-true, which need no scaler"
            )
        for owner in hook_owners(trainer, module):
            for name in _NOT_CALLED:
                if is_overridden(owner, name):
                    raise ValueError(
                        f"scaler: {type(owner).__name__}.{name} would not be called, since the "
                        f"update is a DeviceStep: use torch.amp.GradScaler with it"
                    )
        if trainer.gradient_clip_algorithm == "value":
            raise ValueError(
                "gradient_clip_algorithm: 'value' does not go with moe_graphs' GradScaler, whose "
                "update clips by norm: use that, or torch.amp.GradScaler"
            )
        clip_norm = trainer.gradient_clip_val or None
        return cls(DeviceStep(trainer.optimizers[0], scaler=scaler, clip_norm=clip_norm))

    def __call__(
        self, optimizer: Any, closure: Callable[[], Tensor | None], *_: Any, **__: Any
    ) -> Tensor | None:
        loss = closure()
        if loss is not None:  # training_step returned None: Lightning skips the update
            self.update()
        return loss
