"""Short runs of a small language model, for the tests of what is around them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from moe_graphs.config import GraphConfig
from moe_graphs.layers import MoEConfig, TransformerConfig
from moe_graphs.lm.checkpoint import Checkpoints, load_checkpoint
from moe_graphs.lm.chosen_kernels import with_kernels
from moe_graphs.lm.data import Corpus
from moe_graphs.lm.options import TrainOptions, TrainSettings
from moe_graphs.lm.run import (
    Progress,
    RunOptions,
    build_batches,
    build_trainer,
)
from moe_graphs.lm.run_directory import find_checkpoint
from moe_graphs.lm.run_presets import Preset
from moe_graphs.lm.run_state import fused_parts, history_state, model_state, optimizer_state
from moe_graphs.lm.trainer import Trainer
from moe_graphs.option_tree import tree_of, with_values
from moe_graphs.parallel.own_part import shares

SCOPES = "attn,moe_router,moe_preprocess"
QUIET = Progress(line=lambda line: None, note=lambda note: None)


def save_checkpoint(run_directory: Path, trainer: Trainer, *, keep: int = 2) -> Path:
    """Writes one checkpoint, as ``Checkpoints`` does, and waits for it."""
    checkpoints = Checkpoints(run_directory, trainer, keep=keep)
    path = checkpoints.save()
    checkpoints.finish()
    return path


def small_preset(**settings) -> Preset:
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, aux_loss_coef=0.01)
    model = TransformerConfig(
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        ffn_hidden_size=32,
        vocab_size=256,
        max_sequence_length=32,
        hidden_dropout=0.1,
        moe=dataclasses.replace(moe, input_jitter=0.01, expert_bias=True),
        moe_layers=(False, True),
    )
    defaults = {"steps": 8, "batch_size": 4, "sequence_length": 32, "learning_rate": 1e-2}
    training = TrainSettings(**{**defaults, "warmup_steps": 2, **settings})
    return Preset(model, training, log_every=4, evaluate_every=4)


def small_corpus() -> Corpus:
    train = tuple(b"def function_%d(x):\n    return x + %d\n" % (n, n) * 4 for n in range(60))
    return Corpus("a test", train, (b"def function_7(y):\n    return y - 7\n" * 6,))


def options(graphed: bool = False, **changes) -> RunOptions:
    settings = {name: changes.pop(name) for name in ("steps", "microbatches") if name in changes}
    own = {each.name for each in dataclasses.fields(RunOptions)}
    asked = {name: changes.pop(name) for name in set(changes) - own}
    return RunOptions(
        preset=small_preset(**settings),
        device=torch.device("cpu"),
        graph_config=GraphConfig(SCOPES) if graphed else None,
        asked=tree_of(TrainOptions, asked),
        **changes,
    )


def on_transformer_engine(
    given: RunOptions,
    *,
    linear: str = "transformer_engine",
    experts: str = "transformer_engine",
    fp8: str = "none",
) -> RunOptions:
    where = torch.device("cuda")  # which a stand-in for the library does not need
    asked = with_values(given.asked, {"experts": experts, "linear": linear, "fp8": fp8})
    preset = with_kernels(given.preset, asked.model, where)
    return dataclasses.replace(given, preset=preset, asked=asked)


def fresh_trainer(given: RunOptions) -> Trainer:
    return build_trainer(given, build_batches(given, small_corpus()))


def advance(trainer: Trainer, until: int) -> None:
    while trainer.step < until:
        trainer.train_step()


def saved_on_the_way(trainer: Trainer, folder: Path, saved: int, steps: int) -> dict[str, Any]:
    """Train to ``steps`` with a checkpoint at ``saved``; return the whole state at ``saved``."""
    checkpoints = Checkpoints(folder, trainer)
    advance(trainer, saved)
    checkpoints.save()
    state = whole_state(trainer)
    advance(trainer, steps)
    checkpoints.finish()
    trainer.settle()
    return state


def resumed_from(folder: Path, trainer: Trainer, steps: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Resume a training; return the whole state after loading, and the losses up to ``steps``."""
    load_checkpoint(find_checkpoint(folder), trainer)
    state = whole_state(trainer)
    advance(trainer, steps)
    trainer.settle()
    return state, trainer.history.loss.clone()


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """State of model, optimizer and history as in checkpoints, from all ranks and stages."""
    state = {
        **model_state(trainer),
        **optimizer_state(trainer),
        **history_state(trainer, trainer.step),
    }
    parts = fused_parts(trainer)
    held = {key: (value.shape, shares(value, parts.get(key))) for key, value in state.items()}
    found: dict[str, torch.Tensor] = {}
    workers = trainer.workers
    for of_rank in [held] if workers is None else workers.gather(held):
        for key, (shape, pieces) in of_rank.items():
            for where, piece in pieces:
                whole = found.setdefault(key, torch.full(shape, -7, dtype=piece.dtype))
                whole[where] = piece
    return found
