"""README.md and docs/guide.md are true: code runs, names exist, tables are those of the lines."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import model_flops
import moe_graphs
import readme_tables as tables
from lm_runs import small_preset
from moe_graphs.layers import LanguageModel
from moe_graphs.pipelines.builders import one_f_one_b
from moe_graphs.registry import PRESETS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "guide.md"]
README, GUIDE = (path.read_text() for path in DOCUMENTS)
BOTH = README + GUIDE
PERFORMANCE = tables.PERFORMANCE.read_text()
CODE = re.findall(r"^```python\n(.*?)^```", BOTH, re.DOTALL | re.MULTILINE)
SHELL = [line for text in re.findall(r"^```\n(.*?)^```", BOTH, re.DOTALL | re.MULTILINE)
         for line in text.splitlines()]  # fmt: skip
SHELL += re.findall(r"`((?:make|torchrun|moe-graphs) [^`]*)`", BOTH)
# A measurement: a ratio, a time, a rate, an amount of memory, a share. Not the measure of a shape.
MEASUREMENT = re.compile(
    r"\b\d[\d.,]* ?(?:x\b(?! ?\d)|ms\b|us\b|seconds|minutes|hours|GiB|TFLOP|bits per byte)"
    r"|\b(?:two|three|four|five|six|seven|eight|nine|ten) (?:times|seconds|minutes)"
)


# ---- numbers


def test_the_tables_are_those_of_the_lines(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_a_number_that_is_not_of_the_lines_is_found(tmp_path, monkeypatch, capsys):
    copies = {tmp_path / path.name: path.read_text() for path in tables.DOCUMENTS}
    block = tables.BLOCK.search(tables.PERFORMANCE.read_text())
    row = next(line for line in block[2].splitlines() if " ms, " in line)
    wrong = tmp_path / "performance.md"
    for path, text in copies.items():
        path.write_text(text.replace(row, row.replace(" ms, ", "1 ms, ", 1)))
    documents = dict(zip(copies, tables.DOCUMENTS.values(), strict=True))
    monkeypatch.setattr(tables, "DOCUMENTS", documents)
    monkeypatch.setattr(tables, "README", tmp_path / "README.md")
    assert tables.main(["--check"]) == 1
    assert f"+{row}" in capsys.readouterr().out
    assert tables.main([]) == 0
    assert wrong.read_text() == tables.PERFORMANCE.read_text()
    assert "](../benchmarks/results/parallel_steps_h200.jsonl)" in wrong.read_text()


def test_a_measurement_stands_in_a_table():
    rest = tables.BLOCK.sub("", BOTH)
    rest = re.sub(r"^```.*?^```", "", rest, flags=re.DOTALL | re.MULTILINE)
    assert MEASUREMENT.findall(rest) == []
    assert all(MEASUREMENT.search(text) for text in ("3.6x eager", "15.9 ms stays", "two minutes"))


def line(contender: str, ms: float, commit: str, hour: int, error: str | None = None):
    stamp = {"gpu": "a GPU", "commit": commit, "date": f"2026-01-01T{hour:02}", "torch": "2"}
    values = dict(benchmark="b", model="m", contender=contender, error=error, environment=stamp)
    return tables.Line(values | {"setting": "s", "step_ms": {"median": ms}}, f"{hour}.jsonl")


def test_lines_are_those_of_the_newest_commit_that_has_all():
    old = [line("eager", 1.0, "old", 1), line("graphs", 1.0, "old", 1)]
    slow = [line("eager", 9.0, "new", 3), line("graphs", 2.0, "new", 3)]
    fast = [line("eager", 5.0, "new", 2), line("graphs", 2.0, "new", 2)]
    failed = [
        line("eager", 5.0, "newest", 4),
        line("graphs", 2.0, "newest", 4, "x"),
    ]
    lines = [*slow, *fast, *old, *failed]
    select = tables.Select("b", {"model": "m"}, ("eager", "graphs"), gpu="a GPU")
    assert list(select.run(lines).values()) == fast
    assert list(select.run(old).values()) == old
    assert tables.fastest_eager(lines, slow[0]) is old[0]
    for missing in (dict(gpu="another"), dict(where={"model": "n"}), dict(contenders=("third",))):
        other = {"benchmark": "b", "gpu": "a GPU"} | missing
        with pytest.raises(LookupError, match="no run has all"):
            tables.Select(**other).run(lines)


def test_the_command_of_each_table_exists():
    documents = PERFORMANCE + tables.MANY_GPUS.read_text()
    made_by = re.findall(r"Made by (.*)\.$", documents, re.MULTILINE)
    commands = {each for text in made_by for each in re.findall("`([^`]+)`", text)}
    assert len(made_by) == len(tables.BLOCK.findall(documents))
    for words in map(shlex.split, commands):
        scripts = [ROOT / word for word in words if word.endswith(".py")]
        assert words[:2] in (["moe-graphs", "train"], ["moe-graphs", "bench"]) or scripts
        assert all(script.exists() for script in scripts)


def test_model_flops_are_those_of_the_products_and_of_causal_attention():
    """Experts that a token meets, router, head, and half of all pairs; checked by hand."""
    config = small_preset().model
    dense = LanguageModel(config, device="meta")
    pairs = 2 * config.num_layers * config.num_heads * 2 * config.head_size  # of the forward
    found = model_flops.counted(config)
    assert found == dense.flops_per_token(0) + 3 * pairs * config.max_sequence_length / 2
    assert model_flops.cell(494.5e12) == "494, 50%"


def test_a_slow_host_is_said():
    fast, slow = (line("eager", ms, "c", hour) for ms, hour in ((50.0, 1), (80.0, 2)))
    best = line("graphs", 10.0, "c", 2)
    assert tables.slow_host([fast, slow], best, fast, "a: b") is None
    said = tables.slow_host([fast, slow], best, slow, "a model: b")
    assert said.startswith("a model: ")
    assert "80.0 ms in this run and 50.0 ms on the fastest host" in said
    assert "10.0 ms are **5.0x**" in said


# ---- code


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(small_preset().model)


def loss_of(output) -> torch.Tensor:
    return output.logits_BSV.float().square().mean() + output.aux_loss


def tokens() -> torch.Tensor:
    return torch.randint(256, (2, 16))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_the_training_loop_reports_what_the_page_shows(capsys, monkeypatch):
    (code,) = [text for text in CODE if "graphs.step()" in text]
    model = language_model()
    names = dict(model=model, loss_of=loss_of, optimizer=optimizer_of(model))
    monkeypatch.setenv("COLUMNS", "120")
    exec(code, names | {"batches": [*(tokens() for _ in range(20)), tokens()[:1]]})
    said = capsys.readouterr().out
    # Numbers of kernels are those of a version of torch.
    (shown, printed) = (re.findall(r"│ +(\d+) │ (3 warmup.*?) +│$", text, re.MULTILINE)
                        for text in (README, said))  # fmt: skip
    assert printed == shown
    assert len(shown) == 2


def test_the_callables_are_graphed():
    (code,) = [text for text in CODE if "make_graphed_callables" in text]
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x, h = (torch.randn(2, 4, requires_grad=True) for _ in range(2))
    order = one_f_one_b(1, 2).local_order(0)
    names = dict(moe_graphs=moe_graphs, first=first, second=second, x=x, h=h, order=order)
    expected = second(first(x))
    exec(code, names)
    assert torch.equal(names["second"](names["first"](x)), expected)


def test_chosen_experts_are_replayed():
    (code,) = [text for text in CODE if "routing.replay" in text]
    model = language_model()
    names = dict(torch=torch, model=model, tokens=tokens(), targets=tokens())
    exec(code, names)
    assert len(names["choices"]) == sum(layer.is_moe for layer in model.layers)
    assert all(layer.moe.router.weight.grad.any() for layer in model.layers if layer.is_moe)


def test_every_block_of_these_documents_has_its_test():
    assert len(CODE) == 3


# ---- names


def test_what_it_names_exists():
    names = set(re.findall(r"\bmoe_graphs((?:\.\w+)+)", BOTH))
    assert len(names) > 8
    for name in names:
        found = moe_graphs
        for part in name[1:].split("."):
            if isinstance(found, ModuleType) and not hasattr(found, part):
                found = pytest.importorskip(f"{found.__name__}.{part}")
            else:
                found = getattr(found, part)
    for method in re.findall(r"\bgraphs\.(\w+)\(", BOTH):
        assert callable(getattr(moe_graphs.Graphs, method))


@pytest.mark.parametrize("document", [*tables.DOCUMENTS, *DOCUMENTS[1:]], ids=lambda p: p.name)
def test_links_and_files_exist(document):
    text = document.read_text()
    targets = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text)
    targets += [f"{ROOT}/{path}" for path in re.findall(r"\bexamples/\w+\.py", text)]
    assert len(targets) > 5
    assert [
        target
        for target in targets
        if not target.startswith("https:") and not (document.parent / target).exists()
    ] == []


def test_links_to_sections_exist():
    for document in (*tables.DOCUMENTS, *DOCUMENTS):
        for target, section in re.findall(r"\]\(([^)#]*)#([\w-]+)\)", document.read_text()):
            there = (document.parent / target if target else document).read_text()
            titles = re.findall(r"^#+ (.*)$", there, re.MULTILINE)
            names = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert section in names, f"{document.name}: {target}#{section}"


def test_commands_of_make_are_targets():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [shlex.split(text, comments=True) for text in SHELL if text.startswith("make ")]
    assert len(commands) > 2
    assert {command[1] for command in commands} <= set(targets)


def test_scopes_are_those_of_the_configuration():
    from moe_graphs.config import SCOPE_STAGES

    rows = re.findall(r"^\| `\"?([\w.*]+)\"?` \| ", GUIDE.split("| scope |")[1].split("\n\n")[0],
                      re.MULTILINE)  # fmt: skip
    assert set(rows) - {"*.self_attn"} == set(SCOPE_STAGES)


# ---- presets


def test_presets_are_those_of_the_table():
    said = dict(re.findall(r"^\| `(\w+)`, .*?([\d.]+) M parameters", PERFORMANCE, re.MULTILINE))
    assert set(said) == set(PRESETS)
    for name, make in PRESETS.items():
        preset = make()
        assert preset.training.sequence_length <= preset.model.max_sequence_length
        parameters = LanguageModel(preset.model, device="meta").num_parameters()
        assert f"{parameters / 1e6:.3g}" == said[name]
        (summary,) = (ROOT / "benchmarks" / "results").glob(f"train_{name}_*/summary.json")
        assert json.loads(summary.read_text())["steps"] == preset.training.steps
    assert "`tiny` on a CPU, `small` on a GPU" in GUIDE
