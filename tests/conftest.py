"""One thread per test process, and plain words for what a machine without GPUs leaves out."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import suite_runs

# The same examples in every run: what CI says is about the change. make test-all finds new ones.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("new")


def pytest_configure(config: pytest.Config) -> None:
    # Tests run side by side (pytest -n), and are small: threads only get in each other's way.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that they start
    _cards_by_turns(config)
    _before_transformer_engine_is_imported()
    hypothesis.settings.load_profile("new" if config.getoption("--full-grids") else "same")
    if (path := config.getoption("--record-run")) and not hasattr(config, "workerinput"):
        suite = config.getoption("--record-suite") or " ".join(config.invocation_params.args)
        commit = config.getoption("--record-commit")
        config.pluginmanager.register(suite_runs.Recorder(Path(path), commit, suite))


def _cards_by_turns(config: pytest.Config) -> None:
    """Let each process of pytest -n begin with another GPU, where nobody chose the GPUs."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    cards = list(map(str, range(torch.cuda.device_count())))
    if worker and len(cards) > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        first = int(worker.removeprefix("gw")) % len(cards)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards[first:] + cards[:first])


def _before_transformer_engine_is_imported() -> None:
    """Set what Transformer Engine reads once per process, whichever test imports it first.

    Its functions of torch.compile are refused by name in what is captured. It loads the cuDNN of
    the system unless CUDNN_HOME names another one, and torch refuses a cuDNN that is older than
    its own.
    """
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if importlib.util.find_spec("nvidia") and (found := importlib.util.find_spec("nvidia.cudnn")):
        for location in found.submodule_search_locations or ():
            os.environ.setdefault("CUDNN_HOME", location)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-grids", action="store_true", help="every combination of what tests vary, not pairs"
    )
    parser.addoption(
        "--long", action="store_true", help="what cheaper tests hold as well, too, as CI does"
    )
    parser.addoption("--record-run", help="append a line about this run to a file")
    parser.addoption("--record-suite", help="the suite's name in that line")
    parser.addoption("--record-commit", help="the commit in that line, where there is no .git")


def _is_left_out(item: pytest.Item) -> bool:
    of_gpus = any(map(item.get_closest_marker, ("gpu", "multigpu")))
    is_long = item.get_closest_marker("long") and not of_gpus
    is_full = item.get_closest_marker("full")
    asked = item.config.getoption
    return bool((is_long and not asked("--long")) or (is_full and not asked("--full-grids")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(filter(_is_left_out, items))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        wanted = 2 if item.get_closest_marker("multigpu") else 0
        wanted = max(wanted, 1 if item.get_closest_marker("gpu") else 0)
        if found < wanted:
            reason = f"waits for {wanted} CUDA GPU{'s' if wanted > 1 else ''}, found {found}"
            item.add_marker(pytest.mark.skip(reason=reason))


_imported, MANY_OBJECTS = 0, 5_000


def pytest_runtest_setup() -> None:
    # The engine collects garbage before every capture. What has been imported is none, and takes
    # nine tenths of the time to look through; tests import more (torch._dynamo, inductor), and
    # keep what they compare with (caches, fixtures of a file).
    global _imported
    if len(sys.modules) > _imported or len(gc.get_objects()) > MANY_OBJECTS:
        _imported = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _short_ends() -> None:
    """Runs of the command in this process sample eight tokens, each of which is a forward.

    They draw no picture (`drawn`), which takes as long as four of their steps.
    """
    from moe_graphs.lm import run, sample

    sample._NEW_TOKENS = 8
    run.draw_losses = lambda *_, **__: None


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs of the command in this process draw their pictures."""
    from moe_graphs.lm import picture, run

    monkeypatch.setattr(run, "draw_losses", picture.draw_losses)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small documents to train on."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(90):
        (folder / f"{number}.py").write_text(f"def f_{number}(x):\n    return x * {number}\n" * 3)
    return folder


@pytest.fixture(scope="module")
def thawed() -> Iterator[None]:
    """Collect objects that tests of a file have frozen and that are garbage afterwards."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every fresh tensor is full of NaN or of the largest integer: what nobody writes is found."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Flash attention's backward adds with atomics otherwise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Plain Triton kernels run on the CPU."""
    from interpreted import interpreter

    with interpreter():
        yield
