"""Tables of several GPUs, from the lines of `dispatch.py` and `parallel_steps.py`."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_cells import gibibytes, table, times
from result_lines import Line, Select, sources

DISPATCHED = ((256, 1024, 4), (2048, 1024, 4), (8192, 2048, 8), (16384, 4096, 8))
DISPATCHERS = ("all_to_all", "all_gather", "symmetric")
RATES = ("push by 528", "peer copy", "nccl all_to_all")  # by as many programs as are launched
STEPS = ("eager", "torch.compile", "whole step")
SHARED = {
    "moe": "12 small layers, 2,048 tokens a GPU",
    "gpu_bound": "3 layers of Qwen3-30B-A3B, 8,192 tokens a GPU",
}
WAYS = {
    "whole step, alone": "one GPU with all experts, whole step",
    "whole step, alone, our AdamW": "the same, our AdamW",
    "eager, all_to_all": "eager, `all_to_all`",
    "recipe, all_to_all": "graphs of `attn,moe_router,moe_preprocess`, `all_to_all`",
    "attn,moe, all_gather": "graphs of `attn,moe`, `all_gather`",
    "attn,moe, symmetric": "graphs of `attn,moe`, `symmetric`",
    "attn,moe, symmetric, our AdamW": "the same, our AdamW",
    "whole step, all_gather": "whole step, `all_gather`",
    "whole step, symmetric": "whole step, `symmetric`",
    "whole step, symmetric, 1.25": "the same, `rows_factor=1.25`",
    "whole step, symmetric, 1.25, our AdamW": "the same, our AdamW",
    "whole step, symmetric, 1.25, one barrier, our AdamW": "the same, `one_barrier=True`",
    "whole step, symmetric, 1.25, one barrier, groups of layers, our AdamW": (
        "the same, FSDP2 in groups of 4 layers"
    ),
}


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


def shared_experts(lines: Sequence[Line]) -> str:
    """A row per way to run a step, first the one that shares nothing."""
    found = {
        (model, name): _newest_if_any(lines, {"model": model, "contender": name})
        for model in SHARED
        for name in WAYS
    }
    rows = [
        [shown, *(_step(found[model, name]) for model in SHARED)] for name, shown in WAYS.items()
    ]
    used = [line for line in found.values() if line is not None]
    ranks = max(line["ranks"] for line in used)
    first = f"experts shared by {ranks} GPUs: a step, reserved memory"
    header = " | ".join([first, *SHARED.values()])
    note = (
        "FSDP2 shards the rest, but under graphs of scopes, where it is replicated and nothing is "
        "clipped. torch's AdamW but where it says ours; -: not run."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


def communication(lines: Sequence[Line]) -> str:
    """A row per way to run a step, as `parallel_steps.py --trace` has seen it last."""
    newest: dict[tuple, Line] = {}
    traced = Select("parallel_steps_traced").lines(lines)
    for line in sorted(traced, key=lambda line: line.run):
        if not line.failed and line["ranks"] > 1:
            newest[line["model"], line["reshard_after_forward"], line["contender"]] = line
    if not newest:
        return "Not measured yet: `benchmarks/parallel_steps.py --trace`."
    rows = []
    for (model, reshard, name), line in newest.items():
        took, exposed = line["communication_ms"], line["exposed_ms"]
        hidden = f"{1 - exposed / took:.0%}" if took else "-"
        shown = SHARED.get(model, f"dense, `reshard_after_forward={reshard}`")
        spans = (f"{value:.2f} ms" for value in (line["traced_ms"], took, exposed))
        rows.append([shown, name, *spans, hidden])
    header = "model | contender | a traced step | communication | of it exposed | hidden"
    note = (
        "Of rank 0's GPU, a step's first kernel to its last: kernels of NCCL and of dispatchers, "
        "and how long nothing ran beside them. Waiting for other ranks is in it."
    )
    return f"{table(header, rows)}\n\n{note} {sources(newest.values())}"


def _step(line: Line | None) -> str:
    return "-" if line is None else f"{line['step_ms']:.1f} ms, {gibibytes(line)}"


def _newest_if_any(lines: Sequence[Line], where: dict) -> Line | None:
    try:
        return _newest(lines, "parallel_steps", where)
    except LookupError:
        return None


def _newest(lines: Sequence[Line], benchmark: str, where: dict) -> Line:
    """Raises ``LookupError`` if there is none."""
    found = [line for line in Select(benchmark, where).lines(lines) if not line.failed]
    if not found:
        raise LookupError(f"no line of {benchmark}.py has {where}")
    return max(found, key=lambda line: line.run)
