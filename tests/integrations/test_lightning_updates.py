"""The update within the graph, or behind it: rows of the table in test_lightning_footguns."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from grids import by_turns
from lightning_pairs import HalvesAfterBackward, StepsItself, all_replayed, both, fused, halve
from lightning_runs import BATCHES, QUIET, Regression, loader, pl, trainer
from moe_graphs.optim import AdamW
from training_runs import DEVICES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from moe_graphs.integrations.lightning import GraphWholeSteps

pytestmark = QUIET


def decay(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


MAKES = [
    fused(),
    fused([0.01], decay),
    fused([0.01], decay, kind=AdamW),
    fused(kind=torch.optim.SGD, momentum=0.9),
]
OPTIONS: list[dict[str, Any]] = [
    {}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}, {"precision": "bf16-mixed"},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"val_check_interval": 4},
]  # fmt: skip


def updates_in_the_graph(caplog) -> bool:
    return "the update runs behind the graph" not in caplog.text


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("make", "options"), by_turns(MAKES, OPTIONS))
def test_an_update_in_the_graph_is_lightnings(tmp_path, caplog, device, make, options):
    reports = both(tmp_path, make, device=device, **options)
    assert all_replayed(reports)
    assert updates_in_the_graph(caplog)
    assert len(reports) == (1 if "accumulate_grad_batches" not in options else 3)


def test_a_rate_that_changes_by_hand_is_followed(tmp_path, caplog):
    class Lowers(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.optimizers[0].param_groups[0]["lr"] = 0.01 / (1 + trainer.current_epoch)

    says = r"ran eagerly 3 times \(attribute\): .*'lr'"
    (report,) = both(tmp_path, fused(), lambda: [Lowers()], says=says)
    assert updates_in_the_graph(caplog)
    assert report.matched == BATCHES - 2


class HookedOptimizer(pl.Callback):
    """A hook of the optimizer that comes late, and is not Lightning's."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            hook = lambda optimizer, args, kwargs: halve(pl_module)  # noqa: E731
            trainer.optimizers[0].register_step_post_hook(hook)
            trainer.optimizers[0].register_step_pre_hook(lambda *_: halve(pl_module))


def test_hooks_of_the_optimizer_are_called(tmp_path, caplog):
    reports = both(tmp_path, fused(), lambda: [HookedOptimizer()])
    assert updates_in_the_graph(caplog)
    assert [report.matched for report in reports] == [BATCHES - 2, BATCHES - 2]


class Unfreezes(pl.Callback):
    """A callback that unfreezes as ``BaseFinetuning`` does it."""

    def on_fit_start(self, trainer, pl_module):
        pl_module.body.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.body.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": [*pl_module.body.parameters()]})


def test_parameters_that_come_later_are_followed(tmp_path):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=0.01, fused=True)

    made = type("OfTheHead", (Regression,), {"configure_optimizers": configure_optimizers})
    reports = both(tmp_path, made, lambda: [Unfreezes()])
    assert [report.matched for report in reports] == [BATCHES - 2, BATCHES - 2]


class ZeroesItself(Regression):
    """A hook of Lightning's, called by the user's own code."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx % 3 == 1:
            optimizer = self.optimizers()
            self.optimizer_zero_grad(self.current_epoch, batch_idx, optimizer.optimizer)
        self.losses += [p.grad.clone() for p in self.parameters() if p.grad is not None]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_gradients_are_as_lightning_leaves_them(tmp_path, accumulated):
    assert all_replayed(both(tmp_path, ZeroesItself, accumulate_grad_batches=accumulated))


@pytest.mark.parametrize("lr", [0.01, [0.01]])
def test_a_checkpoint_within_an_epoch_is_lightnings(tmp_path, lr):
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            path = tmp_path / f"{trainer.global_step}.ckpt"
            if trainer.global_step in (2, 3, 5, 19):
                trainer.save_checkpoint(path)
                saved = torch.load(path, weights_only=False)
                leaves = pytree.tree_leaves([saved["state_dict"], saved["optimizer_states"]])
                pl_module.losses += [torch.as_tensor(x) for x in leaves if x is not None]

    assert all_replayed(both(tmp_path, fused(lr), lambda: [Saves()]))


def test_one_callback_for_several_trainings(tmp_path):
    callback, module = GraphWholeSteps(warmup_steps=2), fused()()
    for _ in range(2):
        run = trainer(tmp_path, "cpu", callback, max_epochs=1)
        run.fit(module, loader())
        assert callback.reports[0].matched == BATCHES - 2
        assert not vars(module).keys() & {"log", "optimizer_zero_grad"}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Regression, "its learning rate is a number that a schedule changes"),
        (lambda: Regression("foreach"), "AdamW cannot be in a graph"),
        (HalvesAfterBackward, "HalvesAfterBackward.on_after_backward runs before it"),
        (StepsItself, "StepsItself.optimizer_step runs before it"),
    ],
)
def test_why_an_update_is_not_in_the_graph(tmp_path, caplog, make, why):
    assert all_replayed(both(tmp_path, make))
    assert f"the update runs behind the graph: {why}" in caplog.text
