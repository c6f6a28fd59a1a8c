"""The callbacks for Lightning: bitwise the same training, everything around it alive."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from moe_graphs import GraphConfig
from moe_graphs.training.grad_scaler import GradScaler
from training_runs import DEVICES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch", reason="waits for lightning")
    plugins = pytest.importorskip("lightning.pytorch.plugins.precision")
    from moe_graphs.integrations.lightning import GraphScopes, GraphWholeSteps

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BATCHES, SIZE = 11, 4


class Regression(pl.LightningModule):
    """Dropout, logging and a rate that changes every step."""

    def __init__(self, optimizer: str = "AdamW", dropout: float = 0.25) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.GELU())
        self.head = nn.Linear(8, 1)
        self.optimizer_name = optimizer
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = (self.head(self.body(inputs)) - targets).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"largest": inputs.max(), "index": batch_idx * 1.0})
        return {"loss": loss, "targets": targets.sum()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())
        self.log("seen", float(batch_idx))

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", (self.head(self.body(inputs)) - targets).square().mean())

    def configure_optimizers(self):
        kinds = {
            "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, capturable=True),
            "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        }
        optimizer = kinds[self.optimizer_name](self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader(bad_batch: int | None = None, partial: bool = False) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCHES * SIZE, 6, generator=generator)
    if bad_batch is not None:
        inputs[bad_batch * SIZE, 0] = float("inf")
    if partial:
        inputs = inputs[:-1]
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=SIZE)


def trainer(folder: Path, device: str, *callbacks: pl.Callback, **options) -> pl.Trainer:
    defaults = {
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{**defaults, **options},
    )


def fit(folder, device, *callbacks, make=Regression, train=None, ckpt=None, **options):
    torch.manual_seed(0)
    module = make()
    run = trainer(folder, device, *callbacks, **options)
    run.fit(module, train or loader(), loader(), ckpt_path=ckpt)
    return module.cpu(), run


def assert_same(left: pl.LightningModule, right: pl.LightningModule, exact: bool = True) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(left.state_dict(), right.state_dict(), **tolerance)
    torch.testing.assert_close(left.losses, right.losses, **tolerance)


OPTIONS = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "accumulation of 2": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "validation within epochs": {"val_check_interval": 4},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_scopes_train_as_lightning_does(tmp_path, device, name):
    # Lightning clips before the gradients of a fused optimizer are unscaled, and refuses.
    kind = "foreach" if name == "clipping" else "AdamW"
    eager, _ = fit(tmp_path, device, make=lambda: Regression(kind), **OPTIONS[name])
    callback = GraphScopes(GraphConfig("bod*", warmup_steps=2))
    graphed, _ = fit(tmp_path, device, callback, make=lambda: Regression(kind), **OPTIONS[name])
    assert callback.report.captured >= 1
    assert callback.report.replayed > 0
    assert_same(eager, graphed)
    assert "forward" not in graphed.body.__dict__


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_whole_steps_replayed_are_whole_steps_run_eagerly(tmp_path, device, name):
    lightning, usual = fit(tmp_path, device, **OPTIONS[name])
    eager, _ = fit(tmp_path, device, GraphWholeSteps(warmup_steps=1000), **OPTIONS[name])
    callback = GraphWholeSteps(warmup_steps=2)
    graphed, run = fit(tmp_path, device, callback, **OPTIONS[name])
    reports = callback.reports
    assert all(report.replayed > 0 for report in reports), reports
    assert set().union(*(report.eager_calls for report in reports)) <= {"warmup"}
    assert_same(eager, graphed)
    # The rate is fp32 on the device, where Lightning's is a number.
    assert_same(lightning, graphed, exact=False)
    assert run.global_step == usual.global_step
    assert run.logged_metrics.keys() == usual.logged_metrics.keys()
    for key, value in usual.logged_metrics.items():
        torch.testing.assert_close(run.logged_metrics[key].cpu(), value.cpu().to(torch.float32))
    assert run.progress_bar_metrics.keys() == usual.progress_bar_metrics.keys()
    for method in ("training_step", "backward", "optimizer_step", "optimizer_zero_grad", "log"):
        assert method not in graphed.__dict__


def half_precision(device: str) -> dict:
    scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=4)
    return {"plugins": [plugins.MixedPrecision("16-mixed", device, scaler=scaler)]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_fp16_with_a_scaler_skips_and_grows_as_lightnings(tmp_path, device, accumulated):
    results = []
    for callbacks in ((), (GraphWholeSteps(warmup_steps=1000),), (GraphWholeSteps(),)):
        options = {**half_precision(device), "accumulate_grad_batches": accumulated}
        module, run = fit(tmp_path, device, *callbacks, train=loader(bad_batch=7), **options)
        module.losses = [loss for loss in module.losses if loss.isfinite()]
        results.append((module, run.precision_plugin.scaler))
    (usual, theirs), (eager, _), (graphed, scaler) = results
    assert_same(eager, graphed)
    assert_same(usual, graphed, exact=False)
    assert scaler.state_dict() == theirs.state_dict()
    assert type(scaler) is torch.amp.GradScaler


@pytest.mark.parametrize("device", DEVICES)
def test_a_scaler_of_ours_brings_its_hysteresis(tmp_path, device):
    scaler = GradScaler(device, init_scale=256.0, hysteresis=2)
    options = {"plugins": [plugins.MixedPrecision("16-mixed", device, scaler=scaler)]}
    callback = GraphWholeSteps()
    module, run = fit(tmp_path, device, callback, train=loader(bad_batch=7), **options)
    assert run.precision_plugin.scaler is scaler
    assert callback.reports[0].replayed == 2 * BATCHES - 3
    assert scaler.scale_factor.item() == 256.0
    assert sum(not loss.isfinite() for loss in module.losses) == 2
    assert all(parameter.isfinite().all() for parameter in module.parameters())


class NoSyncs(pl.Callback):
    """Raises for anything that waits for the GPU between a batch and its end, after warm-up."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step > 5:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *_):
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *_):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_replayed_batch_does_not_wait_for_the_gpu(tmp_path, accumulated):
    options = {**half_precision("cuda"), "accumulate_grad_batches": accumulated}
    callback = GraphWholeSteps(warmup_steps=2)
    fit(tmp_path, "cuda", callback, NoSyncs(), **options)
    assert callback.reports[-1].replayed > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("saved_by", ["whole steps", "lightning"])
