"""Memory and time of a whole training step of MoE layers, by the room that experts' rows have.

    torchrun --nproc-per-node 2 benchmarks/activation_memory.py --model launch_bound --rounds 3 \\
        --out benchmarks/results/activation_memory_h200.jsonl

Two models with their experts shared by all ranks: the launch-bound one of `partial_graphs.py`, and
layers of Qwen3-30B-A3B with 8,192 tokens a rank. Per `rows_factor` (on two ranks the worst case is
2.0) the step is run without a stack and with one that has room for `--stack-factor` times the rows
of a balanced routing of all layers, whose backward keeps what experts received, or with `--again`
also dispatches it again. `eager` is the dynamic all-to-all, which keeps what there is. Each
contender is alone, one after the other, since what it leaves reserved is its memory. A line each,
of rank 0: step time (median of turns); GiB that the allocator has reserved in the timed turns at
most (`training_gib`), before them with warm-up and capture (`peak_gib`), and between steps
(`reserved_gib`); those of the graph's pool and of the stack; how many of the first steps
overflowed, and whether the first losses are bitwise those without a stack. What `symmetric` shares
with its peers is in none of these. A whole step that was not replayed has an error and no time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contenders import adamw, gpu_bound, launch_bound
from moe_graphs import DeviceStep, FullIteration
from moe_graphs.bench import environment
from moe_graphs.kernels import cross_entropy
from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize
from moe_graphs.training.activation_memory import use_activation_stack
from several_ranks import keep, milliseconds_of, process_group
from timed_replays import NotReplayed, check_replayed

FIRST_STEPS = 6  # of which a whole step runs three eagerly
GIB = 2**30


@dataclass(frozen=True)
class Case:
    model: str
    config: TransformerConfig
    batch_size: int
    rows_factor: float | None = None
    stack_factor: float | None = None
    is_eager: bool = False
    again: bool = False

    @property
    def contender(self) -> str:
        if self.is_eager:
            return "eager, all_to_all"
        stack = ", stack" if self.stack_factor else ""
        return f"whole step{stack}{', dispatched again' if self.again else ''}"


def cases(
    smoke: bool, stack_factor: float, factors: list[float | None], again: bool
) -> Iterator[Case]:
    small, large = launch_bound(), gpu_bound()
    if smoke:
        small, large = (setting.tiny(torch.device("cpu")) for setting in (small, large))
    for setting, batch_size in ((small, small.batch_size), (large, max(1, large.batch_size // 2))):
        yield Case(setting.name, setting.config, batch_size, is_eager=True)
        for factor in factors:
            case = Case(setting.name, setting.config, batch_size, factor)
            yield case
            yield replace(case, stack_factor=stack_factor)
            if again:
                yield replace(case, stack_factor=stack_factor, again=True)


class Run:
    """One contender: its step, and the losses of its first steps."""

    def __init__(self, case: Case, device: torch.device, dispatcher: str) -> None:
        self.case, ranks = case, dist.get_world_size()
        self.before = _between_steps()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = LanguageModel(case.config, device=device, dtype=dtype)
        layout = ParallelConfig(dp_shard=ranks, ep=ranks, reshard_after_forward=False)
        options = {} if case.is_eager else {"rows_factor": case.rows_factor}
        name = "all_to_all" if case.is_eager else dispatcher
        mesh = make_mesh(layout, device.type)
        self.model = parallelize(model, layout, mesh, dispatcher=name, **options)
        tokens = case.batch_size * case.config.max_sequence_length
        self.stack = None
        if case.stack_factor is not None:
            assert case.config.moe is not None
            balanced = tokens * case.config.moe.top_k * case.config.num_layers
            rows = int(case.stack_factor * balanced)
            self.stack = use_activation_stack(self.model, rows, recompute_dispatch=case.again)
        optimizer = adamw(model)
        self.update = DeviceStep(
            optimizer,
            clip_norm=1.0,
            set_to_none=True,
            process_group=dist.group.WORLD,
            activation_stack=self.stack,
        )
        self.step: Any = self._step
        if not case.is_eager:
            self.step = FullIteration(
                self._step, model=model, optimizer=optimizer, state=[self.update]
            )
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (case.batch_size, case.config.max_sequence_length + 1)
        self.batch = torch.randint(case.config.vocab_size, shape, generator=generator).to(device)
        steps = [self.step(self.batch) for _ in range(FIRST_STEPS)]
        self.first = torch.stack([loss for loss, _ in steps]).cpu()
        # Not `overflowed`, a name that the step mentions: guards would see another value there.
        self.skipped_first = sum(int(overflowed) for _, overflowed in steps)

    def _step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(tokens[:, :-1])
        logits = output.logits_BSV.flatten(0, 1)
        loss = cross_entropy(logits, tokens[:, 1:].flatten()) + output.aux_loss
        loss.backward()
        result = self.update(overflow=output.dropped_tokens)
        return loss.detach(), result.overflowed

    def line(self, rounds: int, steps: int) -> dict[str, Any]:
        peak, _ = self._peak(), _between_steps()
        if peak is not None:
            torch.cuda.reset_peak_memory_stats()
        self.step(self.batch)  # eager ones find no memory cached
        milliseconds = [
            milliseconds_of(lambda: self.step(self.batch), steps) for _ in range(rounds)
        ]
        engine = self.step if isinstance(self.step, FullIteration) else None
        report = None if engine is None else engine.report()
        check_replayed(report)
        found = {
            "model": self.case.model, "contender": self.case.contender,
            "ranks": dist.get_world_size(), "rows_factor": self.case.rows_factor,
            "tokens_per_rank": self.batch[:, 1:].numel(),
            "step_ms": round(statistics.median(milliseconds), 3),
            "step_ms_of_turns": [round(each, 3) for each in milliseconds],
            "training_gib": self._peak(), "peak_gib": peak,
            "reserved_gib": _gib(_between_steps() - self.before),
            "first_steps": FIRST_STEPS, "first_steps_overflowed": self.skipped_first,
        }  # fmt: skip
        if report is not None:
            found |= {"state": report.state, "kernels": report.kernels}
            found |= {"replayed": report.replayed, "eager_calls": report.eager_calls}
            found |= {"pool_gib": _gib(report.pool_bytes), "occupation": report.occupation}
        if self.stack is not None:
            found["stack_gib"] = _gib(self.stack.nbytes)
        return found

    def _peak(self) -> float | None:
        """Of what was reserved for this contender since it was last asked to be forgotten."""
        if self.batch.device.type != "cuda":
            return None
        return _gib(torch.cuda.max_memory_reserved() - self.before)


def _gib(count: int) -> float:
    return round(count / GIB, 3)


def _between_steps() -> int:
    """Bytes that are reserved when nothing runs."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def measure(
    given: list[Case], device: torch.device, dispatcher: str, rounds: int, steps: int
) -> Iterator[dict[str, Any]]:
    """``bitwise``: whether the first losses are those of the same case without a stack."""
    without = None
    for case in given:
        run = Run(case, device, dispatcher)
        if case.stack_factor is None:
            without = run.first
        try:
            line = run.line(rounds, steps)
            if case.stack_factor is not None:
                line["bitwise"] = torch.equal(run.first, without)
        except NotReplayed as error:
            where = {"model": case.model, "contender": case.contender}
            line = where | {"rows_factor": case.rows_factor, "error": str(error)}
        if isinstance(run.step, FullIteration):
            run.step.release()
        del run
        yield line


def _factor(text: str) -> float | None:
    return None if text == "worst" else float(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, as a test")
    parser.add_argument("--dispatcher", default="symmetric", help="of whole steps")
    parser.add_argument("--model", help="only this one: launch_bound or gpu_bound")
    parser.add_argument(
        "--rows-factors", type=_factor, nargs="+", default=[None, 1.25, 1.5], help='or "worst"'
    )
    parser.add_argument("--stack-factor", type=float, default=1.1)
    parser.add_argument("--again", action="store_true", help="also stacks that dispatch again")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--commit", help="where there is no .git to ask")
    options = parser.parse_args(arguments)
    factors = options.rows_factors
    every = list(cases(options.smoke, options.stack_factor, factors, options.again))
    chosen = [case for case in every if options.model in (None, case.model)]
    constant = {"benchmark": "activation_memory", "environment": environment.stamp(options.commit)}
    with process_group(options.smoke) as device:
        for line in measure(chosen, device, options.dispatcher, options.rounds, options.steps):
            keep(line, constant, options.out)


if __name__ == "__main__":
    main()
