"""Errors name what no graph can hold: rows of the table in test_lightning_footguns."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

from lightning_pairs import Halves, both, plain_sgd
from lightning_runs import BATCHES, QUIET, Regression, assert_same, fit, pl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.loggers import CSVLogger

    from moe_graphs.integrations.lightning import GraphWholeSteps

pytestmark = QUIET


class Counts(Regression):
    counter = 0

    def training_step(self, batch, batch_idx):
        self.counter += 1
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * self.counter}


class Appends(Regression):
    def __init__(self):
        super().__init__()
        self.kept = []

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.kept.append(output["loss"].detach())
        return output

    def on_train_epoch_end(self):
        self.log("kept", torch.stack(self.kept).sum())
        self.log("number", float(len(self.kept)))


class CountsInBackward(Regression):
    counter = 1.0

    def on_fit_start(self):
        self.head.weight.register_hook(self.count)

    def count(self, gradient):
        self.counter += 1
        return gradient / self.counter


class ReadsValues(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if output["loss"].item() > 1e9:
            raise ArithmeticError
        return output


class Skips(Regression):
    """Batches that look like this one."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return None if batch[0][0, 0] > 0 else output

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if outputs:
            super().on_train_batch_end(outputs, batch, batch_idx)


class SkipsAlways(Skips):
    def training_step(self, batch, batch_idx):
        Regression.training_step(self, batch, batch_idx)


class LogsNumbers(Regression):
    def training_step(self, batch, batch_idx):
        self.log("number", 3.0)
        return super().training_step(batch, batch_idx)


class LogsTheTime(Regression):
    def training_step(self, batch, batch_idx):
        self.log("late", time.time() > 0)
        return super().training_step(batch, batch_idx)


class LogsABool(Regression):
    def training_step(self, batch, batch_idx):
        self.log("late", self.training)
        return super().training_step(batch, batch_idx)


class ReturnsNumbers(Regression):
    def training_step(self, batch, batch_idx):
        return {**super().training_step(batch, batch_idx), "number": 3.0}


class LogsPastTheModule(Regression):
    def training_step(self, batch, batch_idx):
        pl.LightningModule.log(self, "past", batch[0].sum(), on_epoch=True)
        return super().training_step(batch, batch_idx)


class ChangesTheBatch(Regression):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(batch[0].clone())


class AddsToTheBatch(ChangesTheBatch):
    def training_step(self, batch, batch_idx):
        inputs = batch[0]
        batch[0] = inputs * 0.5
        return Regression.training_step(self, [inputs, batch[1]], batch_idx)


class ReturnsAParameter(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "row": self.head.weight[0]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(outputs["row"].detach().clone())


class LogsToItsLogger(Regression):
    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"called": 1.0}, step=len(self.logger.experiment.metrics))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.losses.append(torch.tensor(len(self.logger.experiment.metrics)))


class ReadsTheIndex(Regression):
    def training_step(self, batch, batch_idx):
        if batch_idx % 5 == 4:
            self.log("fifth", batch[0].mean())
        return super().training_step(batch, batch_idx)


class ScalesByTheIndex(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * batch_idx}


class KeysByTheIndex(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        assert isinstance(batch_idx, int)
        return {**output, "loss": output["loss"] * {3: 0.5}.get(batch_idx, 1.0)}


class MakesATensorOfTheIndex(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * torch.tensor(batch_idx)}


class LogsTheIndex(Regression):
    def training_step(self, batch, batch_idx):
        self.log("index", batch_idx)
        return super().training_step(batch, batch_idx)


class ReturnsTheIndex(Regression):
    def training_step(self, batch, batch_idx):
        return {**super().training_step(batch, batch_idx), "index": batch_idx}


class ReadsGradients(Regression):
    def on_before_zero_grad(self, optimizer):
        found = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(found).norm() if found else torch.zeros(()))


class HooksTheLoss(Regression):
    def on_before_backward(self, loss):
        loss.register_hook(lambda gradient: 0.5 * gradient)


class Iterates(Regression):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        inputs, targets = batch
        loss = (self.head(self.body(inputs)) - targets).square().mean()
        self.log("train_loss", loss, batch_size=len(inputs))
        return {"loss": loss, "index": batch_idx}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"] * outputs["index"])


AT_THE_START = [
    (ReadsGradients, "training is eager: ReadsGradients.on_before_zero_grad would"),
    (HooksTheLoss, "training is eager: HooksTheLoss.on_before_backward would"),
    (Iterates, "training is eager: training_step takes dataloader_iter"),
]


@pytest.mark.parametrize(("make", "says"), AT_THE_START)
def test_what_a_graph_of_the_batch_would_leave_out_is_named(tmp_path, make, says):
    assert both(tmp_path, make, says=says) == []


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_before_backward"])
def test_callbacks_in_the_midst_of_a_batch_are_named(tmp_path, hook):
    says = f"training is eager: Halves.{hook} would"
    assert both(tmp_path, callbacks=lambda: [Halves(hook)], says=says) == []


def test_weights_averaged_by_swapping_are_named(tmp_path):
    def callbacks():
        return [StochasticWeightAveraging(0.01, swa_epoch_start=1)]

    made = type("Sgd", (Regression,), {"configure_optimizers": plain_sgd})
    assert both(tmp_path, made, callbacks, max_epochs=3, says="StochasticWeightAver") == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Counts, "it changes counter"),
        (Appends, "it changes kept"),
        (CountsInBackward, "it changes counter"),
        (ReadsValues, r'reads values on the host.*output\["loss"\]\.item'),
        (Skips, r"reads values on the host.*batch\[0\]\[0, 0\] > 0"),
        (SkipsAlways, "training_step returned None"),
        (LogsNumbers, r"self.log\('number'\) was given a float"),
        (LogsABool, r"self.log\('late'\) was given a bool"),
        (LogsTheTime, r"calls time.time\(\)"),
        (ReturnsNumbers, r"training_step returns a float \(output\['number'\]\)"),
        (LogsPastTheModule, "not managed by the `Trainer` control flow"),
        (ChangesTheBatch, r"\[0\]' is modified in place"),
        (AddsToTheBatch, "training_step changes the batch"),
        (ReturnsAParameter, r"returns a parameter, buffer or gradient \(output\['row'\]\)"),
        (ReadsTheIndex, "looks at batch_idx"),
        (ScalesByTheIndex, "looks at batch_idx"),
        (KeysByTheIndex, "looks at batch_idx"),
        (MakesATensorOfTheIndex, "BatchIndex|looks at batch_idx"),
        (LogsTheIndex, r"self.log\('index'\) was given batch_idx"),
        (ReturnsTheIndex, r"training_step returns batch_idx \(output\['index'\]\)"),
    ],
)
def test_what_cannot_be_captured_trains_eagerly_and_says_why(tmp_path, make, says):
    (report,) = both(tmp_path, make, says=f"GraphWholeSteps: capture of the step failed.*{says}")
    assert report.replayed == 0
    assert report.eager_calls == {"warmup": 2, "capture_failed": 2 * BATCHES - 2}


def test_a_logger_called_in_the_step_is_seen(tmp_path):
    def logged(*callbacks):
        logger = CSVLogger(tmp_path, name="_".join(map(str, callbacks)) or "usual")
        return fit(tmp_path, "cpu", *callbacks, make=LogsToItsLogger, logger=logger)[0]

    with pytest.warns(UserWarning, match=r"capture of the step failed: it changes .*metrics"):
        assert_same(logged(), logged(GraphWholeSteps(warmup_steps=2)))
