"""TRL's trainers with untouched defaults, as the examples have them: nearly all calls replay."""

from __future__ import annotations

import importlib

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs the extra trl")
datasets = pytest.importorskip("datasets", reason="needs the extra trl")
pytest.importorskip("trl", reason="needs the extra trl")
from hf_texts import write_checkpoint  # noqa: E402

# PEFT's pattern "all-linear" names experts, too, which this LoRA does not take.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    pytest.mark.long,
]
LAYERS, BEHIND = 2, 20


class Counts(transformers.TrainerCallback):
    """The report of the graphs after each step."""

    def __init__(self):
        self.after, self.losses = [], []

    def on_step_end(self, *_, **__):
        self.after.append(self.callback.accelerated.graphs.report())

    def on_log(self, args, state, control, logs, **_):
        self.losses += [logs["loss"]] if "loss" in logs else []


def share(first, last):
    """The share of calls of training that matched their capture, between two reports."""

    def counts(report):
        trained = {n: c for n, c in report.eager_calls.items() if n not in ("no_grad", "recompute")}
        return report.matched, sum(trained.values())

    (matched, eager), (before, eager_before) = counts(last), counts(first)
    return (matched - before) / (matched - before + eager - eager_before)


@pytest.mark.parametrize(
    ("name", "steps", "more"),
    [("trl_sft", 60, {}), ("trl_dpo", 50, {}), ("trl_grpo", 40, {"tokens": 24})],
)
def test_at_least_95_percent_behind_step_20(name, steps, more, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend("examples")
    datasets.disable_progress_bars()
    directory = write_checkpoint(tmp_path / "checkpoint", "qwen3_moe", max_position_embeddings=512)
    monkeypatch.chdir(tmp_path)
    module, counts = importlib.import_module(name), Counts()
    monkeypatch.setattr(
        module, "GraphCallback", lambda: setattr(counts, "callback", made := kind()) or made
    )
    kind = importlib.import_module("moe_graphs.integrations.transformers").GraphCallback
    callback = module.main(directory, steps, counts, **more)
    assert len(counts.after) == steps
    assert share(counts.after[BEHIND - 1], counts.after[-1]) >= 0.95
    assert callback.report.shapes > 1
    assert callback.accelerated.lengths.forwards > steps - 10
