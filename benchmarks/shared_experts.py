"""Shared experts on a side stream, beside travelling tokens and experts, or one after the other.

    torchrun --nproc-per-node 2 benchmarks/shared_experts.py --out shared_experts.jsonl

A smaller DeepSeek-V3: four layers of width 2,048, 64 experts of 1,024 of which a token has six, and
a shared one of the width of one or two of them, at 4,096 tokens a rank. Routed experts are those of
all ranks together and exchanged by `symmetric`, the rest is sharded by FSDP2; whole steps with our
AdamW. Off and on take turns, and the lines are those of `parallel_steps.py`: medians of rank 0.
Once more with `all_gather`. `--seconds` ends it before a pair that starts later than that.

What is timed adds with atomics in attention's backward: its losses (`loss_difference`) are apart by
some thousandths, as those of whole steps and eager ones in `parallel_steps.py`. So before it is
timed a pair runs its first steps with deterministic kernels: `gate_difference` of their losses has
to be 0 on all ranks. Otherwise nothing is timed, and an error names the first step that differs:
the first loss is of a forward alone, the next ones of backwards, too, and from the fourth on steps
are replays. (On more than two GPUs NCCL has to add in one order, too: NCCL_NVLS_ENABLE=0.)
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from contenders import Setting
from moe_graphs.bench import environment
from moe_graphs.layers import MoEConfig, TransformerConfig
from moe_graphs.lm.run import deterministic
from moe_graphs.parallel import ParallelConfig
from parallel_steps import Case, Run, measure
from several_ranks import is_late, keep, process_group
from timed_replays import check_replayed

WIDTHS, DISPATCHERS = (1024, 2048), ("symmetric", "all_gather")


def setting(shared: int) -> Setting:
    """``shared``: the width of the shared expert."""
    moe = MoEConfig(
        num_experts=64,
        top_k=6,
        ffn_hidden_size=1024,
        score_function="sigmoid",
        aux_loss_coef=0.01,
        shared_ffn_hidden_size=shared,
    )
    config = TransformerConfig(
        hidden_size=2048,
        num_layers=4,
        num_heads=16,
        num_kv_heads=4,
        vocab_size=8192,
        max_sequence_length=4096,
        moe=moe,
    )
    return Setting("shared_experts", config, 1, torch.bfloat16, rounds=5, steps=10)


def pairs(ranks: int, smoke: bool) -> Iterator[list[Case]]:
    """Off and on, what decides first."""
    layout = ParallelConfig(dp_shard=ranks, ep=ranks, reshard_after_forward=False)
    cases = [("symmetric", 64)] if smoke else itertools.product(DISPATCHERS, WIDTHS)
    for dispatcher, width in cases:
        given = setting(width)
        if smoke:
            given = given.tiny(torch.device("cpu"))
        off = Case(
            f"shared {width}, {dispatcher}", "one stream", given.config, layout, given.batch_size,
            dispatcher=dispatcher, rows_factor=1.25, whole=True, our_adamw=True,
        )  # fmt: skip
        config = replace(given.config, moe=replace(given.config.moe, overlap="shared_experts"))
        yield [off, replace(off, contender="side stream", config=config)]


def main(arguments: list[str] | None = None) -> None:
    measure_pairs("shared_experts", __doc__ or "", pairs, arguments, same_bits=True)


def first_losses(case: Case, device: torch.device) -> Tensor:
    """``[W, steps]``, of all ranks, with kernels that add in one order."""
    with deterministic(device.type == "cuda"):
        run = Run(case, device)
        check_replayed(run.step.report())
        run.release()
    every: list[Tensor] = [run.first] * dist.get_world_size()
    dist.all_gather_object(every, run.first)
    return torch.stack(every)


def difference(off: Tensor, on: Tensor, again: Callable[[], Tensor] | None) -> float:
    """The largest between losses ``[W, steps]``.

    Args:
        again: runs what ``off`` is of once more, if they have to be the same.

    Raises:
        RuntimeError: they have to be, and are not.
    """
    if again is not None and not torch.equal(off, on):
        step = int((off != on).any(0).nonzero()[0])
        pairs = f"{off[:, step].tolist()} off and {on[:, step].tolist()} on"
        repeats = "is the same" if torch.equal(again(), off) else "is not the same, either"
        raise RuntimeError(
            f"losses differ with deterministic kernels, first in step {step + 1}: {pairs}, by "
            f"rank; off, run again, {repeats}"
        )
    return (off - on).abs().max().item()


def measure_pairs(
    benchmark: str,
    description: str,
    pairs: Callable[[int, bool], Iterator[list[Case]]],
    arguments: list[str] | None,
    same_bits: bool = False,
) -> None:
    """
    Args:
        pairs: of so many ranks, and whether they are tiny.
        same_bits: on computes what off does.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, as a test")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--seconds", type=float, default=90.0, help="no pair begins later")
    parser.add_argument("--commit", help="where there is no .git to ask")
    began, options = time.monotonic(), parser.parse_args(arguments)
    constant = {"benchmark": benchmark, "environment": environment.stamp(options.commit)}
    with process_group(options.smoke) as device:
        for pair in pairs(dist.get_world_size(), options.smoke):
            if is_late(began + options.seconds, device):
                break
            off, on = (functools.partial(first_losses, case, device) for case in pair)
            apart = difference(off(), on(), off if same_bits else None)
            for line in measure(pair, device, options.rounds, options.steps):
                keep({**line, "gate_difference": apart}, constant, options.out)


if __name__ == "__main__":
    main()
