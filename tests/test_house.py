"""The page of sizes belongs to its lines, and the counting counts."""

from __future__ import annotations

from pathlib import Path

import house
import moe_graphs.config


def test_the_page_is_written_from_the_lines() -> None:
    assert house.TABLE.read_text() == house.table(house.read())


def test_files_and_functions_of_a_call_are_counted_once() -> None:
    choice = moe_graphs.config.Choice("local", ("attn",))
    package = Path(moe_graphs.config.__file__).parent

    def check(times: int) -> None:
        for _ in range(times):
            moe_graphs.config.check(choice)

    found = house.passed(lambda: check(3), package)
    assert found == house.passed(lambda: check(1), package)
    assert found["files"] == 1
    assert found["functions"] > 1
    assert house.passed(lambda: None, package) == {"files": 0, "functions": 0}


def test_arrows_follow_absolute_and_relative_imports(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").write_text("from package.room import one\n")
    (package / "room" / "__init__.py").write_text("")
    (package / "room" / "one.py").write_text("from . import two\nimport torch\n")
    (package / "room" / "two.py").write_text("def f(a, *, b): ...\ndef _g(c): ...\n")
    found = {(Path(a).stem, Path(b).stem) for a, b in house.arrows(house.sources(package))}
    assert found == {("__init__", "one"), ("one", "two")}
    assert house.sizes(package)["public parameters"] == 2
