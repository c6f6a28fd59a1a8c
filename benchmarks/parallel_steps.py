"""A training step on several ranks: eager FSDP2, with torch.compile, and as one graph.

    torchrun --nproc-per-node 2 benchmarks/parallel_steps.py --out parallel_steps.jsonl

Two models that launch more than they compute: a dense one like Llama, sharded by FSDP2, and the
launch-bound MoE of `partial_graphs.py`, its experts shared by all ranks. Forward, backward,
clipping and AdamW. Contenders take turns; times are medians of rank 0, a line for each as soon as
it is known. `loss_difference` is the largest between the first losses and those of eager.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contenders import launch_bound
from full_iteration import llama
from moe_graphs import DeviceStep, FullIteration
from moe_graphs.bench import environment
from moe_graphs.kernels import cross_entropy
from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize

FIRST_STEPS = 6  # of which a whole step runs three eagerly


@dataclass(frozen=True)
class Case:
    model: str
    contender: str
    config: TransformerConfig
    layout: ParallelConfig
    batch_size: int
    dispatcher: str = "all_to_all"
    compiled: bool = False
    whole: bool = False


def cases(ranks: int, smoke: bool, dispatcher: str) -> Iterator[Case]:
    dense, moe = llama(), launch_bound()
    if smoke:
        dense, moe = (setting.tiny(torch.device("cpu")) for setting in (dense, moe))
    for reshard in (False, True):
        layout = ParallelConfig(dp_shard=ranks, reshard_after_forward=reshard)
        case = Case("dense", "", dense.config, layout, dense.batch_size)
        for contender, options in (
            ("eager", {}),
            ("torch.compile", {"compiled": True}),
            ("whole step", {"whole": True}),
        ):
            if not (smoke and contender == "torch.compile"):
                yield replace(case, contender=contender, **options)
    layout = ParallelConfig(dp_shard=ranks, ep=ranks, reshard_after_forward=False)
    case = Case("moe", "", moe.config, layout, moe.batch_size)
    yield replace(case, contender="eager, all_to_all")
    yield replace(case, contender=f"eager, {dispatcher}", dispatcher=dispatcher)
    yield replace(case, contender=f"whole step, {dispatcher}", dispatcher=dispatcher, whole=True)


class Run:
    """One contender: its step, and the losses of its first steps."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = LanguageModel(case.config, device=device, dtype=dtype)
        mesh = make_mesh(case.layout, device.type)
        options = {"dispatcher": case.dispatcher} if case.layout.ep > 1 else {}
        self.model = parallelize(model, case.layout, mesh, **options)
        if case.compiled:
            for layer in self.model.layers:
                layer.compile()
        on_gpu = {"capturable": True} if device.type == "cuda" else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, **on_gpu)
        self.update = DeviceStep(optimizer, clip_norm=1.0, set_to_none=True)
        self.step: Callable[[Tensor], Tensor] = self._step
        if case.whole:
            self.step = FullIteration(
                self._step, model=model, optimizer=optimizer, state=[self.update]
            )
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (case.batch_size, case.config.max_sequence_length + 1)
        tokens = torch.randint(case.config.vocab_size, shape, generator=generator)
        self.batch = tokens.to(device)
        self.first = torch.stack([self.step(self.batch) for _ in range(FIRST_STEPS)]).cpu()
        self.milliseconds: list[float] = []

    def _step(self, tokens: Tensor) -> Tensor:
        output = self.model(tokens[:, :-1])
        logits = output.logits_BSV.flatten(0, 1)
        loss = cross_entropy(logits, tokens[:, 1:].flatten()) + output.aux_loss
        loss.backward()
        self.update()
        return loss.detach()

    def turn(self, steps: int) -> None:
        _synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step(self.batch)
        _synchronize()
        self.milliseconds.append(1e3 * (time.perf_counter() - began) / steps)

    def release(self) -> None:
        if isinstance(self.step, FullIteration):
            self.step.release()

    def line(self, eager: Run | None) -> dict[str, Any]:
        layout = self.case.layout
        median = statistics.median(self.milliseconds)
        found = {
            "model": self.case.model, "contender": self.case.contender,
            "ranks": layout.world_size, "ep": layout.ep,
            "reshard_after_forward": layout.reshard_after_forward,
            "tokens_per_rank": self.batch[:, 1:].numel(), "step_ms": round(median, 3),
            "step_ms_of_turns": [round(each, 3) for each in self.milliseconds],
        }  # fmt: skip
        if eager is not None:
            found["speedup"] = round(statistics.median(eager.milliseconds) / median, 2)
            found["loss_difference"] = (self.first - eager.first).abs().max().item()
        if isinstance(self.step, FullIteration):
            report = self.step.report()
            found |= {"state": report.state, "kernels": report.kernels}
        return found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def measure(given: list[Case], device: torch.device, rounds: int, steps: int) -> Iterator[dict]:
    """Contenders of one model, by turns; the first is what the others are compared with."""
    runs: list[Run] = []
    for case in given:
        try:
            runs.append(Run(case, device))
        except Exception as error:  # a line says so, and the others go on
            yield {"model": case.model, "contender": case.contender, "error": repr(error)[:500]}
    for _ in range(rounds):
        for run in runs:
            run.turn(steps)
    for number, run in enumerate(runs):
        yield run.line(runs[0] if number else None)
    for run in runs:
        run.release()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, as a test")
    parser.add_argument("--dispatcher", default="all_gather", help="of whole steps with experts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--commit", help="where there is no .git to ask")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.smoke else "cuda")
    if not options.smoke:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo" if options.smoke else "nccl")
    every = list(cases(dist.get_world_size(), options.smoke, options.dispatcher))
    constant = {"benchmark": "parallel_steps", "environment": environment.stamp(options.commit)}
    for key in dict.fromkeys((c.model, c.layout) for c in every):
        alike = [case for case in every if (case.model, case.layout) == key]
        for line in measure(alike, device, options.rounds, options.steps):
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)
                if options.out:
                    with options.out.open("a") as lines:
                        lines.write(json.dumps({**line, **constant}) + "\n")
    if started:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
