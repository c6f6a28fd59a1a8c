"""A value that changes from batch to batch is no constant: rows of test_lightning_footguns."""

from __future__ import annotations

import warnings

import pytest

from lightning_pairs import both
from lightning_runs import BATCHES, QUIET, Regression, assert_same, fit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from moe_graphs.integrations.lightning import GraphWholeSteps

pytestmark = QUIET


class ReadsTheEpoch(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output["loss"] * (1.0 + self.current_epoch) * self.trainer.max_epochs

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)


class ReadsTheStep(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output["loss"] / (1.0 + self.global_step)


class ReadsTheTrainersBatch(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output["loss"] * (1 + self.trainer.fit_loop.epoch_loop.batch_idx % 3)


class ReadsIsLastBatch(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output["loss"] * (2.0 if self.trainer.is_last_batch else 1.0)


class ReadsTheRate(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output["loss"] * (1 + self.optimizers().param_groups[0]["lr"])


class ReadsTheSchedule(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output["loss"] * (1 + self.lr_schedulers().get_last_lr()[0])


class ReadsWhatWasLogged(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output["loss"] * (2.0 if "val_loss" in self.trainer.callback_metrics else 1.0)


def test_the_epoch_is_no_constant(tmp_path):
    (report,) = both(tmp_path, ReadsTheEpoch, max_epochs=3, says="ran eagerly 3 times")
    assert report.matched == BATCHES - 2
    assert sum(report.eager_calls.values()) == 2 + 2 * BATCHES


def test_the_last_batch_of_an_epoch_is_another_one(tmp_path):
    (report,) = both(tmp_path, ReadsIsLastBatch)
    assert report.eager_calls == {"warmup": 2, "attribute": 2}


def test_the_epoch_may_be_captured_anew(tmp_path):
    usual, _ = fit(tmp_path, "cpu", make=ReadsTheEpoch)
    callback = GraphWholeSteps(warmup_steps=2, on_mismatch="recapture")
    graphed, _ = fit(tmp_path, "cpu", callback, make=ReadsTheEpoch)
    assert_same(usual, graphed)
    (report,) = callback.reports
    assert (report.captures, report.matched) == (2, 2 * BATCHES - 2)


@pytest.mark.parametrize(
    "make",
    [ReadsTheStep, ReadsTheTrainersBatch, ReadsTheRate, ReadsTheSchedule, ReadsWhatWasLogged],
)  # fmt: skip
def test_numbers_of_the_trainer_are_no_constants(tmp_path, make):
    reports = both(tmp_path, make, says="GraphWholeSteps|full iteration")
    assert all(report.state != "differs_from_eager" for report in reports)


class IsCounted(Regression):
    """A number on the module may be read by its training_step, and a graph has it frozen."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * (1 + getattr(self, "counted", 0))}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.counted = batch_idx


def test_training_that_falls_back_at_every_batch_says_so(tmp_path):
    (report,) = both(tmp_path, IsCounted, says="ran eagerly 3 times .*: 'counted'")
    assert report.eager_calls["attribute"] == 2 * BATCHES - 4


def test_a_batch_that_differs_may_be_an_error(tmp_path):
    callback = GraphWholeSteps(warmup_steps=2, on_mismatch="error")
    with pytest.raises(Exception, match="current.*was 0.*at the capture and is 1"):
        fit(tmp_path, "cpu", callback, make=ReadsTheEpoch)
