"""The optimizer's step within the graph of a batch, where it is exactly Lightning's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from moe_graphs.engine.whole_step.optimizers import check_optimizer
from moe_graphs.errors import CaptureError
from moe_graphs.integrations.lightning.names import pl
from moe_graphs.integrations.lightning.obstacles import hook_owners, is_overridden
from moe_graphs.training.capturable import check_capturable_scheduler

_HOOKS = (
    *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("clip_gradients", "optimizer_step"),
)


@dataclass(frozen=True)
class Update:
    """Clipping and update, as Lightning does them behind the backward if nobody hooks in."""

    optimizer: Optimizer
    plugin: Any
    clip_val: float
    clip_algorithm: Any

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Update:
        algorithm = trainer.gradient_clip_algorithm
        clip_val = trainer.gradient_clip_val or 0.0
        chosen = {} if algorithm is None else {"gradient_clip_algorithm": algorithm}
        return cls(trainer.optimizers[0], trainer.precision_plugin, clip_val, tuple(chosen.items()))

    def __call__(self) -> None:
        self.plugin.clip_gradients(self.optimizer, self.clip_val, **dict(self.clip_algorithm))
        self.optimizer.step()


def why_outside(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """The reason why the update runs behind the graph. Nothing is lost but speed."""
    for owner in hook_owners(trainer, module):
        for name in _HOOKS:
            if is_overridden(owner, name):
                return f"{type(owner).__name__}.{name} runs before it"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "it is the scaler's"
    optimizer = trainer.optimizers[0]
    if not type(optimizer).__module__.startswith(("torch.optim.", "moe_graphs.optim.")):
        return f"{type(optimizer).__name__} is not one of torch's optimizers or ours"
    try:
        check_optimizer(optimizer, module.device)
        for config in trainer.lr_scheduler_configs:
            check_capturable_scheduler(config.scheduler)
    except (CaptureError, ValueError) as error:
        return str(error)
    is_number = [not isinstance(group["lr"], Tensor) for group in optimizer.param_groups]
    if any(is_number) and trainer.lr_scheduler_configs:
        return (
            "its learning rate is a number that a schedule changes: with lr=torch.tensor(...) on "
            "the device it would be in the graph, and computed in fp32"
        )
    return None


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether its step has hooks, which a replay does not run. They may come at any time."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everywhere = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    return any((*own, *everywhere))
