r"""Rows that the fullest rank's experts need, over the first steps of real training.

    torchrun --nproc-per-node 2 benchmarks/expert_rows.py --seeds 0 1 --cpu \
        --out benchmarks/results/expert_rows_cpu.jsonl
    torchrun --nproc-per-node 2 benchmarks/expert_rows.py --preset small --steps 150 \
        --out benchmarks/results/expert_rows_h200.jsonl

The training is that of `moe-graphs train --ep N` on N ranks, eager, by the preset's schedule. A
share is the number of rows that a rank's experts need in one call of a layer, divided by those of a
balanced routing; `rows_factor` has to be at least as large. The highest share of each step counts,
over layers, calls and ranks. The same tokens are also counted as if 2, 4, ... ranks shared the
experts. `--aux-loss-coef 0` is the bad case, in which nothing balances the experts. There is a line
per run: the highest share of the steps 1 to 10, 11 to 50 and later, the 99.9 % quantile, and how
many steps would have overflowed, by factor and by part of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_graphs.bench import environment
from moe_graphs.layers.moe import MoELayer, moe_layers
from moe_graphs.lm.building import RunOptions, build_batches, build_trainer
from moe_graphs.lm.data import Text, corpus_at, standard_library
from moe_graphs.lm.option_values import preset_of
from moe_graphs.lm.run_presets import Preset
from moe_graphs.lm.workers import Workers
from moe_graphs.parallel import ParallelConfig
from several_ranks import keep, process_group

FACTORS = (1.1, 1.25, 1.5, 1.75, 2.0)
PARTS = {"1 to 10": slice(0, 10), "11 to 50": slice(10, 50), "after 50": slice(50, None)}


class Counted:
    """The experts' rows of every call in training, of this rank's tokens."""

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self.calls: list[Tensor] = []
        for layer in layers:
            layer.router.register_forward_hook(self._note)

    def _note(self, router: Any, _: object, routing: Any) -> None:
        if router.training:
            self.calls.append(routing.tokens_per_expert_E)

    def taken(self) -> Tensor:
        """``[calls, E]`` int64 since the last time, of all ranks' tokens."""
        counts_CE, self.calls = torch.stack(self.calls), []
        dist.all_reduce(counts_CE)
        return counts_CE


def share(counts_CE: Tensor, ranks: int) -> float:
    """The highest over calls and ranks, each of which has as many neighbouring experts.

    Example: counts ``[[3, 1, 2, 2]]`` are shares of 1.0 on two ranks, of 1.5 on four.
    """
    rows_CR = counts_CE.unflatten(1, (ranks, -1)).sum(2).double()
    return (rows_CR * ranks / counts_CE.sum(1, keepdim=True)).max().item()


def shares_of(preset: Preset, text: Text, workers: Workers, steps: int) -> dict[int, list[float]]:
    """Highest share of each step, by the number of ranks that share experts."""
    options = RunOptions(
        preset=preset,
        device=workers.device,
        graph_config=None,
        dispatcher="symmetric",
        workers=workers,
    )
    trainer = build_trainer(options, build_batches(options, text))
    counted = Counted(moe_layers(trainer.model))
    found: dict[int, list[float]] = {}
    for _ in range(steps):
        trainer.train_step()
        counts_CE = counted.taken()
        ranks = 2
        while counts_CE.shape[1] % ranks == 0:
            found.setdefault(ranks, []).append(share(counts_CE, ranks))
            ranks *= 2
    return found


def summed_up(shares: Sequence[float]) -> dict[str, Any]:
    """Summary of a run: highest shares by part, and steps whose rows would have had no room."""
    parts = {name: list(shares[part]) for name, part in PARTS.items() if shares[part]}
    every = torch.tensor(shares, dtype=torch.float64)
    return {
        "highest": {name: round(max(values), 4) for name, values in parts.items()},
        "median": {name: round(sorted(v)[len(v) // 2], 4) for name, v in parts.items()},
        "quantile_999": round(every.quantile(0.999).item(), 4),
        "maximum": round(every.max().item(), 4),
        "overflowed": {
            str(factor): {name: sum(v > factor for v in values) for name, values in parts.items()}
            for factor in FACTORS
        },
        "shares": [round(value, 4) for value in shares],
    }


def sized(preset: Preset, seed: int, aux_loss_coef: float | None) -> Preset:
    assert preset.model.moe is not None
    moe = preset.model.moe
    if aux_loss_coef is not None:
        moe = dataclasses.replace(moe, aux_loss_coef=aux_loss_coef)
    return dataclasses.replace(
        preset,
        model=dataclasses.replace(preset.model, moe=moe),
        training=dataclasses.replace(preset.training, seed=seed),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--preset", default="tiny", help="tiny or small")
    parser.add_argument("--data", type=Path, help="text as of moe-graphs train")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch-size", type=int, help="sequences, instead of the preset's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--aux-loss-coef", type=float, help="instead of the preset's")
    parser.add_argument("--cpu", action="store_true", help="gloo; by default where there is no GPU")
    parser.add_argument("--commit", help="where there is no .git to ask")
    options = parser.parse_args(arguments)
    constant = {"benchmark": "expert_rows", "environment": environment.stamp(options.commit)}
    text = corpus_at(options.data) if options.data else standard_library()
    with process_group(options.cpu or not torch.cuda.is_available()) as device:
        ranks = dist.get_world_size()
        workers = Workers.on(ParallelConfig(dp_shard=ranks, ep=ranks), device)
        for seed in options.seeds:
            preset = sized(preset_of(options.preset, device)[1], seed, options.aux_loss_coef)
            if options.batch_size is not None:
                training = dataclasses.replace(preset.training, batch_size=options.batch_size)
                preset = dataclasses.replace(preset, training=training)
            began = time.perf_counter()
            shares = shares_of(preset, text, workers, options.steps)
            training, moe = preset.training, preset.model.moe
            line = {
                "model": options.preset, "seed": seed, "ranks": ranks, "steps": options.steps,
                "aux_loss_coef": moe.aux_loss_coef, "expert_bias": moe.expert_bias,
                "num_experts": moe.num_experts, "top_k": moe.top_k,
                "moe_layers": sum(preset.model.moe_layers or ()),
                "tokens_per_call": training.tokens_per_step // training.microbatches,
                "seconds": round(time.perf_counter() - began, 1),
                "sharing": {str(count): summed_up(values) for count, values in shares.items()},
            }  # fmt: skip
            keep(line, constant, options.out)


if __name__ == "__main__":
    main()
