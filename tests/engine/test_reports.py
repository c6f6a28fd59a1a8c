"""Texts of ``print(graphs.report())`` and ``report().explain()``, for all three engines."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import moe_graphs
from moe_graphs import FullIteration, GraphConfig
from moe_graphs.engine.reasons import COPIED_GRADIENTS, EAGER_CALLS
from moe_graphs.engine.report import Report
from moe_graphs.report_tables import SCOPE_COLUMNS, STEP_COLUMNS
from training_runs import DEVICES
from two_scopes import WIDTH, build, data, train_step, warm

README = Path(__file__).parents[2] / "README.md"


def quietly(steps) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def of_scopes(device: str) -> Report:
    """A report with smaller batches, forwards outside of a step, and copied gradients."""
    model = build(device)
    graphs = warm(model, device)
    kept = []

    def steps() -> None:
        for _ in range(3):
            train_step(model, graphs, data(device, rows=3))
        model(data(device)).sum().backward()
        for _ in range(2):
            train_step(model, graphs, data(device))
            kept.append(model.first.linear.weight.grad)

    quietly(steps)
    return graphs.report()


@pytest.mark.parametrize("device", DEVICES)
def test_a_report_prints_the_table_and_each_reason_with_its_detail(device):
    report = of_scopes(device)
    lines = str(report).splitlines()
    assert lines[0] == "captured scopes"
    assert all(column in lines[2] for column in SCOPE_COLUMNS)
    (row,) = [line for line in lines if "│ first " in line]
    assert "2 warmup, 3 shape, 1 outside_step" in row
    (shape,) = [line for line in lines if line.startswith("6 shape in first and 1 more: ")]
    assert "input 'x': captured shape (4, 8), got (3, 8): pad inputs" in shape
    (outside,) = [line for line in lines if line.startswith("2 outside_step in first and 1 more")]
    assert outside.endswith(str(EAGER_CALLS["outside_step"]))
    assert "Report(" in repr(report)  # for machines
    assert "4 warmup in" not in str(report)  # there is nothing to do


@pytest.mark.parametrize("device", DEVICES)
def test_replays_eager_calls_and_audited_ones_are_all_calls(device):
    model = build(device)
    graphs = warm(model, device)
    for _ in range(10):
        train_step(model, graphs, data(device))
    first = graphs.report().scopes[0]
    assert first.audited > 0
    (row,) = [line for line in str(graphs.report()).splitlines() if "│ first " in line]
    assert f"│ {first.replayed} │ 2 warmup, {first.audited} audited " in " ".join(row.split())
    assert first.replayed + first.audited + 2 == 13


@pytest.mark.parametrize("device", DEVICES)
def test_explain_has_every_column_and_every_reason_that_occurs(device):
    report = of_scopes(device)
    text = report.explain()
    for column, meaning in SCOPE_COLUMNS.items():
        assert f"{column}: {meaning}." in text
    for word in report.eager_calls:
        assert f"{word}: {EAGER_CALLS[word].explanation}. " in text
    copied = {word for scope in report.scopes for word in scope.copied_gradients}
    assert copied
    for word in copied:
        assert f"{word}: {COPIED_GRADIENTS[word].explanation}. " in text
    assert "slots_full" not in text


@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_step_reports_alike(device):
    model = build(device)

    def plain(x):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    step = FullIteration(plain, model=model, warmup_steps=2)
    quietly(lambda: [step(data(device, rows)) for rows in (4, 4, 4, 3, 3, 3)])
    text = str(step.report())
    assert "captured step" in text
    assert "captured shape (4, 8), got (3, 8): pad inputs" in text.splitlines()[-2]
    assert "│ 2 warmup, 3 shape │" in text
    explained = step.report().explain()
    assert all(f"{column}: {meaning}." in explained for column, meaning in STEP_COLUMNS.items())
    assert f"shape: {EAGER_CALLS['shape'].explanation}. " in explained


@pytest.mark.parametrize("device", DEVICES)
def test_callables_report_alike(device):
    layer = nn.Linear(WIDTH, WIDTH, device=device)
    sample = torch.ones(4, WIDTH, device=device, requires_grad=True)
    moe_graphs.make_graphed_callables(layer, (sample,))
    layer(sample)
    layer(sample[:3])
    text = str(layer.graphs.report())
    assert "│ callable 0 │" in text
    assert "1 shape in callable 0: input 'input': captured shape (4, 8), got (3, 8)" in text
    assert "graphs: " in layer.graphs.report().explain()


def test_every_reason_prints_in_a_report_as_well():
    """Reports of many ranks and of old runs have any of the words."""
    fields = dict.fromkeys(EAGER_CALLS, 1) | {"backward: out_of_order": 2, "output_attentions": 1}
    model = nn.Sequential(nn.Linear(2, 2))
    made = moe_graphs.graph(model, GraphConfig("*0")).report().to_dict()
    report = Report(**{**made, "scopes": (), "eager_calls": fields})
    text = report.explain()
    assert all(f"\n{word}: " in text for word in fields)
    assert "out_of_order: the backward ran eagerly, since backwards come in another order" in text


def test_the_readme_shows_the_columns():
    text = README.read_text()
    assert "REPORT" not in text
    shown = text.split("captured scopes\n")[1].split("```")[0]
    explained = text.split("| column | what it counts |")[1].split("\n\n")[0]
    assert all(column in shown for column in SCOPE_COLUMNS)
    assert all(column in explained for column in SCOPE_COLUMNS.keys() - {"scope"})
