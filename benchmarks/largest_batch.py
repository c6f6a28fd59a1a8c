"""The largest batch and the longest sequence that one GPU trains.

    python benchmarks/largest_batch.py --out benchmarks/results/largest_batch_h200.jsonl
    git worktree add /tmp/before 84279f8 && python benchmarks/largest_batch.py --package /tmp/before

Three layers of Qwen3-30B-A3B with the whole vocabulary in bf16, eagerly, with our AdamW. A trial is
a step of so many tokens behind a step of few, which makes the optimizer's states. Numbers of tokens
are multiples of `--block`: they grow until a step does not fit, and then the gap is halved.
`--package` takes the package from another folder. `--smoke` trains a tiny model on the CPU, where
three blocks are said to fit.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from environment import stamp
from own_process import in_own_process, leave

SEQUENCE = 4096
KINDS = (f"sequences of {SEQUENCE:,}", "one sequence")
SMOKE = dict(
    hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=64,
)  # fmt: skip


def largest(fits: Callable[[int], bool], start: int, block: int) -> int:
    """The largest multiple of ``block`` that fits, from a guess; 0 if one block does not fit."""
    low, high = (start, 0) if fits(start) else (0, start)
    step = block
    while not high:
        if fits(low + step):
            low, step = low + step, 2 * step
        else:
            high = low + step
    while high - low > block:
        middle = low + (high - low) // (2 * block) * block
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The model's loss; of a package whose model returns logits alone, the loss of whole logits."""
    if "targets_BS" in inspect.signature(model.forward).parameters:
        return model(batch, batch).loss
    from moe_graphs.kernels import cross_entropy

    output = model(batch)
    return cross_entropy(output.logits_BSV.flatten(0, 1), batch.flatten()) + output.aux_loss


def trained(tokens: int, one_sequence: bool, smoke: bool) -> int:
    """Train a step of so many tokens; returns the bytes that were allocated at most.

    Raises:
        torch.OutOfMemoryError: they do not fit.
    """
    from moe_graphs.layers import LanguageModel
    from moe_graphs.layers.architectures import qwen3_30b_a3b
    from moe_graphs.optim import AdamW

    sequence = tokens if one_sequence else min(tokens, 8 if smoke else SEQUENCE)
    config = qwen3_30b_a3b(
        **{"num_layers": 3, **(SMOKE if smoke else {})}, max_sequence_length=sequence
    )
    device = torch.device("cpu" if smoke else "cuda")
    if smoke and tokens > 3 * 8:
        raise torch.OutOfMemoryError("more than three blocks")
    model = LanguageModel(config, device=device, dtype=torch.bfloat16)
    model.init_weights()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    for shape in ((1, 8), (tokens // sequence, sequence)):
        batch = torch.randint(config.vocab_size, shape, device=device)
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return 0 if smoke else torch.cuda.max_memory_allocated()


def measure(kind: str, start: int, block: int, seconds: float, smoke: bool) -> dict[str, Any]:
    end, bytes_of = time.monotonic() + seconds, {0: 0}

    def fits(tokens: int) -> bool:
        if time.monotonic() > end:
            raise TimeoutError(f"{seconds:.0f} s are over, and {max(bytes_of):,} tokens fit so far")
        try:
            if not smoke:
                torch.cuda.reset_peak_memory_stats()
            bytes_of[tokens] = trained(tokens, kind == KINDS[1], smoke)
        except torch.OutOfMemoryError:
            return False
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        return True

    tokens = largest(fits, start, block)
    return {"tokens": tokens, "max_allocated_bytes": bytes_of[tokens]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a file of JSON lines to append to")
    parser.add_argument("--commit", help="the commit to stamp, where .git does not say it")
    parser.add_argument("--package", type=Path, help="folder that has another moe_graphs")
    parser.add_argument("--start", type=int, default=131_072, help="tokens of the first trial")
    parser.add_argument("--block", type=int, default=16_384, help="tokens")
    parser.add_argument("--seconds", type=float, default=200, help="for a kind")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    start, block = (8, 8) if options.smoke else (options.start, options.block)
    if options.one:
        given = options.one, start, block, options.seconds, options.smoke
        print(json.dumps(measure(*given)))
        return 0
    environment, failed = stamp(options.commit), 0
    package = options.package or Path(__file__).resolve().parent.parent
    paths = os.pathsep.join((str(package), os.environ.get("PYTHONPATH", "")))
    for kind in KINDS:
        more = ["--start", str(start), "--block", str(block), "--seconds", str(options.seconds)]
        more += ["--smoke"] if options.smoke else []
        with mock.patch.dict(os.environ, PYTHONPATH=paths):
            found = in_own_process(__file__, [kind, *more], options.seconds + 60)
        line = {"benchmark": "largest_batch", "contender": kind, "block": block,
                "smoke": options.smoke, "package": str(options.package or "this one"),
                **found, "environment": environment}  # fmt: skip
        failed += line["error"] is not None
        start = line.get("tokens") or start
        leave(line, ("contender", "package", "tokens", "max_allocated_bytes", "error"), options.out)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
