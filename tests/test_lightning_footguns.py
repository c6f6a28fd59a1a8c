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
"""

from __future__ import annotations

import contextlib
import re
import time
import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

from lightning_runs import BATCHES, QUIET, Regression, assert_same, fit, loader, pl, trainer
from training_runs import DEVICES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch.callbacks import (
        EarlyStopping,
        GradientAccumulationScheduler,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.loggers import CSVLogger

    from moe_graphs.integrations.lightning import GraphWholeSteps

pytestmark = QUIET


def halve(module: pl.LightningModule) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def both(
    folder,
    make=Regression,
    callbacks=lambda: [],
    says=None,
    warmup_steps=2,
    device="cpu",
    **options,
):
    """Trains without and with graphs, and compares. Returns the report of each graph.

    says: what is to be warned of, once; nothing is if it is None.
    """
    usual, _ = fit(folder, device, *callbacks(), make=make, **options)
    callback = GraphWholeSteps(warmup_steps=warmup_steps)
    expected = contextlib.nullcontext([])
    if says is not None:
        expected = pytest.warns(UserWarning, match=re.compile(says, re.DOTALL))
    with expected as said:
        graphed, _ = fit(folder, device, callback, *callbacks(), make=make, **options)
    assert sum("GraphWholeSteps" in str(each.message) for each in said) <= 1
    assert_same(usual, graphed)
    return callback.reports


def all_replayed(reports) -> bool:
    return all(r.replayed > 0 and r.eager_calls.keys() == {"warmup"} for r in reports)


def fused(lr=0.01, schedule=None, kind=torch.optim.AdamW, base=Regression, **options):
    """A training whose update can be in the graph. A list of one rate stands for a tensor."""

    def configure_optimizers(self):
        rate = torch.tensor(lr[0], device=self.device) if isinstance(lr, list) else lr
        if kind is torch.optim.AdamW:
            options["capturable"] = True
        optimizer = kind(self.parameters(), lr=rate, fused=True, **options)
        if schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

    return type("Fused", (base,), {"configure_optimizers": configure_optimizers})


# ---- followed


@pytest.mark.parametrize("schedule", [{0: 1, 1: 3}, {0: 3, 1: 1}, {0: 2, 1: 4}])
def test_accumulation_that_changes_is_followed(tmp_path, schedule):
    reports = both(
        tmp_path, callbacks=lambda: [GradientAccumulationScheduler(schedule)], warmup_steps=1
    )
    assert len(reports) == sum(min(each, 2) for each in schedule.values())
    assert all_replayed(reports)


class HalvesAfterBackward(Regression):
    def on_after_backward(self):
        halve(self)


class HalvesBeforeTheUpdate(Regression):
    def on_before_optimizer_step(self, optimizer):
        halve(self)
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm())


class ClipsItsOwnWay(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


class StepsItself(Regression):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


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
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("make", OF_THE_MODULE)
def test_hooks_of_the_module_do_what_they_do_without_graphs(
    tmp_path, device, make, scheduled, accumulated
):
    """With a rate that is not scheduled the update would be in the graph, but for them."""
    made = make if scheduled else fused(base=make)
    options = {"accumulate_grad_batches": accumulated}
    assert all_replayed(both(tmp_path, made, device=device, **options))


class Halves(pl.Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._halve)

    def _halve(self, trainer, pl_module, *_):
        halve(pl_module)


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    "hook", ["on_after_backward", "on_before_optimizer_step", "on_train_batch_start"]
)
def test_hooks_of_callbacks_do_what_they_do_without_graphs(tmp_path, hook, accumulated):
    for make in (Regression, fused()):
        options = {"accumulate_grad_batches": accumulated}
        assert all_replayed(both(tmp_path, make, lambda: [Halves(hook)], **options))


def plain_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


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
    (report,) = both(tmp_path, Freezes, max_epochs=3, says="most batches run eagerly")
    assert report.eager_calls["requires_grad"] == 2 * BATCHES


class LogsAndChanges(Regression):
    """What is logged is the value of then."""

    def training_step(self, batch, batch_idx):
        total = batch[0].sum()
        self.log("before", total, on_epoch=True, reduce_fx="max")
        total.add_(1.0)
        self.log(value=total, name="after", on_step=False, on_epoch=True, batch_size=7)
        return super().training_step(batch, batch_idx)


def test_what_is_logged_is_what_was_given(tmp_path):
    assert all_replayed(both(tmp_path, LogsAndChanges))


# ---- the update within the graph


def decay(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def updates_in_the_graph(caplog) -> bool:
    return "the update runs behind the graph" not in caplog.text


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}, {"precision": "bf16-mixed"},
     {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"val_check_interval": 4}],
)  # fmt: skip
@pytest.mark.parametrize(
    "make",
    [fused(), fused([0.01], decay), fused(kind=torch.optim.SGD, momentum=0.9)],
    ids=["AdamW", "AdamW with a schedule", "SGD"],
)
def test_an_update_in_the_graph_is_lightnings(tmp_path, caplog, device, make, options):
    reports = both(tmp_path, make, device=device, **options)
    assert all_replayed(reports)
    assert updates_in_the_graph(caplog)
    assert len(reports) == (1 if "accumulate_grad_batches" not in options else 3)


def test_a_rate_that_changes_by_hand_is_followed(tmp_path, caplog):
    class Lowers(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.optimizers[0].param_groups[0]["lr"] = 0.01 / (1 + trainer.current_epoch)

    says = "most batches run eagerly: {'attribute': 11}"
    (report,) = both(tmp_path, fused(), lambda: [Lowers()], says=says)
    assert updates_in_the_graph(caplog)
    assert report.replayed == BATCHES - 2


class HookedOptimizer(pl.Callback):
    """Of those that come late, and are not Lightning's."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            hook = lambda optimizer, args, kwargs: halve(pl_module)  # noqa: E731
            trainer.optimizers[0].register_step_post_hook(hook)
            trainer.optimizers[0].register_step_pre_hook(lambda *_: halve(pl_module))


