"""The callbacks for Lightning: bitwise the same training, everything around it alive."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from torch import nn

from lightning_runs import BATCHES, QUIET, Regression, assert_same, fit, loader, pl
from moe_graphs import CaptureError, GraphConfig
from moe_graphs.training.grad_scaler import GradScaler
from training_runs import DEVICES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    plugins = pytest.importorskip("lightning.pytorch.plugins.precision")
    from moe_graphs.integrations.lightning import GraphScopes, GraphWholeSteps

pytestmark = QUIET
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


REPLACED = {"training_step", "backward", "optimizer_step", "optimizer_zero_grad", "log"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_whole_steps_train_as_lightning_does(tmp_path, device, name):
    kind = "foreach" if name == "clipping" else "AdamW"
    eager, _ = fit(tmp_path, device, make=lambda: Regression(kind), **OPTIONS[name])
    callback = GraphWholeSteps(warmup_steps=2)
    graphed, run = fit(tmp_path, device, callback, make=lambda: Regression(kind), **OPTIONS[name])
    assert all(report.replayed > 0 for report in callback.reports), callback.reports
    assert set().union(*(report.eager_calls for report in callback.reports)) <= {"warmup"}
    assert_same(eager, graphed)
    assert not REPLACED & (vars(graphed).keys() | vars(run.strategy).keys())


def half_precision(device: str) -> dict:
    scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=4)
    return {"plugins": [plugins.MixedPrecision("16-mixed", device, scaler=scaler)]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_fp16_with_a_scaler_skips_and_grows_as_lightnings(tmp_path, device, accumulated):
    results = []
    for callbacks in ((), (GraphWholeSteps(),)):
        options = {**half_precision(device), "accumulate_grad_batches": accumulated}
        module, run = fit(tmp_path, device, *callbacks, train=loader(bad_batch=7), **options)
        results.append((module, run.precision_plugin.scaler))
    (usual, theirs), (graphed, scaler) = results
    assert sum(not loss.isfinite() for loss in graphed.losses) == 2
    assert_same(usual, graphed)
    assert scaler.state_dict() == theirs.state_dict()
    assert type(scaler) is torch.amp.GradScaler


class Unscales(Regression):
    def on_before_optimizer_step(self, optimizer):
        pass


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_scaler_of_ours_does_the_same_eagerly(tmp_path, accumulated):
    modules = []
    for warmup_steps in (1000, 2):
        scaler = GradScaler("cpu", init_scale=256.0, growth_interval=4)
        options = {"plugins": [plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
        options |= {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.1}
        callback = GraphWholeSteps(warmup_steps=warmup_steps)
        modules += fit(tmp_path, "cpu", callback, train=loader(bad_batch=7), **options)[:1]
    assert all(report.replayed > 0 for report in callback.reports)
    assert_same(*modules)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Unscales, {}, "Unscales.on_before_optimizer_step would not be called"),
        (
            Regression,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "does not go with moe_graphs' GradScaler",
        ),
        (lambda: Regression("foreach"), {}, "AdamW cannot be captured"),
    ],
)
def test_what_a_scaler_of_ours_does_not_go_with_is_an_error(tmp_path, make, options, message):
    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu"))
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, "cpu", GraphWholeSteps(), make=make, plugins=[plugin], **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_scaler_of_ours_brings_its_hysteresis(tmp_path, device):
    scaler = GradScaler(device, init_scale=256.0, hysteresis=2)
    options = {"plugins": [plugins.MixedPrecision("16-mixed", device, scaler=scaler)]}
    callback = GraphWholeSteps()
    module, run = fit(tmp_path, device, callback, train=loader(bad_batch=7), **options)
    assert run.precision_plugin.scaler is scaler
    assert callback.reports[0].matched == 2 * BATCHES - 3
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

    # Lightning saves no random states.
    def options(epochs: int) -> dict:
        make = lambda: Regression(dropout=0.0)  # noqa: E731
        return {"make": make, "max_epochs": epochs, **half_precision(device)}

    paths = {}
    for kind in ("whole steps", "lightning"):
        used = [GraphWholeSteps(warmup_steps=2)] if kind == "whole steps" else []
        _, first = fit(tmp_path, device, *used, **options(2))
        paths[kind] = tmp_path / f"{kind}.ckpt"
        first.save_checkpoint(paths[kind])
    contents = {kind: torch.load(path, weights_only=False) for kind, path in paths.items()}
    assert_same_shape(contents["whole steps"], contents["lightning"])
    usual, _ = fit(tmp_path, device, ckpt=paths["lightning"], **options(4))
    callback = GraphWholeSteps(warmup_steps=2)
    resumed, run = fit(tmp_path, device, callback, ckpt=paths[saved_by], **options(4))
    assert callback.reports[0].replayed > 0
    assert_same(usual, resumed)
    assert run.global_step == 4 * BATCHES


def assert_same_shape(left, right, path="checkpoint") -> None:
    """Checkpoints have the same keys and types all the way down, and no callback of ours."""
    if path == "checkpoint['callbacks']":
        assert not [key for key, value in left.items() if value]
        return
    assert type(left) is type(right), path
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in right:
            assert_same_shape(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same_shape(*pair, f"{path}[{index}]")


def test_a_partial_batch_runs_eagerly(tmp_path):
    eager, _ = fit(tmp_path, "cpu", train=loader(partial=True))
    callback = GraphWholeSteps(warmup_steps=2)
    graphed, _ = fit(tmp_path, "cpu", callback, train=loader(partial=True))
    assert_same(eager, graphed)
    (report,) = callback.reports
    assert report.eager_calls == {"warmup": 2, "shape": 2}


class Fails(Regression):
    """The file is written in a hook: a replay does not run the Python of training_step."""

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


class Synchronises(nn.Module):
    def forward(self, inputs):
        assert inputs.sum().item() < 1e9
        return inputs


def synchronising() -> Regression:
    made = Regression()
    made.body.append(Synchronises())
    return made


def test_a_failed_capture_of_scopes_trains_eagerly_and_says_why(tmp_path):
    usual, _ = fit(tmp_path, "cpu", make=synchronising)
    callback = GraphScopes(GraphConfig("bod*", warmup_steps=2))
    with pytest.warns(UserWarning, match="scope 'body': capture of its forward") as said:
        trained, _ = fit(tmp_path, "cpu", callback, make=synchronising)
    assert sum("capture of its forward" in str(each.message) for each in said) == 1
    assert_same(usual, trained)
    assert callback.report.off_because is not None


@pytest.mark.parametrize("kind", ["scopes", "whole steps"])
def test_a_failed_capture_is_an_error_on_request(tmp_path, kind):
    callback = GraphScopes(GraphConfig("bod*", warmup_steps=2, on_capture_error="error"))
    if kind == "whole steps":
        callback = GraphWholeSteps(warmup_steps=2, on_capture_error="error")
    with pytest.raises(CaptureError, match="capture of (the step|its forward) failed"):
        fit(tmp_path, "cpu", callback, make=synchronising)


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
    assert callback.reports[0].matched == BATCHES - 2
