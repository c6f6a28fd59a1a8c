"""Tokens in two halves, one travelling beside the experts of the other, or all at once.

    torchrun --nproc-per-node 2 benchmarks/overlap_halves.py --out overlap_halves.jsonl

The models and the lines of `shared_experts.py`, here without a shared expert, at 4,096 and 16,384
tokens a rank; with one barrier an exchange and with two. Room for the worst routing, which both
have. Gradients of the experts' weights are sums of two halves: `gate_difference`, of six steps with
deterministic kernels, is that rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from moe_graphs.parallel import ParallelConfig
from parallel_steps import Case
from shared_experts import measure_pairs, setting

BATCHES, ONE_BARRIER = (1, 4), (False, True)


def pairs(ranks: int, smoke: bool) -> Iterator[list[Case]]:
    """Off and on."""
    layout = ParallelConfig(dp_shard=ranks, ep=ranks, reshard_after_forward=False)
    given = setting(0)
    if smoke:
        given = given.tiny(torch.device("cpu"))
    cases = [(given.batch_size, False)] if smoke else itertools.product(BATCHES, ONE_BARRIER)
    for batch, one_barrier in cases:
        barriers = "one barrier" if one_barrier else "two barriers"
        off = Case(
            f"batch {batch}, {barriers}", "uncut", given.config, layout, batch,
            dispatcher="symmetric", one_barrier=one_barrier, whole=True, our_adamw=True,
        )  # fmt: skip
        config = replace(given.config, moe=replace(given.config.moe, overlap="halves"))
        yield [off, replace(off, contender="two halves", config=config)]


def main(arguments: list[str] | None = None) -> None:
    measure_pairs("overlap_halves", __doc__ or "", pairs, arguments)


if __name__ == "__main__":
    main()