def test_hooks_of_the_optimizer_are_called(tmp_path, caplog):
    reports = both(tmp_path, fused(), lambda: [HookedOptimizer()])
    assert updates_in_the_graph(caplog)
    assert [report.replayed for report in reports] == [BATCHES - 2, BATCHES - 2]


class Unfreezes(pl.Callback):
    """As ``BaseFinetuning`` does it."""

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
    assert [report.replayed for report in reports] == [BATCHES - 2, BATCHES - 2]


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
        assert callback.reports[0].replayed == BATCHES - 2
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


# ---- read within the step


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
    (report,) = both(tmp_path, ReadsTheEpoch, max_epochs=3, says="most batches run eagerly")
    assert report.replayed == BATCHES - 2
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
    assert (report.captures, report.replayed) == (2, 2 * BATCHES - 2)


@pytest.mark.parametrize(
    "make",
    [ReadsTheStep, ReadsTheTrainersBatch, ReadsTheRate, ReadsTheSchedule, ReadsWhatWasLogged],
)  # fmt: skip
def test_numbers_of_the_trainer_are_no_constants(tmp_path, make):
    reports = both(tmp_path, make, says="GraphWholeSteps|full iteration")
    assert all(report.state != "differs_from_eager" for report in reports)


# ---- refused


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


class IsCounted(Regression):
    """A number on the module may be read by its training_step, and a graph has it frozen."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * (1 + getattr(self, "counted", 0))}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.counted = batch_idx


def test_training_that_falls_back_at_every_batch_says_so(tmp_path):
    (report,) = both(tmp_path, IsCounted, says="most batches run eagerly: {'attribute': 8}")
    assert report.eager_calls["attribute"] == 2 * BATCHES - 4


def test_a_batch_that_differs_may_be_an_error(tmp_path):
    callback = GraphWholeSteps(warmup_steps=2, on_mismatch="error")
    with pytest.raises(Exception, match="current.*was 0.*at the capture and is 1"):
        fit(tmp_path, "cpu", callback, make=ReadsTheEpoch)