def test_a_checkpoint_is_lightnings_and_resumes(tmp_path, device, saved_by):
    """Saved at the end of an epoch; resumed with graphs, in another process's place."""

    def callbacks(graphed: bool) -> list[pl.Callback]:
        return [GraphWholeSteps(warmup_steps=2 if graphed else 1000)]

    # Lightning saves no random states.
    def options(epochs: int) -> dict:
        make = lambda: Regression(dropout=0.0)  # noqa: E731
        return {"make": make, "max_epochs": epochs, **half_precision(device)}

    whole, _ = fit(tmp_path, device, *callbacks(True), **options(4))
    paths = {}
    for kind in ("whole steps", "lightning"):
        used = callbacks(True) if kind == "whole steps" else []
        _, first = fit(tmp_path, device, *used, **options(2))
        paths[kind] = tmp_path / f"{kind}.ckpt"
        first.save_checkpoint(paths[kind])
    contents = {kind: torch.load(path, weights_only=False) for kind, path in paths.items()}
    assert_same_shape(contents["whole steps"], contents["lightning"])
    resumed, run = fit(tmp_path, device, *callbacks(True), ckpt=paths[saved_by], **options(4))
    whole.losses = whole.losses[2 * BATCHES :]
    assert_same(whole, resumed, exact=saved_by == "whole steps")
    assert run.global_step == 4 * BATCHES


