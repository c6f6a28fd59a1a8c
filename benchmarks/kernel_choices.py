"""Whole steps with and without SwiGLU in the GEMMs' epilogues and kernels launched early.

    python benchmarks/kernel_choices.py --models launch_bound,gpu_bound --out kernel_choices.jsonl

The models of `full_iteration.py` (the GPU-bound one at 8k tokens), forward, backward and torch's
AdamW as one graph. `bitwise`: the first five losses are those of the first choice. Turns of some
steps in random order; the median of the turns. All choices stand beside each other: the GPU-bound
model takes about 30 GB for each (`--choices neither,both`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contenders import LanguageRun
from full_iteration import FULL_OPTIMIZER, settings
from moe_graphs.bench import environment
from moe_graphs.bench.timing import elapsed
from moe_graphs.kernels.gemm.variants import fused_swiglu
from moe_graphs.kernels.launching import dependent_launch

CHOICES = {
    "neither": (),
    "swiglu": (fused_swiglu,),
    "dependent launch": (dependent_launch,),
    "both": (fused_swiglu, dependent_launch),
}


@contextlib.contextmanager
def choice(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in CHOICES[name]:
            stack.enter_context(each())
        yield


def records(model: str, names: list[str], tiny: bool) -> Iterator[dict[str, object]]:
    setting, device = settings()[model], torch.device("cpu" if tiny else "cuda")
    if tiny:
        setting = setting.tiny(device)
    runs, losses = {}, {}
    for name in names:
        with choice(name):
            run = runs[name] = LanguageRun(setting, FULL_OPTIMIZER, "local", device)
            losses[name] = torch.stack([run.step().clone() for _ in range(5)])
    spent: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(0 if tiny else setting.rounds):
        for name in random.sample(names, len(names)):
            with choice(name):
                runs[name].step()
                steps = lambda run=runs[name]: [run.step() for _ in range(setting.steps)]  # noqa: E731
                spent[name].append(elapsed(steps) / setting.steps)
    for name, run in runs.items():
        report = run.report()
        line = {"model": model, "choice": name, "kernels": report.kernels, "step_ms": None}
        line["bitwise"] = torch.equal(losses[name], losses[names[0]])
        line["captures"], line["fallbacks"] = report.captures, str(report.eager_calls)
        if spent[name]:
            line["step_ms"] = round(sorted(spent[name])[len(spent[name]) // 2], 3)
        yield line
        run.release()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="launch_bound,gpu_bound")
    parser.add_argument("--choices", default=",".join(CHOICES), help="the first is the reference")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, as a test")
    parser.add_argument("--commit", help="where there is no .git to ask")
    args = parser.parse_args(arguments)
    stamp = {"benchmark": "kernel_choices", "environment": environment.stamp(args.commit)}
    for model in args.models.split(","):
        for record in records(model, args.choices.split(","), args.tiny):
            print(json.dumps(record), flush=True)
            if args.out:
                with args.out.open("a") as lines:
                    lines.write(json.dumps({**record, **stamp}) + "\n")


if __name__ == "__main__":
    main()
