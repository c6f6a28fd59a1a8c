"""The README's tables of several GPUs, from the lines of `dispatch.py` and `parallel_steps.py`."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_cells import table, times
from result_lines import Line, Select, sources

DISPATCHED = ((256, 1024, 4), (2048, 1024, 4), (8192, 2048, 8), (16384, 4096, 8))
DISPATCHERS = ("all_to_all", "all_gather", "symmetric")
RATES = ("push by 528", "peer copy", "nccl all_to_all")  # by as many programs as are launched
STEPS = ("eager", "torch.compile", "whole step")


def dispatch(lines: Sequence[Line]) -> str:
    rows, used = [], []
    for tokens, hidden, top_k in DISPATCHED:
        where = {"tokens": tokens, "hidden_size": hidden, "top_k": top_k}
        layer, kernel = (
            _newest(lines, "dispatch", where | {"kind": k}) for k in ("layer", "kernel")
        )
        used += [layer, kernel]
        rates = {name: kernel["bytes"] / ms / 1e6 for name, ms in kernel["ms"].items()}
        rows.append([
            f"{tokens:,}, {hidden}, top-{top_k}",
            *(f"{layer['both_ms'][name]:.2f} ms" for name in DISPATCHERS),
            *(f"{rate:.0f}" for rate in map(rates.get, RATES)),
        ])  # fmt: skip
    header = (
        "tokens a rank, hidden, experts a token | `all_to_all`, eager | `all_gather` | "
        "`symmetric` | push, GB/s | a peer copy | NCCL's all-to-all"
    )
    note = (
        f"{used[0]['ranks']} GPUs; dispatch and combine, forward and backward; the two in graphs."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


def parallel_steps(lines: Sequence[Line]) -> str:
    rows, used = [], []
    for reshard in (False, True):
        where = {"model": "dense", "reshard_after_forward": reshard}
        found = [_newest(lines, "parallel_steps", where | {"contender": name}) for name in STEPS]
        used += found
        first = found[0]["step_ms"]
        cells = [f"{x['step_ms']:.1f} ms, {times(first / x['step_ms'])}" for x in found[1:]]
        rows.append([f"`reshard_after_forward={reshard}`", f"{first:.1f} ms", *cells])
    header = "FSDP2, a small dense model | eager | `torch.compile` | whole steps"
    note = f"{used[0]['ranks']} GPUs, {used[0]['tokens_per_rank']:,} tokens each; the same losses."
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


def _newest(lines: Sequence[Line], benchmark: str, where: dict) -> Line:
    """Raises ``LookupError`` if there is none."""
    found = [line for line in Select(benchmark, where).lines(lines) if not line.failed]
    if not found:
        raise LookupError(f"no line of {benchmark}.py has {where}")
    return max(found, key=lambda line: line.run)
