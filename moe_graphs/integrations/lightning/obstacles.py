"""Actions of Lightning in the midst of a batch that a graph of the batch would leave out."""

from __future__ import annotations

import inspect
from typing import Any

from moe_graphs.integrations.lightning.names import pl

# Between the forward and the end of the backward. The hooks behind them are Lightning's own.
_IN_THE_MIDST = ("on_before_zero_grad", "on_before_backward")
_PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")


def obstacle(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """The reason why this training cannot run in graphs of whole batches."""
    plugin = trainer.precision_plugin
    if not is_lightnings_own(plugin, *_PRECISIONS):
        return f"{type(plugin).__name__} is a precision plugin that it does not know"
    if not module.automatic_optimization:
        return "manual optimization: call FullIteration in training_step"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return (
            "training_step takes dataloader_iter, and a graph would not fetch the batches: let it "
            "take the batch"
        )
    for each in hook_owners(trainer, module):
        if any(kind.__name__ == "StochasticWeightAveraging" for kind in type(each).__mro__):
            return "StochasticWeightAveraging runs batches without their backward"
    for name in (*_IN_THE_MIDST, "optimizer_zero_grad"):
        for owner in hook_owners(trainer, module):
            if is_overridden(owner, name):
                return (
                    f"{type(owner).__name__}.{name} would have to be called between forward and "
                    f"backward, which are one graph: use on_train_batch_start, on_after_backward "
                    f"or on_before_optimizer_step"
                )
    return None


def hook_owners(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[Any, ...]:
    """The objects whose hooks Lightning calls."""
    return module, *trainer.callbacks  # type: ignore[attr-defined]  # Lightning declares none


def is_overridden(owner: Any, name: str) -> bool:
    if name in vars(owner):
        return True
    defining = next((kind for kind in type(owner).__mro__ if name in vars(kind)), None)
    return defining is not None and not _is_of_lightning(defining)


def is_lightnings_own(value: Any, *names: str) -> bool:
    return type(value).__name__ in names and _is_of_lightning(type(value))


def _is_of_lightning(kind: type) -> bool:
    return kind.__module__.startswith(("lightning.", "pytorch_lightning."))
