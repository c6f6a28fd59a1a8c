"""Several benchmarks at once, one on each GPU of a machine.

    python benchmarks/on_gpus.py queues.json --limit 500 --out runs

The file has a list of queues, one for each GPU, and a queue is a list of jobs that run one after
the other: `[[{"name": "even", "command": "python benchmarks/...", "limit": 200, "needs": 60}]]`.
`limit` are the seconds after which a job gets SIGINT, `needs` those that have to be left for it to
start, `cwd` its folder. What a job prints is in `OUT/NAME.log`; a job finds that folder as `$OUT`.
Timings of GPUs that run side by side share the host: leave cores free, and do not compare cards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

THREADS = "8"  # of a job's libraries


def run_queue(gpu: int, jobs: list[dict[str, Any]], end: float, out: Path) -> None:
    """Run jobs on one GPU and print a line for each."""
    for job in jobs:
        begin = time.monotonic()
        left = end - begin
        if left < job.get("needs", 20):
            print(f"gpu {gpu}, {job['name']}: not started, {left:.0f} s are left", flush=True)
            continue
        seconds = max(1, min(left - 5, job.get("limit", left)))
        given = {"CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": THREADS, "OUT": str(out)}
        command = ["timeout", "-s", "INT", "-k", "10", f"{seconds:.0f}", "bash", "-c"]
        with (out / f"{job['name']}.log").open("w") as log:
            done = subprocess.run(
                [*command, job["command"]], cwd=job.get("cwd"), env=os.environ | given,
                stdout=log, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        took = time.monotonic() - begin
        print(f"gpu {gpu}, {job['name']}: status {done.returncode}, {took:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("queues", type=Path)
    parser.add_argument("--limit", type=float, required=True, help="seconds for all of them")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of what they print")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    queues, end = json.loads(options.queues.read_text()), time.monotonic() + options.limit
    threads = [
        threading.Thread(target=run_queue, args=(gpu, jobs, end, options.out.resolve()))
        for gpu, jobs in enumerate(queues)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
