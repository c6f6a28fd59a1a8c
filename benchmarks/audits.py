"""The time and memory that audits take in the first steps of a run, by scopes and by whole steps.

    python benchmarks/audits.py --out benchmarks/results/audits_h200.jsonl
    python benchmarks/audits.py --models launch_bound --steps 100

Each way trains twice in a process of its own: without audits and with the default ("auto"). Both
have the same batches. `share` is the time that the run with audits takes more, over the time of all
steps behind the warm-up; its captures are not in it. `median` compares steps without an audit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from contenders import WARMUP_STEPS, Contender, Run, settings
from environment import stamp
from own_process import in_own_process, leave

WAYS = {
    "attn,moe": Contender("attn,moe", "attn,moe"),
    "whole steps": Contender("whole steps", full_iteration=True, optimizer_in_graph=True),
    "accelerate_model": Contender("accelerate_model"),
}
STEPS = {"launch_bound": 1000, "gpu_bound": 200, "transformers": 1000}
CASES = (
    ("launch_bound", "attn,moe"),
    ("launch_bound", "whole steps"),
    ("gpu_bound", "attn,moe"),
    ("gpu_bound", "whole steps"),
    ("transformers", "accelerate_model"),
)
BEFORE = WARMUP_STEPS + 2  # warm-up and capture


def own_steps(model: str, way: str, every: str | None, smoke: bool) -> tuple[Callable, Callable]:
    """A step of one of our models and the report of its graphs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = settings()[model].tiny(device) if smoke else settings()[model]
    run: Run = setting.run(replace(WAYS[way], audit_every=every), "local", device)
    return run.step, run.report


def steps_of_transformers(every: str | None, smoke: bool) -> tuple[Callable, Callable]:
    """A step of Qwen3-MoE with 12 small layers and LoRA, and the report of its graphs."""
    from fine_tuning import GRAPHS, Case, graphs_of, model_of, optimizer_of
    from moe_graphs.integrations.transformers import accelerate_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = Case("launch_bound", GRAPHS, checkpointing=False, smoke=smoke)
    model = model_of(case, device)
    graphs = replace(graphs_of(case, model), audit_every=every)
    accelerated, optimizer = accelerate_model(model, graphs=graphs), optimizer_of(case, model)
    shape = (case.size.sequences, case.size.sequence)

    def step() -> torch.Tensor:
        tokens = torch.randint(model.config.vocab_size, shape, device=device)
        with accelerated.step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, accelerated.graphs.report


def measure(model: str, way: str, every: str | None, steps: int, smoke: bool) -> dict[str, Any]:
    if model == "transformers":
        step, report = steps_of_transformers(every, smoke)
    else:
        step, report = own_steps(model, way, every, smoke)
    for _ in range(BEFORE):
        step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step().item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    found = report()
    line: dict[str, Any] = {
        "seconds": sum(seconds),
        "median_ms": 1e3 * statistics.median(seconds),
        "audited": found.audited,
        "audits_passed": found.audits_passed,
        "audit_seconds": found.audit_seconds,
        "eager_calls": found.eager_calls,
    }
    if torch.cuda.is_available():
        line["reserved_bytes"] = torch.cuda.memory_reserved()
        line["max_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a file of JSON lines to append to")
    parser.add_argument("--commit", help="the commit to stamp, where .git does not say it")
    parser.add_argument("--models", default=",".join(STEPS), help="by commas")
    parser.add_argument("--steps", type=int, help="steps behind the warm-up")
    parser.add_argument("--smoke", action="store_true", help="tiny models, also on a CPU")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(*json.loads(options.one))))
        return 0
    models, failed = options.models.split(","), 0
    if set(models) - set(STEPS):
        parser.error(f"--models: known are {', '.join(STEPS)}")
    environment = stamp(options.commit)
    for model, way in CASES:
        if model not in models:
            continue
        steps, without = options.steps or STEPS[model], None
        for every in (None, "auto"):
            one = json.dumps([model, way, every, steps, options.smoke])
            found = in_own_process(__file__, [one], options.timeout)
            line = {"benchmark": "audits", "model": model, "way": way, "audit_every": every,
                    "steps": steps, "smoke": options.smoke, **found}  # fmt: skip
            if without is not None and line["error"] is None:
                line["share"] = line["seconds"] / without - 1
            without = line.get("seconds")
            failed += line["error"] is not None
            leave(line | {"environment": environment}, SHOWN, options.out)
    return int(failed > 0)


SHOWN = ("model", "way", "audit_every", "steps", "seconds", "median_ms", "audited",
         "audit_seconds", "share", "max_reserved_bytes", "error")  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
