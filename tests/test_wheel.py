"""The wheel has all of the package and nothing else, and works where the repository is not.

The source distribution makes the same wheel.
"""

from __future__ import annotations

import configparser
import email
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import moe_graphs
from test_house_rules import FILES, PACKAGE
from test_imports import ROOT, distributions, module_name, project

pytest.importorskip("hatchling")

# What others import: not the engine's modules, the command's, or each kernel by itself.
INTERNAL = ("moe_graphs.engine.", "moe_graphs.lm.", "moe_graphs.bench.", "moe_graphs.kernels.")
PUBLIC = [name for name in map(module_name, FILES) if not name.startswith(INTERNAL)]
# The file of each module, and how many calls matched their capture.
USE = """
import importlib, json, sys
import torch
import moe_graphs
from moe_graphs.layers import MoEConfig, MoELayer

def trained(graphed):
    torch.manual_seed(0)
    model = MoELayer(MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16), 8)
    impl = "local" if graphed else "none"
    scopes = "moe" if graphed else ()
    config = moe_graphs.GraphConfig(scopes=scopes, impl=impl, warmup_steps=1)
    with_graphs = moe_graphs.graph(model, config)
    for _ in range(4):
        with with_graphs.step():
            model(torch.randn(6, 8)).hidden.square().mean().backward()
    return with_graphs.report(), [parameter.grad for parameter in model.parameters()]

(report, graphed), (_, eager) = trained(True), trained(False)
assert all(map(torch.equal, graphed, eager))
files = [importlib.import_module(name).__file__ for name in sys.argv[1:]]
print(json.dumps([files, report.matched]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a child process that knows nothing of the repository."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, folder: Path, project: Path = ROOT) -> Path:
    """Build in this environment: pip would fetch the backend for one of its own."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=project)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory) -> Path:
    """Programs of an environment with the wheel.

    The wheel's dependencies are found in the running environment, whose ``.pth`` files, and so its
    editable install, are not read there.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(ours))
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
    return folder / "bin"


def metadata_of(archive: zipfile.ZipFile) -> Message:
    (name,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
    return email.message_from_bytes(archive.read(name))


def test_it_holds_the_package_and_nothing_else(wheel):
    package = {file for file in PACKAGE.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert PACKAGE / "py.typed" in package
    described = f"moe_graphs-{moe_graphs.__version__}.dist-info"
    others = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    with zipfile.ZipFile(wheel) as archive:
        assert sorted(archive.namelist()) == sorted(
            [str(file.relative_to(ROOT)) for file in package]
            + [f"{described}/{name}" for name in others]
        )
        for file in package:
            assert archive.read(str(file.relative_to(ROOT))) == file.read_bytes(), file
        licence = archive.read(f"{described}/licenses/LICENSE")
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(f"{described}/entry_points.txt").decode())
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert {name: dict(entries[name]) for name in entries.sections()} == {
        "console_scripts": {"moe-graphs": "moe_graphs.cli:main"}
    }


def test_the_source_distribution_makes_the_same_wheel(wheel, tmp_path):
    with tarfile.open(build("sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert (unpacked / "tests" / "conftest.py").is_file()
    again = build("wheel", tmp_path / "wheel", unpacked)
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(again) as its:
        assert {name: ours.read(name) for name in ours.namelist()} == {
            name: its.read(name) for name in its.namelist()
        }


def test_its_metadata_are_the_projects(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = metadata_of(archive)
    declared = project()
    assert metadata["Version"] == declared["version"] == moe_graphs.__version__
    assert metadata["Requires-Python"] == declared["requires-python"]
    assert metadata["License-Expression"] == declared["license"]
    assert metadata.get_payload(decode=True).decode() == (ROOT / "README.md").read_text()
    extras = declared["optional-dependencies"]
    assert sorted(metadata.get_all("Provides-Extra")) == sorted(extras)
    required = metadata.get_all("Requires-Dist")
    always = [each for each in required if "extra ==" not in each]
    assert distributions(always) == distributions(declared["dependencies"])
    for name, requirements in extras.items():
        optional = [each for each in required if f"extra == '{name}'" in each]
        assert distributions(optional) == distributions(requirements), name


def test_its_command_runs(clean, tmp_path):
    assert "train" in run(clean / "moe-graphs", "--help", cwd=tmp_path)


@pytest.mark.long
def test_it_is_imported_captures_and_replays(clean, tmp_path):
    said = run(clean / "python", "-W", "ignore", "-c", USE, *PUBLIC, cwd=tmp_path)
    files, matched = json.loads(said)
    assert len(files) == len(PUBLIC)
    assert {Path(file).is_relative_to(clean.parent) for file in files} == {True}
    assert matched == 3
