"""Ranks that resume a checkpoint of one process: each reads its own part, and no more.

Everything that needs ranks is in one spawn.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_several_ranks import without_chance
from torch import Tensor
from torch.utils._pytree import tree_leaves

from distributed import run_distributed
from lm_runs import advance, fresh_trainer, whole_state
from moe_graphs.lm.checkpoint import MODEL, STATE, find_checkpoint, save_checkpoint
from moe_graphs.lm.run import RunOptions
from moe_graphs.lm.sharded_checkpoint import resume
from moe_graphs.lm.sharded_state import fused_parts, history_state, model_state, optimizer_state
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig, shares
from moe_graphs.planning.microbatch_memory import _LiveStorages

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "8 bits and averages": {"optimizer_state": "8bit", "ema_decay": 0.9},
    "bf16": {"optimizer_state": "bfloat16"},
    "muon": {"optimizer": "muon"},
}
# Every optimizer and every layout occurs once; all pairs would take long.
FEW = [
    ("shard", "bf16"),
    ("experts", "muon"),
    ("tensors", "8 bits and averages"),
    ("pipeline", "bf16"),
]
LAYOUTS = {
    "shard": ParallelConfig(dp_shard=2),
    "experts": ParallelConfig(dp_shard=2, ep=2),
    "tensors": ParallelConfig(tp=2),
    "pipeline": ParallelConfig(pp=2),
}


def chosen(optimizer: str, workers: Workers | None = None) -> RunOptions:
    """Options wide enough for states of 8 bits, also on each of two ranks."""
    experts = workers is not None and workers.layout.ep > 1
    given = without_chance(workers=workers, dispatcher="all_to_all" if experts else "local")
    preset = given.preset
    moe = dataclasses.replace(preset.model.moe, ffn_hidden_size=64)
    model = dataclasses.replace(preset.model, hidden_size=128, ffn_hidden_size=128, moe=moe)
    training = dataclasses.replace(preset.training, **OPTIMIZERS[optimizer])
    preset = dataclasses.replace(preset, model=model, training=training)
    return dataclasses.replace(given, preset=preset)


class Reading(_LiveStorages):
    """Bytes that are copied from mapped files, and the most other memory that was made."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.copied = 0
        self._names = {str(path / name) for name in (MODEL, STATE)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {key_of(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and self._in_files(args[1]):
            self.copied += args[1].nbytes
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.is_meta or key_of(leaf) in given:
                continue
            if not self._in_files(local := getattr(leaf, "_local_tensor", leaf)):
                self._note(local.untyped_storage())
        return result

    def _in_files(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            ends, *_, name = line.split(maxsplit=5)
            first, last = (int(end, 16) for end in ends.split("-"))
            if name in self._names and first <= address < last:
                return True
        return False


def key_of(tensor: Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata


def own_bytes(trainer: Trainer) -> tuple[int, int, int]:
    """Bytes of all that a checkpoint has, of the optimizer's state, and of the largest tensor."""
    state = {**model_state(trainer), **history_state(trainer, trainer.step)}
    of_optimizer, parts = optimizer_state(trainer), fused_parts(trainer)
    sizes = {
        key: sum(piece.nbytes for _, piece in shares(value.detach(), parts.get(key)))
        for key, value in {**state, **of_optimizer}.items()
    }
    of_state = sum(sizes[key] for key in of_optimizer)
    return sum(sizes.values()), of_state, max(sizes.values())


REST = [
    (layout, optimizer)
    for layout in LAYOUTS
    for optimizer in OPTIMIZERS
    if (layout, optimizer) not in (*FEW, ("tensors", "muon"))
]


def work(rank: int, world_size: int, folder: Path, cases: list[tuple[str, str]]) -> None:
    found: dict[Any, Any] = {}
    for name, layout in LAYOUTS.items():
        workers = Workers.on(layout, torch.device("cpu"))
        for optimizer in [each for of_layout, each in cases if of_layout == name]:
            trainer = fresh_trainer(chosen(optimizer, workers))
            path = find_checkpoint(folder / optimizer)
            with Reading(path) as reading:
                resume(path, trainer)
            sizes = reading.copied, max(reading.peaks.values()), *own_bytes(trainer)
            found[name, optimizer] = *sizes, whole_state(trainer)
    torch.save(found, folder / f"{rank}.pt")  # tensors do not outlive their process in a pipe


@pytest.fixture(
    scope="module",
    params=[pytest.param(FEW, id="few"), pytest.param(REST, id="rest", marks=pytest.mark.long)],
)
def resumed(request, tmp_path_factory) -> tuple[dict[str, Any], list[dict[Any, Any]]]:
    """The states that were saved, and what the ranks found."""
    folder, saved = tmp_path_factory.mktemp("resumed"), {}
    for optimizer in OPTIMIZERS:
        trainer = fresh_trainer(chosen(optimizer))
        advance(trainer, 2)
        save_checkpoint(folder / optimizer, trainer)
        saved[optimizer] = {name: value.clone() for name, value in whole_state(trainer).items()}
    run_distributed(work, 2, arguments=(folder, request.param))
    return saved, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_a_rank_reads_its_own_part_and_holds_no_more(resumed):
    saved, ranks = resumed
    for found in ranks:
        for (layout, optimizer), found_here in found.items():
            copied, most, own, of_optimizer, largest, state = found_here
            case = (layout, optimizer)
            # Zeros of 8 bits are made from a tensor in fp32 and some more memory of that size.
            beside = largest * (8 if "8 bits" in optimizer else 1)
            whole = sum(value.nbytes for value in saved[optimizer].values())
            assert copied == own, case
            assert most <= of_optimizer + beside, case
            assert own < 0.8 * whole if layout == "tensors" else own < 0.6 * whole, case
            assert state.keys() == saved[optimizer].keys(), case
            assert all(torch.equal(v, saved[optimizer][k]) for k, v in state.items()), case


def test_what_is_not_of_this_run_is_refused_before_anything_is_loaded(tmp_path):
    trainer = fresh_trainer(chosen("bf16"))
    advance(trainer, 1)
    path = save_checkpoint(tmp_path, trainer)
    saved = torch.load(path / STATE)
    states = saved["optimizer"]["state"]
    other = {**states, 0: {**states[0], "exp_avg": torch.zeros(3)}}
    wrong = io.BytesIO()
    torch.save({**saved, "optimizer": {**saved["optimizer"], "state": other}}, wrong)
    right = (path / STATE).read_bytes()
    cases = [
        (right, "muon", "another optimizer's groups of parameters: resume with"),
        (
            wrong.getvalue(),
            "bf16",
            r"'optimizer.embedding.weight.exp_avg' of shape \[3\], this run",
        ),
        (right[:-100], "bf16", "training.pt cannot be read, it may be truncated"),
    ]
    for content, optimizer, words in cases:
        (path / STATE).write_bytes(content)
        fresh: Any = fresh_trainer(chosen(optimizer))
        fresh.workers = SimpleNamespace(count=2, rank=0)
        before = {name: value.clone() for name, value in model_state(fresh).items()}
        with pytest.raises(ValueError, match=words):
            resume(path, fresh)
        assert fresh.step == 0
        assert all(torch.equal(value, before[name]) for name, value in model_state(fresh).items())
