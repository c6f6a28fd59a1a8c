"""``--optimizer-state``, ``--stochastic-rounding``, ``--ema``: training, evaluating, resuming."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distributed import RANKS, run_distributed
from lm_runs import (
    QUIET,
    advance,
    fresh_trainer,
    options,
    save_checkpoint,
    small_corpus,
    whole_state,
)
from moe_graphs.config import FullIterationConfig
from moe_graphs.kernels.adamw.state_codes import decode
from moe_graphs.kernels.local_part import local_part
from moe_graphs.lm.checkpoint import Checkpoints, load_checkpoint
from moe_graphs.lm.data import HeldOut
from moe_graphs.lm.run import RunOptions, run, with_graphs
from moe_graphs.lm.run_directory import find_checkpoint
from moe_graphs.lm.trainer import Trainer
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig

WHOLE = FullIterationConfig(optimizer_in_graph=True, warmup_steps=2)
ALL = {"optimizer_state": "bfloat16", "stochastic_rounding": True, "ema_decay": 0.8}
LAYOUTS = {
    "shard": ParallelConfig(dp_shard=RANKS),
    "replicate": ParallelConfig(dp_replicate=RANKS),
    "tensors": ParallelConfig(dp_shard=RANKS // 2, tp=2),
}
OTHER = {"shard": "tensors", "replicate": "shard", "tensors": "one process"}  # to resume from


def choosing(
    changes: dict | None = None, dtype: torch.dtype = torch.bfloat16, **others
) -> RunOptions:
    """Settings without random numbers, except those of rounding."""
    given = options(dtype=str(dtype).removeprefix("torch."), **others)
    moe = dataclasses.replace(given.preset.model.moe, input_jitter=0.0, aux_loss_coef=0.0)
    model = dataclasses.replace(given.preset.model, hidden_dropout=0.0, moe=moe)
    training = dataclasses.replace(given.preset.training, **(ALL if changes is None else changes))
    preset = dataclasses.replace(given.preset, model=model, training=training)
    return dataclasses.replace(given, preset=preset)


def in_8_bits(changes: dict | None = None, **others) -> RunOptions:
    """Settings whose matrices have rows that 64 divides, also on each of two ranks."""
    given = choosing({"optimizer_state": "8bit", **(changes or {})}, torch.float32, **others)
    moe = dataclasses.replace(given.preset.model.moe, ffn_hidden_size=128)
    model = dataclasses.replace(given.preset.model, hidden_size=128, ffn_hidden_size=256, moe=moe)
    return dataclasses.replace(given, preset=dataclasses.replace(given.preset, model=model))


def held_out() -> HeldOut:
    return HeldOut.of(small_corpus().held_out_documents, sequence_length=32, context=16)


def everything(trainer: Trainer) -> list[Tensor]:
    held = list(trainer.model.parameters())
    values = [value for p in held for _, value in sorted(trainer.optimizer.state[p].items())]
    return [local_part(x.detach()).clone() for x in (*held, *values)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def trained(given: RunOptions, steps: int) -> Trainer:
    trainer = fresh_trainer(given)
    with with_graphs(trainer, given.graph_config):
        advance(trainer, steps)
    return trainer


def test_a_run_goes_on_bit_for_bit(tmp_path):
    whole = trained(choosing(), 6)
    half = trained(choosing(), 3)
    again = fresh_trainer(choosing())
    assert load_checkpoint(save_checkpoint(tmp_path, half), again) == []
    advance(again, 6)
    assert same(everything(again), everything(whole))
    (state, *_) = whole.optimizer.state.values()
    assert [state[k].dtype for k in ("exp_avg", "ema")] == [torch.bfloat16, torch.float32]


def test_an_evaluation_is_of_the_averages_and_leaves_no_trace():
    trainer = trained(choosing(), 4)
    before, plain = everything(trainer), trained(choosing({**ALL, "ema_decay": None}), 4)
    found = trainer.nats_per_token(held_out())
    assert same(everything(trainer), before)
    assert found != plain.nats_per_token(held_out())
    with torch.no_grad():
        for p in plain.model.parameters():
            p.zero_()
        for p, q in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
            p.copy_(trainer.optimizer.state[q]["ema"])
    assert found == plain.nats_per_token(held_out())


def test_a_run_says_which_weights_it_has_evaluated(tmp_path):
    notes: list[str] = []
    progress = dataclasses.replace(QUIET, note=notes.append)
    summary = run(choosing(out=tmp_path, steps=5), small_corpus(), progress)
    assert summary.held_out_weights == "averaged"
    assert any(note.endswith("(sample, averaged weights)") for note in notes)
    assert any(note.startswith("evaluating averaged weights on all held-out") for note in notes)


def test_options_changed_between_checkpoints_are_said(tmp_path):
    """Averages begin when they are asked for; states are cast."""
    path = save_checkpoint(tmp_path, trained(choosing({}), 3))
    trainer = fresh_trainer(choosing({"optimizer_state": "float32", "ema_decay": 0.5}))
    assert load_checkpoint(path, trainer) == [
        "optimizer_state: parameter in the checkpoint, float32 now",
        "ema_decay: None in the checkpoint, 0.5 now",
    ]
    before = [p.detach().float() for p in trainer.model.parameters()]
    advance(trainer, 4)
    for q, old in zip(trainer.model.parameters(), before, strict=True):
        state = trainer.optimizer.state[q]
        assert state["exp_avg_sq"].dtype == torch.float32
        torch.testing.assert_close(state["ema"], 0.5 * old + 0.5 * q.float())


def test_states_of_8_bits_go_on_bit_for_bit_and_become_others(tmp_path):
    whole, half = (trained(in_8_bits(), steps) for steps in (4, 2))
    path = save_checkpoint(tmp_path, half)
    again, wide = fresh_trainer(in_8_bits()), in_8_bits({"optimizer_state": "float32"})
    assert load_checkpoint(path, again) == []
    advance(again, 4)
    assert same(everything(again), everything(whole))
    embedding = whole.optimizer.state[whole.model.embedding.weight]
    assert embedding["exp_avg_sq_scale"].shape == (256, 2)
    trainer = fresh_trainer(wide)
    said = "optimizer_state: 8bit in the checkpoint, float32 now"
    assert load_checkpoint(path, trainer) == [said]
    advance(trainer, 4)
    loss = trainer.history.loss[:4]
    torch.testing.assert_close(loss, whole.history.loss[:4], rtol=2e-2, atol=0)
    torchs = fresh_trainer(in_8_bits({"optimizer": "torch_adamw", "optimizer_state": "parameter"}))
    with pytest.raises(ValueError, match="^optimizer: torch_adamw cannot read the states of 8"):
        load_checkpoint(path, torchs)


def test_a_run_says_how_many_states_are_of_8_bits(tmp_path):
    with pytest.raises(ValueError, match="^optimizer_state: 8bit: no parameter is a matrix"):
        fresh_trainer(choosing({"optimizer_state": "8bit"}))
    notes: list[str] = []
    progress = dataclasses.replace(QUIET, note=notes.append)
    given = in_8_bits(out=tmp_path, steps=1)
    run(given, small_corpus(), progress)
    held = list(fresh_trainer(given).model.parameters())
    coded = sum(p.numel() for p in held if p.numel() >= 4096)
    of_all = f"{coded:,} of {sum(p.numel() for p in held):,} parameters"
    assert notes[0] == f"AdamW's states: 8 bits for {of_all}, float32 for the others"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer_state": "int8"}, "optimizer_state: 'int8' is not one of parameter, float32"),
        ({"ema_decay": 1.5}, "ema_decay: 1.5 must be at least 0 and below 1"),
        ({**ALL, "optimizer": "torch_adamw"}, "optimizer: torch_adamw has no optimizer_state"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        choosing(changes)


def test_rounding_needs_something_of_bf16():
    given = choosing({"stochastic_rounding": True}, torch.float32)
    with pytest.raises(ValueError, match="^stochastic_rounding: no parameter and no state"):
        fresh_trainer(given)


def work(rank: int, world_size: int, folder: Path, one_process: Path) -> None:
    found: dict = {}
    all_workers = {
        name: Workers.on(layout, torch.device("cpu")) for name, layout in LAYOUTS.items()
    }
    for name, workers in all_workers.items():
        trainer = fresh_trainer(choosing(workers=workers))
        trainer.run_id = workers.gather(trainer.run_id)[0]
        checkpoints = Checkpoints(folder / name, trainer)
        advance(trainer, 3)
        checkpoints.save()
        checkpoints.finish()
        saved = everything(trainer)
        first = trainer.nats_per_token(held_out())
        advance(trainer, 5)
        found[name] = {"saved": saved, "nats": first, "end": everything(trainer)}
    for name, workers in all_workers.items():
        for source in (name, OTHER[name]):
            where = one_process if source == "one process" else folder / source
            trainer = fresh_trainer(choosing(workers=workers))
            load_checkpoint(find_checkpoint(where), trainer)
            resumed, nats = everything(trainer), trainer.nats_per_token(held_out())
            if source == name:
                advance(trainer, 5)
            found[source, name] = resumed, nats, everything(trainer)
    # This trainer saves a checkpoint without averages.
    trainer = fresh_trainer(choosing({}, workers=all_workers["shard"]))
    trainer.run_id = all_workers["shard"].gather(trainer.run_id)[0]
    advance(trainer, 3)
    checkpoints = Checkpoints(folder / "plain", trainer)
    checkpoints.save()
    checkpoints.finish()
    later = fresh_trainer(choosing({"ema_decay": 0.5}, workers=all_workers["tensors"]))
    load_checkpoint(find_checkpoint(folder / "plain"), later)
    assert not any("ema" in state for state in later.optimizer.state.values())
    before = [local_part(p.detach()).float() for p in later.model.parameters()]
    advance(later, 4)
    for p, old in zip(later.model.parameters(), before, strict=True):
        average = local_part(later.optimizer.state[p]["ema"])
        torch.testing.assert_close(average, 0.5 * old + 0.5 * local_part(p.detach()).float())
    found["8 bits"] = {}
    for name, source in {"tensors": "tensors", "shard": "tensors"}.items():
        trainer = fresh_trainer(in_8_bits(workers=all_workers[name]))
        trainer.run_id = all_workers[name].gather(trainer.run_id)[0]
        if name == source:
            checkpoints = Checkpoints(folder / "8 bits", trainer)
            advance(trainer, 2)
            checkpoints.save()
            checkpoints.finish()
            nats = trainer.nats_per_token(held_out())
            advance(trainer, 3)
            end, trainer = everything(trainer), fresh_trainer(in_8_bits(workers=all_workers[name]))
        load_checkpoint(find_checkpoint(folder / "8 bits"), trainer)
        assert trainer.nats_per_token(held_out()) == pytest.approx(nats, rel=1e-3)
        found["8 bits"][name] = {k: v for k, v in whole_state(trainer).items() if "exp_avg" in k}
        if name == source:
            advance(trainer, 3)
            assert same(everything(trainer), end)
    wide = fresh_trainer(in_8_bits({"optimizer_state": "float32"}, workers=all_workers["shard"]))
    load_checkpoint(find_checkpoint(folder / "8 bits"), wide)
    found["8 bits"]["wide"] = whole_state(wide)
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> tuple[float, list[dict]]:
    one, folder = (tmp_path_factory.mktemp(name) for name in ("one", "several"))
    alone = trained(choosing(), 3)
    save_checkpoint(one, alone)
    nats = alone.nats_per_token(held_out())
    run_distributed(work, RANKS, arguments=(folder, one), timeout_seconds=60.0 * RANKS)
    return nats, [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_go_on_bit_for_bit_from_any_layout(several, layout):
    alone, ranks = several
    for found in ranks:
        resumed, nats, end = found[layout, layout]
        assert same(resumed, found[layout]["saved"])
        assert nats == found[layout]["nats"]
        assert same(end, found[layout]["end"])
        source = OTHER[layout]  # the same numbers, elsewhere
        nats = alone if source == "one process" else found[source]["nats"]
        assert found[source, layout][1] == pytest.approx(nats, rel=1e-2)


@pytest.mark.long
def test_codes_are_the_same_numbers_in_any_layout(several):
    for found in several[1]:
        one, other = (found["8 bits"][name] for name in ("tensors", "shard"))
        assert one.keys() == other.keys()
        assert any(key.endswith("exp_avg_sq_scale") for key in one)
        assert all(torch.equal(one[key], other[key]) for key in one)
        wide = found["8 bits"]["wide"]
        for key in (key for key in one if key.endswith("_code")):
            codes, scales = one[key], one[key.replace("_code", "_scale")]
            signed = key.endswith("exp_avg_code")
            decoded = decode(codes, scales, signed=signed)
            assert torch.equal(wide[key.removesuffix("_code")], decoded), key


@pytest.mark.long
def test_copies_stay_copies_and_parts_are_rounded_apart(several):
    first, *others = (found["replicate"]["end"] for found in several[1])
    assert all(same(first, other) for other in others)


@pytest.mark.gpu
def test_on_a_gpu_graphed_is_eager_with_every_option():
    def on_gpu(**others) -> RunOptions:
        return dataclasses.replace(choosing(), device=torch.device("cuda"), **others)

    eager, graphed = trained(on_gpu(), 8), trained(on_gpu(graph_config=WHOLE), 8)
    assert same(everything(eager), everything(graphed))
    assert eager.nats_per_token(held_out()) == graphed.nats_per_token(held_out())
