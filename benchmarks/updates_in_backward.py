"""Whole steps with updates beside the backward (`UpdateInBackward`) against updates behind it.

    timeout 500 python benchmarks/updates_in_backward.py --out benchmarks/results/updates_h200.jsonl

Three layers of Qwen3-30B-A3B at 8k and 16k tokens, bf16, both steps as one graph (`FullIteration`)
of the same model and optimizer. A line for each size and `max_programs` (None: no limit): the two
take turns in random order, median of the rounds; `update_ms` is the update by itself, all that can
be hidden; `pool_gib` the memory of the graphs. A line is written as soon as it is measured. That
both compute the same bits is tested in `tests/optim`. `--tiny` runs one small shape, on the CPU
without times: a test of this file.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contenders import Setting, adamw, free_memory, gpu_bound
from measured_cases import measure_cases
from moe_graphs import FullIteration
from moe_graphs.bench.timing import elapsed
from moe_graphs.dispatch import make_dispatcher
from moe_graphs.kernels import cross_entropy
from moe_graphs.layers import LanguageModel
from moe_graphs.optim import UpdateInBackward
from timed_replays import check_replayed

PROGRAMS = (None, 66, 24)
STEPS = 3  # of a turn


class Steps:
    """A model, and the two ways to train it by the same optimizer."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        torch.manual_seed(setting.seed)
        dispatcher = make_dispatcher("local")
        self.model = LanguageModel(setting.config, dispatcher, device=device, dtype=setting.dtype)
        self.optimizer = adamw(self.model, ours=True)
        self.held = [*self.model.parameters()]
        shape = (setting.batch_size, setting.config.max_sequence_length + 1)
        self.batch = torch.randint(setting.config.vocab_size, shape, device=device)

    def loss(self, batch: Tensor) -> Tensor:
        output = self.model(batch[:, :-1])
        loss = cross_entropy(output.logits_BSV.flatten(0, 1), batch[:, 1:].flatten())
        return loss + output.aux_loss

    def captured(self, step: Callable[[Tensor], Tensor]) -> FullIteration:
        """That errs where it could not replay."""
        options = {"model": self.model, "optimizer": self.optimizer, "on_mismatch": "error"}
        whole = FullIteration(step, **options, warmup_steps=1, verify=False)
        for _ in range(3):
            loss = whole(self.batch)
        check_replayed(whole.report())
        if not loss.isfinite():
            raise RuntimeError(f"loss {loss.item()}")
        return whole

    def behind(self) -> FullIteration:
        def step(batch: Tensor) -> Tensor:
            loss = self.loss(batch)
            loss.backward()
            # Named, since the other way has made this optimizer refuse whole steps.
            self.optimizer.step(parameters=self.held)
            self.optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return self.captured(step)

    def beside(self, updates: UpdateInBackward) -> FullIteration:
        def step(batch: Tensor) -> Tensor:
            loss = self.loss(batch)
            updates.backward(loss)
            return loss.detach()

        return self.captured(step)

    def update_ms(self) -> float:
        """The least of some; gradients of zeros take as long as others."""
        for p in self.held:
            p.grad = torch.zeros_like(p)
        found = min(elapsed(lambda: self.optimizer.step(parameters=self.held)) for _ in range(5))
        self.optimizer.zero_grad(set_to_none=True)
        return found


def measure(steps: Steps, programs: int | None, device: torch.device, rounds: int) -> dict:
    updates = UpdateInBackward(steps.model, steps.optimizer, max_programs=programs)
    wholes = {"behind": steps.behind(), "beside": steps.beside(updates)}
    record: dict = {"max_programs": programs}
    if device.type == "cuda":
        record["update_ms"] = round(steps.update_ms(), 3)
        spent: dict[str, list[float]] = {name: [] for name in wholes}
        for _ in range(rounds):
            for name in random.sample(list(wholes), len(wholes)):
                whole = wholes[name]
                ms = elapsed(lambda w=whole: [w(steps.batch) for _ in range(STEPS)]) / STEPS
                spent[name].append(ms)
        for name, times in spent.items():
            record[f"{name}_ms"] = round(sorted(times)[rounds // 2], 3)
            record[f"{name}_pool_gib"] = round(wholes[name].report().pool_bytes / 2**30, 2)
        ratios = sorted(a / b for a, b in zip(spent["behind"], spent["beside"], strict=True))
        record["speedup"] = round(ratios[rounds // 2], 4)
        record["speedup_p10_p90"] = [round(ratios[int(q * (rounds - 1))], 4) for q in (0.1, 0.9)]
    for whole in wholes.values():
        whole.release()
    return record


def records(args: argparse.Namespace) -> Iterator[dict]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("this needs a CUDA device: --tiny runs small shapes on the CPU, as a test")
    for batch_size in (2,) if args.tiny else (2, 4):
        setting = replace(gpu_bound(), batch_size=batch_size)
        setting = setting.tiny(device) if args.tiny else setting
        steps = Steps(setting, device)
        for programs in PROGRAMS[:1] if args.tiny else PROGRAMS:
            yield {"tokens": setting.tokens, **measure(steps, programs, device, args.rounds)}
            free_memory(device)
        del steps
        free_memory(device)


def main(arguments: list[str] | None = None) -> None:
    measure_cases("updates_in_backward", __doc__, 21, records, arguments)


if __name__ == "__main__":
    main()
