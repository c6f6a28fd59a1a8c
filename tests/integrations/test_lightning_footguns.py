"""Whole steps under Lightning: what users' hooks, callbacks and steps do that a graph would miss.

Every training here is Lightning's own, bit for bit: parameters, losses, all that was logged at each
batch. The second column says how.

    what                                          and then
    --------------------------------------------  -------------------------------------------------
    accumulate_grad_batches that changes          followed: a graph for every kind of batch
    on_after_backward, on_before_optimizer_step,  followed: Lightning calls them behind the graph,
    configure_gradient_clipping, optimizer_step   on gradients that the graph has left
    any optimizer, clipping, schedule, scaler     followed: never touched; behind the graph, or
                                                  within it where that is the same
    hooks of the optimizer, groups that are added  followed
    on_before_zero_grad, on_before_backward       named, trained eagerly: they lie in the midst
    StochasticWeightAveraging                     named, trained eagerly
    current_epoch, global_step, trainer.*, rates  such batches run eagerly, counted, and said
    batch_idx is looked at, logged or returned    named, trained eagerly
    training_step(self, dataloader_iter)          named, trained eagerly
    training_step returns None                    eagerly, as Lightning skips
    training_step changes what Python keeps,      named, trained eagerly, from the state before
    the batch, a logger; so does a backward hook
    numbers or parameters are logged or returned  named, trained eagerly

What is followed is tested here, an update within the graph in ``test_lightning_updates``, numbers
that change in ``test_lightning_reads``, what is named in ``test_lightning_refused``.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from grids import by_turns, few, grid
from lightning_pairs import (
    Halves,
    HalvesAfterBackward,
    StepsItself,
    all_replayed,
    both,
    fused,
    halve,
    plain_sgd,
)
from lightning_runs import BATCHES, QUIET, Regression, pl
from training_runs import DEVICES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch.callbacks import (
        EarlyStopping,
        GradientAccumulationScheduler,
        WeightAveraging,
    )

pytestmark = QUIET


@pytest.mark.parametrize("schedule", [{0: 1, 1: 3}, {0: 3, 1: 1}, {0: 2, 1: 4}])
def test_accumulation_that_changes_is_followed(tmp_path, schedule):
    reports = both(
        tmp_path, callbacks=lambda: [GradientAccumulationScheduler(schedule)], warmup_steps=1
    )
    assert len(reports) == sum(min(each, 2) for each in schedule.values())
    assert all_replayed(reports)


class HalvesBeforeTheUpdate(Regression):
    def on_before_optimizer_step(self, optimizer):
        halve(self)
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm())


class ClipsItsOwnWay(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


class StepsNow(Regression):
    """Every other batch only, which leaves gradients to be added to, or not."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
        else:
            closure()


class BackwardOfItsOwn(Regression):
    def backward(self, loss, *args, **kwargs):
        (2 * loss).backward()


class TransfersItself(Regression):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [part * 0.5 for part in batch]


class Freezes(Regression):
    def on_train_epoch_start(self):
        self.body.requires_grad_(self.current_epoch == 0)


class TakesNoIndex(Regression):
    def training_step(self, batch):
        return super().training_step(batch, 0)["loss"]


OF_THE_MODULE = [
    *(HalvesAfterBackward, HalvesBeforeTheUpdate, ClipsItsOwnWay, StepsItself, StepsNow),
    *(BackwardOfItsOwn, TransfersItself, TakesNoIndex),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "scheduled", "accumulated"), few(grid(OF_THE_MODULE, [True, False], [1, 3]))
)
def test_hooks_of_the_module_do_what_they_do_without_graphs(
    tmp_path, device, make, scheduled, accumulated
):
    """The update would be in the graph, but for them, with a rate that is not scheduled."""
    made = make if scheduled else fused(base=make)
    options = {"accumulate_grad_batches": accumulated}
    assert all_replayed(both(tmp_path, made, device=device, **options))


@pytest.mark.parametrize(
    ("hook", "accumulated"),
    by_turns(["on_after_backward", "on_before_optimizer_step", "on_train_batch_start"], [1, 3]),
)
def test_hooks_of_callbacks_do_what_they_do_without_graphs(tmp_path, hook, accumulated):
    for make in (Regression, fused()):
        options = {"accumulate_grad_batches": accumulated}
        assert all_replayed(both(tmp_path, make, lambda: [Halves(hook)], **options))


def lbfgs(module):
    return torch.optim.LBFGS(module.parameters(), lr=0.01, max_iter=3)


def one_cycle(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * BATCHES + 1)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def plateau(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


@pytest.mark.parametrize("configured", [plain_sgd, lbfgs, one_cycle, plateau])
def test_any_optimizer_and_schedule_will_do(tmp_path, configured):
    made = type("Configured", (Regression,), {"configure_optimizers": configured})
    rates = []

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    assert all_replayed(both(tmp_path, made, lambda: [Rates()]))
    assert {type(rate) for rate in rates} == {float}
    assert rates[: len(rates) // 2] == rates[len(rates) // 2 :]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_lightnings(tmp_path, algorithm):
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    assert all_replayed(both(tmp_path, lambda: Regression("foreach"), **options))


def test_callbacks_around_the_batches_go_on(tmp_path):
    def callbacks():
        return [WeightAveraging(), EarlyStopping("val_loss", patience=1)]

    assert all_replayed(both(tmp_path, callbacks=callbacks, max_epochs=3))


def test_layers_that_are_frozen_between_epochs_run_eagerly(tmp_path):
    (report,) = both(tmp_path, Freezes, max_epochs=3, says=r"ran eagerly 3 times \(requires_grad\)")
    assert report.eager_calls["requires_grad"] == 2 * BATCHES


class LogsAndChanges(Regression):
    """The value that is logged is the one of then."""

    def training_step(self, batch, batch_idx):
        total = batch[0].sum()
        self.log("before", total, on_epoch=True, reduce_fx="max")
        total.add_(1.0)
        self.log(value=total, name="after", on_step=False, on_epoch=True, batch_size=7)
        return super().training_step(batch, batch_idx)


def test_what_is_logged_is_what_was_given(tmp_path):
    assert all_replayed(both(tmp_path, LogsAndChanges))
