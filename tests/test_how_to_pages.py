"""Pages of `docs/how_to/` are true: their Python runs, and prints what they show."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from test_pages_run import DOCS

PAGES = sorted(DOCS.glob("how_to/*.md"))
ON_TWO_RANKS = "torchrun --nproc-per-node 2 FILE"
EIGHT_GPUS, HERE = 'strategy="ddp", devices=8', 'accelerator="cpu", devices=1'


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


# Trainer and Lightning warn that they would use more of this machine.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=pytest.mark.long if ON_TWO_RANKS in file.read_text() else ())
        for file in PAGES
    ],
    ids=lambda file: file.stem,
)
def test_a_page_prints_what_it_shows(file, tmp_path, monkeypatch, capfd):
    page = file.read_text()
    for name in ("lightning", "transformers"):
        if re.search(rf"^(from|import) {name}\b", page, re.MULTILINE):
            pytest.importorskip(name, reason=f"needs {name}")
    monkeypatch.chdir(tmp_path)
    if ON_TWO_RANKS in page:
        (_, program), (_, shown) = blocks(page)
        assert lines_of_two_ranks(program) == shown.splitlines()
        return
    names: dict[str, object] = {"__name__": "page"}
    for language, block in blocks(page):
        if language == "text":
            assert block in capfd.readouterr().out
        else:
            assert language == "python"
            exec(compile(block.replace(EIGHT_GPUS, HERE), str(file), "exec"), names)


def lines_of_two_ranks(program: str) -> list[str]:
    """Lines that a program prints on two ranks, also where one begins within the other."""
    with open("page.py", "w") as written:
        written.write(program)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "page.py"]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"rank \d: (?:(?!rank \d: ).)*", done.stdout))


def test_other_pages_with_programs_have_tests_of_their_own():
    """The tests are test_readme, test_tutorial, test_fine_tuning_page and test_pages_run."""
    others = {file.name for file in DOCS.rglob("*.md") if "```python" in file.read_text()}
    assert others - {file.name for file in PAGES} == {
        *("guide.md", "tutorial.md", "fine_tuning.md"),
        *("own_block.md", "concepts.md", "many_gpus.md"),
    }


def test_a_page_has_a_program_what_it_prints_and_an_answer():
    assert len(PAGES) > 10
    for file in PAGES:
        page = file.read_text()
        languages = [language for language, _ in blocks(page)]
        assert languages[:2] == ["python", "text"], file
        assert "\nAPI: " in page, file