def assert_same_shape(left, right, path="checkpoint") -> None:
    """The same keys and types all the way down, and nothing of ours among the callbacks."""
    if path == "checkpoint['callbacks']":
        assert not [key for key, value in left.items() if value]
        return
    assert type(left) is type(right), path
    if isinstance(left, dict):
        ours = {"hysteresis", "_hysteresis_tracker"}
        assert left.keys() - ours == right.keys(), path
        for key in right:
            assert_same_shape(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same_shape(*pair, f"{path}[{index}]")


def test_a_partial_batch_runs_eagerly(tmp_path):
    eager, _ = fit(tmp_path, "cpu", GraphWholeSteps(warmup_steps=1000), train=loader(partial=True))
    callback = GraphWholeSteps(warmup_steps=2)
    graphed, _ = fit(tmp_path, "cpu", callback, train=loader(partial=True))
    assert_same(eager, graphed)
    (report,) = callback.reports
    assert report.eager_calls == {"warmup": 2, "shape": 2}


class ReadsValues(Regression):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if output["loss"].item() > 1e9:
            raise ArithmeticError
        return output


class LogsNumbers(Regression):
    def training_step(self, batch, batch_idx):
        self.log("number", 3.0)
        return super().training_step(batch, batch_idx)


class ReadsTheIndex(Regression):
    def training_step(self, batch, batch_idx):
        if batch_idx % 5 == 4:
            self.log("fifth", batch[0].mean())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReadsValues, r"reads values on the host.*output\[\"loss\"\]\.item"),
        (ReadsTheIndex, r"reads values on the host.*batch_idx % 5"),
        (LogsNumbers, "training is eager: self.log\\('number'\\) was given a float"),
    ],
)
def test_what_cannot_be_captured_trains_eagerly_and_says_why(tmp_path, kind, message):
    eager, _ = fit(tmp_path, "cpu", GraphWholeSteps(warmup_steps=1000))
    callback = GraphWholeSteps(warmup_steps=2)
    with pytest.warns(UserWarning, match=re.compile(message, re.DOTALL)) as warned:
        fallen, run = fit(tmp_path, "cpu", callback, make=kind)
    assert sum("GraphWholeSteps" in str(each.message) for each in warned) == 1
    assert_same(eager, fallen)
    assert callback.reports[0].replayed == 0
    assert run.global_step == 2 * BATCHES


class Counts(Regression):
    """A number on the module may be read by its training_step, and a graph has it frozen."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.counted = batch_idx


def test_training_that_falls_back_at_every_batch_says_so(tmp_path):
    eager, _ = fit(tmp_path, "cpu", GraphWholeSteps(warmup_steps=1000))
    message = "most batches run eagerly: {'attribute': 8}"
    with pytest.warns(UserWarning, match=message):
        counted, _ = fit(tmp_path, "cpu", GraphWholeSteps(warmup_steps=2), make=Counts)
    assert_same(eager, counted)


class StepsItself(Regression):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: Regression("foreach"), {}, "AdamW cannot be captured.*fused=True"),
        (StepsItself, {}, "StepsItself.optimizer_step is overridden"),
        (
            Regression,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "clip by norm",
        ),
    ],
)
def test_what_does_not_fit_is_trained_by_lightning(tmp_path, make, options, message):
    usual, _ = fit(tmp_path, "cpu", make=make, **options)
    with pytest.warns(UserWarning, match=f"training is eager: .*{message}"):
        trained, _ = fit(tmp_path, "cpu", GraphWholeSteps(), make=make, **options)
    assert_same(usual, trained)


class Fails(Regression):
    """In a hook: a replay does not run the Python of training_step."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if len(self.losses) == 6:
            raise ArithmeticError("in a hook")


@pytest.mark.parametrize("kind", ["scopes", "whole steps"])
def test_an_exception_leaves_the_module_as_it_was(tmp_path, kind):
    config = GraphConfig("bod*", warmup_steps=2)
    callback = GraphScopes(config) if kind == "scopes" else GraphWholeSteps(warmup_steps=2)
    module = Fails()
    with pytest.raises(ArithmeticError, match="in a hook"):
        fit(tmp_path, "cpu", callback, make=lambda: module)
    assert len(module.losses) == 6
    assert "training_step" not in module.__dict__
    assert "forward" not in module.body.__dict__


def test_a_failed_capture_of_scopes_trains_eagerly_and_says_why(tmp_path):
    class Synchronises(nn.Module):
        def forward(self, inputs):
            assert inputs.sum().item() < 1e9
            return inputs

    def make() -> Regression:
        made = Regression()
        made.body.append(Synchronises())
        return made

    usual, _ = fit(tmp_path, "cpu", make=make)
    callback = GraphScopes(GraphConfig("bod*", warmup_steps=2))
    with pytest.warns(UserWarning, match="GraphScopes: scope 'body': capture of its forward"):
        trained, _ = fit(tmp_path, "cpu", callback, make=make)
    assert_same(usual, trained)


def test_the_older_name_of_lightning_works_too(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        older = importlib.import_module("pytorch_lightning")

    class Module(older.LightningModule):
        training_step = Regression.training_step
        configure_optimizers = Regression.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU())
            self.head = nn.Linear(8, 1)
            self.optimizer_name = "AdamW"

    callback = GraphWholeSteps(warmup_steps=2)
    run = older.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    run.fit(Module(), loader())
    assert callback.reports[0].replayed == BATCHES - 2
