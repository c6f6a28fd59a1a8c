"""Tables of several GPUs: lines of `dispatch.py`, `parallel_steps.py` and `expert_rows.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from markdown_cells import gibibytes, table, times
from result_lines import H200, Line, Select, sources

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
    "whole step, symmetric, 1.25, groups of layers, our AdamW": (
        "the same, FSDP2 in groups of 4 layers"
    ),
    "whole step, symmetric, 1.25, replicated, our AdamW": (
        "the same, no FSDP2: whole weights on every GPU (`--no-fsdp`)"
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
    found = {(model, name): _newest_way(lines, model, name) for model in SHARED for name in WAYS}
    rows = [
        [shown, *(_step(found[model, name]) for model in SHARED)] for name, shown in WAYS.items()
    ]
    used = [line for line in found.values() if line is not None]
    ranks = max(line["ranks"] for line in used)
    first = f"experts shared by {ranks} GPUs: a step, reserved memory"
    header = " | ".join([first, *SHARED.values()])
    note = (
        "FSDP2 shards the rest; under graphs of scopes every GPU has it whole. torch's AdamW but "
        "where it says ours; the last two with one barrier an exchange, which gained 1 % and is "
        "no option any more; -: not run."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


def expert_rows(lines: Sequence[Line]) -> str:
    """The highest share of any seed, by how many ranks share the experts."""
    used = [line for line in lines if line["benchmark"] == "expert_rows" and not line.failed]
    runs: dict[tuple[Any, ...], list[Line]] = {}
    for line in used:
        key = (line["model"], line["environment"]["gpu"], line["aux_loss_coef"])
        runs.setdefault(key, []).append(line)
    rows = []
    for (model, _, coefficient), seeds in runs.items():
        first = seeds[0]
        name = f"`{model}`, aux loss {coefficient:g}, {len(seeds)} x {first['steps']} steps"
        for ranks in first["sharing"]:
            found = [line["sharing"][ranks] for line in seeds]
            local = first["num_experts"] // int(ranks)
            worst = int(ranks) * min(first["top_k"], local) / first["top_k"]
            parts = [max(each["highest"][part] for each in found) for part in found[0]["highest"]]
            late = [share for each in found for share in each["shares"][50:]]
            over = [sum(x > f for x in late) / len(late) for f in (1.25, 1.5, 2.0)]
            rows.append([
                name, f"{ranks} ({local} each)", *(f"{share:.2f}" for share in parts),
                f"{max(each['quantile_999'] for each in found):.2f}", f"{worst:.2f}",
                ", ".join(f"{100 * share:.1f} %" for share in over),
            ])  # fmt: skip
            name = ""
    header = (
        "a run | ranks that share the experts | steps 1 to 10 | 11 to 50 | after 50 | "
        "99.9 % of all | worst case | after 50, steps above 1.25, 1.5, 2.0"
    )
    return f"{table(header, rows)}\n\n{sources(used)}"


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


def _newest_way(lines: Sequence[Line], model: str, name: str) -> Line | None:
    """Newest line of H200s under either name: until 15b9e35 some contenders had other names."""
    lines = [line for line in lines if line["environment"]["gpu"] == H200]
    for contender in (name, name.replace("1.25, ", "1.25, one barrier, ")):
        where = {"model": model, "contender": contender}
        if contender != "whole step, symmetric, 1.25, one barrier, our AdamW":
            with contextlib.suppress(LookupError):
                return _newest(lines, "parallel_steps", where)
    return None


def _newest(lines: Sequence[Line], benchmark: str, where: dict) -> Line:
    """Raises ``LookupError`` if there is none."""
    found = [line for line in Select(benchmark, where).lines(lines) if not line.failed]
    if not found:
        raise LookupError(f"no line of {benchmark}.py has {where}")
    return max(found, key=lambda line: line.run)
