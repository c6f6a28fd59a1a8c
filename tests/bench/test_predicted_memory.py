"""`benchmarks/predicted_memory.py`: its bytes are those that tensors take on the CPU."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

import fine_tuning
import predicted_memory
from moe_graphs.integrations.transformers import accelerate_model

CASES = [
    fine_tuning.Case("experts_16k", fine_tuning.ACCELERATED, True, smoke=True),
    fine_tuning.Case("nf4_attention_16k", fine_tuning.NF4, True, smoke=True),
    fine_tuning.Case("gpt_oss_experts_16k", fine_tuning.MXFP4, True, smoke=True),
    fine_tuning.Case("nf4_experts_16k", fine_tuning.LEAN, True, smoke=True),
]
IDS = [case.row for case in CASES]
META = torch.device("meta")


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fake_tensors_take_the_bytes_of_real_ones(case):
    foreseen = predicted_memory.bytes_of(
        fine_tuning.model_of(case, META), case, contextlib.nullcontext()
    )
    model = fine_tuning.model_of(case, META).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(0.5 if tensor.is_floating_point() else 1)
    accelerate_model(model, graphs=False)
    trained = [each for each in model.parameters() if each.requires_grad]
    held = predicted_memory.held(model, case)
    tokens = torch.zeros(case.size.sequences, case.size.sequence, dtype=torch.int64)
    found = predicted_memory.step_bytes(model, tokens, held)
    assert {name: foreseen[name] for name in held} == held
    assert found["peak"] == pytest.approx(foreseen["peak"], rel=0.02)
    assert found["kept"] == pytest.approx(foreseen["kept"], rel=0.03)
    optimizer = fine_tuning.optimizer_of(case, model)
    optimizer.step()
    states = [s for each in optimizer.state.values() for s in each.values() if s.dim()]
    assert held["states"] == sum(state.nbytes for state in states)
    assert held["adapters"] == sum(each.nbytes for each in trained)
    assert bool(held["packed"]) == bool(held["scratch"]) == (case.contender in fine_tuning.PACKED)


@pytest.mark.parametrize(
    "case", [*CASES[::2], *(pytest.param(each, marks=pytest.mark.long) for each in CASES[1::2])]
)
def test_every_further_layer_takes_as_much(case, monkeypatch):
    large = dict(case.size.model, num_hidden_layers=6)
    monkeypatch.setattr(fine_tuning, "SMALL", large)
    monkeypatch.setattr(fine_tuning, "SMALL_GPT_OSS", large)
    found, expected = predicted_memory.predicted(case), predicted_memory.of_layers(case, 6)
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.long
def test_rows_are_printed(capsys):
    predicted_memory.main(["--rows", "nf4_experts_16k", "--smoke"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    contenders = fine_tuning.ACCELERATED, fine_tuning.NF4, fine_tuning.DOUBLE_NF4, fine_tuning.LEAN
    assert tuple(line["contender"] for line in lines) == contenders
