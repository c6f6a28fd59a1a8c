"""The pipeline example, run as its docstring says: gloo on the CPU, NCCL on two GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_graphs

ROOT = Path(moe_graphs.__file__).parents[1]
STEPS = 10


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_it_trains_and_replays(device):
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    environment = os.environ | hidden | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = str(ROOT / "examples" / "pipeline_1f1b.py")
    ran = subprocess.run(
        [sys.executable, *command, example, str(STEPS)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ran.stdout)]
    assert losses[-1] < losses[0] < 5.5  # guessing among 256 bytes gives 5.55
    in_flight = dict(re.findall(r"rank (\d): (\d) microbatches in flight", ran.stdout))
    assert in_flight == {"0": "2", "1": "1"}
    counts = dict(re.findall(r"rank (\d): .* (\d+) replayed or audited", ran.stdout))
    assert int(counts["1"]) == (STEPS - 3) * 8 * 2  # 8 microbatches, 2 layers


def test_it_is_short():
    text = (ROOT / "examples" / "pipeline_1f1b.py").read_text()
    assert len(text.splitlines()) < 80
