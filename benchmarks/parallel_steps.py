"""A training step on several ranks: eager, with torch.compile, in scopes, and as one graph.

    torchrun --nproc-per-node 2 benchmarks/parallel_steps.py --out parallel_steps.jsonl

A dense model like Llama that launches more than it computes, sharded by FSDP2; and the two MoE
models of `partial_graphs.py` at 2,048 and 8,192 tokens a rank, their experts shared by all ranks
and the rest sharded by FSDP2, or whole on every rank ("replicated", and with scopes, which refuse
FSDP2). "alone" is the same step on one rank by itself, with all experts.
Forward, backward, clipping and AdamW, torch's fused one if nothing is said. Contenders take turns;
times are medians of rank 0, a line for each as soon as it is known. `loss_difference` is the
largest between the first losses and those of eager, `reserved_bytes` what the allocator took for a
contender and its first steps.

With `--trace` rank 0 traces some more steps of each: `communication_ms` of a step in which a kernel
of NCCL or of a dispatcher ran, `exposed_ms` of it with nothing else running, and `traced_ms` from
the first kernel to the last; and eager has every dispatcher. These are lines of
`parallel_steps_traced`, whose times no table takes: the profiler stays loaded.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from contenders import WARMUP_STEPS, Setting, adamw, free_memory, gpu_bound, launch_bound
from full_iteration import llama
from moe_graphs import DeviceStep, FullIteration, GraphConfig, graph
from moe_graphs.bench import environment
from moe_graphs.layers import LanguageModel, TransformerConfig
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize, replicate
from moe_graphs.parallel.mesh import data_mesh
from moe_graphs.parallel.replicated import sum_gradients
from moe_graphs.profiling.communication_share import Communication
from moe_graphs.profiling.profiler import keep_profiler_ready
from several_ranks import communication_in, keep, milliseconds_of, process_group
from timed_replays import NotReplayed, check_replayed

FIRST_STEPS = 6  # of which a whole step runs three eagerly
TRACED_STEPS = 3
ALONE = ParallelConfig()
MODELS = ("dense", "moe", "gpu_bound")
RECIPE = "attn,moe_router,moe_preprocess"


@dataclass(frozen=True)
class Case:
    model: str
    contender: str
    config: TransformerConfig
    layout: ParallelConfig
    batch_size: int
    dispatcher: str = "all_to_all"
    rows_factor: float | None = None
    compiled: bool = False
    scopes: str = ""
    recompute: bool = False
    whole: bool = False
    our_adamw: bool = False
    replicated: bool = False

    @property
    def is_alone(self) -> bool:
        return self.layout == ALONE

    @property
    def compared_with(self) -> tuple[str, bool]:
        return self.model, not self.is_alone and self.layout.reshard_after_forward

    @property
    def dispatcher_options(self) -> dict[str, Any]:
        return {} if self.rows_factor is None else {"rows_factor": self.rows_factor}


def cases(ranks: int, smoke: bool, models: list[str], trace: bool = False) -> Iterator[Case]:
    dense, small, large = llama(), launch_bound(), replace(gpu_bound(), batch_size=2)
    if smoke:
        on_cpu = torch.device("cpu")
        dense, small, large = (setting.tiny(on_cpu) for setting in (dense, small, large))
    if "dense" in models:
        yield from _dense(dense, ranks, smoke)
    if "moe" in models:
        yield from _moe("moe", small, ranks, smoke, trace)
    if "gpu_bound" in models:
        yield from _moe("gpu_bound", large, ranks, smoke, trace)


def _dense(setting: Setting, ranks: int, smoke: bool) -> Iterator[Case]:
    for reshard in (False, True):
        layout = ParallelConfig(dp_shard=ranks, reshard_after_forward=reshard)
        case = Case("dense", "eager", setting.config, layout, setting.batch_size)
        yield case
        if not smoke:
            yield replace(case, contender="torch.compile", compiled=True)
        yield replace(case, contender="whole step", whole=True)


def _moe(name: str, setting: Setting, ranks: int, smoke: bool, trace: bool) -> Iterator[Case]:
    layout = ParallelConfig(dp_shard=ranks, ep=ranks, reshard_after_forward=False)
    case = Case(name, "eager, all_to_all", setting.config, layout, setting.batch_size)
    yield case
    yield replace(case, contender="recipe, all_to_all", scopes=RECIPE, replicated=True)
    for dispatcher in ["symmetric"] if smoke else ["all_gather", "symmetric"]:
        case = replace(case, dispatcher=dispatcher)
        if trace:
            yield replace(case, contender=f"eager, {dispatcher}")
        in_scopes = replace(case, scopes="attn,moe", replicated=True)
        yield replace(in_scopes, contender=f"attn,moe, {dispatcher}")
        yield replace(in_scopes, contender=f"attn,moe, {dispatcher}, recompute", recompute=True)
        yield replace(case, contender=f"whole step, {dispatcher}", whole=True)
    # The last of them.
    name, bounded = f"whole step, {dispatcher}", replace(case, whole=True)
    if not smoke:
        name, bounded = f"{name}, 1.25", replace(bounded, rows_factor=1.25)
        yield from _with_both_optimizers(bounded, name)
        yield replace(in_scopes, contender=f"attn,moe, {dispatcher}, our AdamW", our_adamw=True)
    ours = replace(bounded, our_adamw=True)
    grouped = replace(ours, layout=replace(layout, layers_per_group=2 if smoke else 4))
    yield replace(grouped, contender=f"{name}, groups of layers, our AdamW")
    yield replace(ours, contender=f"{name}, replicated, our AdamW", replicated=True)
    alone = replace(case, layout=ALONE, dispatcher="local", whole=True)
    yield from _with_both_optimizers(alone, "whole step, alone")


def _with_both_optimizers(case: Case, name: str) -> Iterator[Case]:
    yield replace(case, contender=name)
    yield replace(case, contender=f"{name}, our AdamW", our_adamw=True)


class Run:
    """One contender: its step, and the losses of its first steps."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        free_memory(device)
        before = _reserved()
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = LanguageModel(case.config, device=device, dtype=dtype)
        self.replicas: DeviceMesh | None = None
        if not case.is_alone:
            mesh = make_mesh(case.layout, device.type)
            self.replicas = data_mesh(mesh) if case.replicated else None
            _lay_out(self.model, case, mesh, self.replicas)
        if case.compiled:
            for layer in self.model.layers:
                layer.compile()
        optimizer = adamw(self.model, case.our_adamw)
        self.update = DeviceStep(optimizer, clip_norm=1.0, set_to_none=True)
        self.graphs = None
        self.step: Callable[[Tensor], Tensor] = self._step
        if case.scopes:
            config = GraphConfig(
                case.scopes,
                recompute=case.recompute,
                warmup_steps=WARMUP_STEPS,
                audit_every=None,
            )
            self.graphs = graph(self.model, config)
            self.step = self._step_in_scopes
        if case.whole:
            self.step = FullIteration(
                self._step,
                model=self.model,
                optimizer=optimizer,
                state=[self.update],
                audit_every=None,
            )
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (case.batch_size, case.config.max_sequence_length + 1)
        tokens = torch.randint(case.config.vocab_size, shape, generator=generator)
        self.batch = tokens.to(device)
        self.first = torch.stack([self.step(self.batch) for _ in range(FIRST_STEPS)]).cpu()
        self.reserved = _reserved() - before
        self.milliseconds: list[float] = []
        self.communication: Communication | None = None

    def _step(self, tokens: Tensor) -> Tensor:
        loss = self._forward_backward(tokens)
        if self.replicas is not None:
            sum_gradients(self.model, self.replicas)
        self.update()
        return loss

    def _step_in_scopes(self, tokens: Tensor) -> Tensor:
        with self.graphs.step():
            loss = self._forward_backward(tokens)
        sum_gradients(self.model, self.replicas)
        self.update()
        return loss

    def _forward_backward(self, tokens: Tensor) -> Tensor:
        output = self.model(tokens[:, :-1], tokens[:, 1:])
        loss = output.loss + output.aux_loss
        (loss if self.replicas is None else loss / self.replicas.size()).backward()
        return loss.detach()

    def turn(self, steps: int) -> None:
        self.milliseconds.append(milliseconds_of(lambda: self.step(self.batch), steps))

    def trace(self) -> None:
        step = functools.partial(self.step, self.batch)
        self.communication = communication_in(step, TRACED_STEPS, self.batch.device)

    def release(self) -> None:
        for engine in (self.step, self.graphs):
            if hasattr(engine, "release"):
                engine.release()

    def line(self, eager: Run | None) -> dict[str, Any]:
        layout = self.case.layout
        median = statistics.median(self.milliseconds)
        found = {
            "model": self.case.model, "contender": self.case.contender,
            "ranks": layout.world_size, "ep": layout.ep,
            "reshard_after_forward": layout.reshard_after_forward,
            "layers_per_group": layout.layers_per_group, "reserved_bytes": self.reserved,
            "tokens_per_rank": self.batch[:, 1:].numel(), "step_ms": round(median, 3),
            "step_ms_of_turns": [round(each, 3) for each in self.milliseconds],
        }  # fmt: skip
        if self.communication is not None:
            span = self.communication.span_ms
            found["communication_ms"] = round(self.communication.share * span, 3)
            found["exposed_ms"] = round(self.communication.exposed * span, 3)
            found["traced_ms"] = round(span, 3)
        if eager is not None:
            found["speedup"] = round(statistics.median(eager.milliseconds) / median, 2)
            found["loss_difference"] = (self.first - eager.first).abs().max().item()
        engine = self.step if isinstance(self.step, FullIteration) else self.graphs
        report = None if engine is None else engine.report()
        check_replayed(report)
        if report is None:
            return found
        if self.case.whole:
            found |= {"state": report.state, "kernels": report.kernels}
        return found | {"replayed": report.replayed, "eager_calls": report.eager_calls}


