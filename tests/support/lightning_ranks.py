"""Trainings under Lightning's strategies of several ranks, in the processes of ``distributed``.

Each rank has a trainer, and the process group exists already.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from full_iterations import optimizer_of
from lightning_runs import Regression, pl
from moe_graphs.parallel import ParallelConfig
from moe_graphs.training.grad_norm import local_part
from parallel_runs import laid_out
from training_runs import SEQUENCE, VOCABULARY, Trace, loss_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

ROWS, BATCHES = 4, 8  # of a rank and batch, of an epoch


class Started(ClusterEnvironment):
    """Environment in which processes and their group exist already."""

    creates_processes_externally = True
    main_address, main_port = "localhost", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    local_rank = global_rank

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...


class Replicated(Regression):
    """Training with buffers, a changing rate (with ``inside`` a tensor) and logged losses.

    The losses of all ranks are logged, and gradients are read after every batch.
    """

    norm: type = nn.BatchNorm1d

    def __init__(self, inside: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.inside, self.body, self.head = inside, nn.Identity(), nn.Identity()
        # A bias ahead of the norm would have gradients of rounding, which Adam makes steps of.
        layers = nn.Linear(6, 8, bias=False), self.norm(8), nn.Dropout(dropout), nn.GELU()
        self.net = nn.Sequential(*layers, nn.Linear(8, 1))

    def loss(self, batch):
        inputs, targets = batch
        return (self.net(inputs) - targets).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True, prog_bar=True)
        self.log("mean", batch[0].mean(), on_epoch=True)
        return {"loss": loss, "targets": batch[1].sum()}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        lr = torch.tensor(0.01, device=self.device) if self.inside else 0.01
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr, fused=True, capturable=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.losses += [local_part(gradient).clone() for gradient in gradients]


class Sharded(Replicated):
    """Training sharded by FSDP2, whose ranks have buffers of their own; checkpoints keep one's."""

    norm = nn.LayerNorm

    def configure_model(self):
        for part in (self.net[0], self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class Language(Replicated):
    """A language model of ours, FSDP2 and experts by ``parallelize``, with dropout and jitter."""

    def configure_model(self):
        ranks = dist.get_world_size()
        config = ParallelConfig(dp_shard=ranks, ep=ranks)
        self.net, _ = laid_out(self.device_mesh.device_type, config)

    def loss(self, batch):
        return loss_of(self.net, batch[0])[0]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return optimizer_of(self, self.device_mesh.device_type)


def strategy_of(kind: type, **options: Any) -> Any:
    if kind.configure_model is pl.LightningModule.configure_model:
        return DDPStrategy(**options)
    ranks = dist.get_world_size()
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, **options)


def rows(kind: type = Replicated, batches: int = BATCHES, seed: int = 3) -> TensorDataset:
    """Rows of data for all ranks together."""
    generator = torch.Generator().manual_seed(seed)
    count = batches * ROWS * dist.get_world_size()
    if kind is Language:
        return TensorDataset(torch.randint(VOCABULARY, (count, SEQUENCE + 1), generator=generator))
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def fit(
    folder: str,
    device: str,
    kind: type,
    *callbacks: pl.Callback,
    strategy: Any = None,
    train: Any = None,
    ckpt: str | None = None,
    plugins: tuple = (),
    module: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:
    torch.manual_seed(0)
    made = kind(**(module or {}))
    defaults = {"enable_checkpointing": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    run = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=dist.get_world_size(),
        strategy=strategy or strategy_of(kind),
        plugins=[Started(), *plugins],
        callbacks=list(callbacks),
        default_root_dir=Path(folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )
    data = rows(kind)  # Lightning's own sampler would shuffle
    in_order = DistributedSampler(data, shuffle=False)
    train = train or DataLoader(data, batch_size=ROWS, sampler=in_order)
    held_out = DataLoader(rows(kind, seed=4), batch_size=ROWS)
    run.fit(made, train, held_out, ckpt_path=ckpt)
    return made, run


def trace_of(module: pl.LightningModule, run: pl.Trainer, last: int | None = None) -> Trace:
    """Trace of losses, logged values and gradients after every batch, and of the final state.

    With ``last`` it has only the losses of the last batches, because a resumed training does not
    know the values that were logged at the end of an earlier epoch.
    """
    trace = Trace()
    for number, logged in enumerate(module.logged[-last:] if last else module.logged):
        for name, value in logged.items():
            if last is None or name == "train_loss":
                trace.note(f"{name} {number}", value)
    if last is None:
        for number, value in enumerate(module.losses):
            trace.note(f"loss or gradient {number}", value)
    for each in module.modules():
        if hasattr(each, "reshard"):  # an evaluation was last, and leaves parameters gathered
            each.reshard()
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        trace.note(name, local_part(value))
    for name, value in run.callback_metrics.items():
        trace.note(name, value)
    trace.note("updates", torch.tensor(run.global_step))
    return trace