def _lay_out(
    model: LanguageModel, case: Case, mesh: DeviceMesh, replicas: DeviceMesh | None
) -> None:
    options = {"dispatcher": case.dispatcher, **case.dispatcher_options}
    if replicas is not None:
        replicate(model, replicas, **options)
    else:
        parallelize(model, case.layout, mesh, **(options if case.layout.ep > 1 else {}))


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def measure(
    given: list[Case], device: torch.device, rounds: int, steps: int, trace: bool = False
) -> Iterator[dict]:
    """Contenders of one model, by turns; the first is what the others are compared with."""
    runs: list[Run] = []
    for case in given:
        try:
            runs.append(Run(case, device))
        except Exception as error:  # a line says so, and the others go on
            yield _failed(case, error)
    for _ in range(rounds):
        for run in runs:
            run.turn(steps)
    for run in runs if trace else ():
        run.trace()
    for number, run in enumerate(runs):
        try:
            yield run.line(runs[0] if number else None)
        except NotReplayed as error:
            yield _failed(run.case, error)
    for run in runs:
        run.release()


def _failed(case: Case, error: Exception) -> dict[str, str]:
    return {"model": case.model, "contender": case.contender, "error": repr(error)[:500]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, as a test")
    parser.add_argument("--models", default=",".join(MODELS), help="which of them")
    parser.add_argument(
        "--contenders", default="", help="a pattern of their names; the first stays"
    )
    parser.add_argument("--trace", action="store_true", help="also how communication is hidden")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--commit", help="where there is no .git to ask")
    options = parser.parse_args(arguments)
    if options.trace:
        keep_profiler_ready()
    name = "parallel_steps_traced" if options.trace else "parallel_steps"
    constant = {"benchmark": name, "environment": environment.stamp(options.commit)}
    with process_group(options.smoke) as device:
        models, pattern = options.models.split(","), re.compile(options.contenders)
        every = list(cases(dist.get_world_size(), options.smoke, models, options.trace))
        for key in dict.fromkeys(case.compared_with for case in every):
            first, *others = (case for case in every if case.compared_with == key)
            chosen = [first, *(case for case in others if pattern.search(case.contender))]
            for line in measure(chosen, device, options.rounds, options.steps, options.trace):
                keep(line, constant, options.out)


if __name__ == "__main__":
    main()
