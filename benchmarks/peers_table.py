"""Tables of other libraries and of FP8 (`peers.py`, `moe_layer.py`, `fp8_training.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import model_flops
from fp8_training import FROM_COMPARE
from markdown_cells import gibibytes, milliseconds, table, times
from peer_models.cases import ROUTINGS
from result_lines import H100, H200, Line, Select, sources

CASES: Mapping[str, str] = {
    "launch_bound": "12 small layers, 2,048 tokens",
    "qwen3_30b_4k": "3 layers of Qwen3-30B-A3B, 4,096 tokens",
    "qwen3_30b_16k": "3 layers of Qwen3-30B-A3B, 16,384 tokens",
    "mixtral": "2 layers of Mixtral 8x7B, 8,192 tokens",
}
UNTRAINED = ROUTINGS[0]
Newest = dict[str, Line]  # by contender
NOT_RUN = "-"
ROUTED: Mapping[str, str] = dict(zip(ROUTINGS, ("", ", even", ", skewed"), strict=True))


def newest(
    lines: Sequence[Line], benchmark: str, model: str, gpu: str = H200, routing: str = UNTRAINED
) -> Newest:
    """Last line of each contender, be it a time or a failure; a line may say no routing.

    A table without the last failures would show times that do not hold any more.
    """
    found = Select(benchmark, {"model": model}, gpu=gpu).lines(lines)
    found = [line for line in found if (line.get("routing") or UNTRAINED) == routing]
    return {line["contender"]: line for line in sorted(found, key=lambda line: line.run)}


def peers(lines: Sequence[Line], gpu: str = H200, all_rows: bool = False) -> str:
    """Table with a row per contender, the first case's fastest on top, after a summary.

    Rows with one time are left out unless ``all_rows`` are wanted.
    """
    found = {
        name + ROUTED[routing]: run
        for (case, name), routing in product(CASES.items(), ROUTED)
        if (run := newest(lines, "peers", case, gpu, routing))
    }
    if not found:
        raise LookupError("no line of peers.py: run it with --out below benchmarks/results")
    used = [line for run in found.values() for line in run.values()]
    header = " | ".join(["a training step: time, of peak, reserved memory", *found])
    timed = {line["contender"]: line["title"] for line in used if line.get("step_ms")}
    first = next(iter(found.values()))
    cells = {name: [_cell(run.get(name)) for run in found.values()] for name in timed}
    few = all_rows or len(found) == 1
    shown = [n for n, row in cells.items() if few or len(row) - row.count(NOT_RUN) > 1]
    rows = [
        [timed[name], *cells[name]]
        for name in sorted(shown, key=lambda name: _order(first.get(name)))
    ]
    parts = [_ahead(label, run) for label, run in found.items()]
    note = "Experts are chosen as by the untrained model, where a column does not say it. "
    note += "Medians; bf16 parameters, torch's fused AdamW but where it says ours; hosts differ; "
    note += (
        "of peak: [model FLOPs](#how-flops-are-counted) in bf16, also where products are in FP8."
    )
    more = len(timed) - len(shown)
    if more:
        note += f" {more} more settings were measured on one of the models only: in the file."
    parts += [table(header, rows), *_failures(used), f"{note} {sources(used)}"]
    return "\n\n".join(parts)


def peers_on_an_h100(lines: Sequence[Line]) -> str:
    return peers(lines, H100, all_rows=True)


LAYER_SIZE = ("tokens", "hidden", "ffn", "experts", "top_k")
OF_LAYERS = {"moe_layer": "even", "moe_layer_zipf": "skewed"}


def moe_layer(lines: Sequence[Line], gpu: str = H100) -> str:
    """Layers of all libraries, each beside ours of the same process; empty without such lines."""
    cases: dict[tuple[Any, ...], Newest] = {}
    for benchmark in OF_LAYERS:
        for line in sorted(Select(benchmark, gpu=gpu).lines(lines), key=lambda line: line.run):
            if line.get("load"):
                case = (*(line[key] for key in LAYER_SIZE), benchmark)
                cases.setdefault(case, {})[line["contender"]] = line
    used = [line for run in cases.values() for line in run.values()]
    names = sorted({x["contender"] for x in used}, key=lambda name: (not _is_ours(name), name))
    rows, ahead = [], {"train_tflops": list[str](), "forward_tflops": list[str]()}
    for case, run in cases.items():
        label = f"{', '.join(str(number) for number in case[:-1])}, {OF_LAYERS[case[-1]]}"
        rows.append([label, *(_layer_cell(run.get(name)) for name in names)])
        for key, found in ahead.items():
            best = max(x[key] or 0 for name, x in run.items() if _is_ours(name) and not x.failed)
            others = {name: x[key] or 0 for name, x in run.items() if not x.failed}
            faster = {name: rate / best for name, rate in others.items() if rate > best}
            found += [f"{name} ({label}: {times(ratio)})" for name, ratio in faster.items()]
    if not rows:
        return ""
    header = " | ".join(["tokens, hidden, ffn, experts, top-k, routing", *names])
    both, forward = (", ".join(names) or "nobody" for names in ahead.values())
    first = f"Ahead of the faster of ours: {both}. In the forward alone: {forward}."
    note = "TFLOP/s of forward and backward, MiB kept. A failed or missing contender is `-`."
    return "\n\n".join([first, table(header, rows), *_failures(used), f"{note} {sources(used)}"])


def moe_layer_beside_liger(lines: Sequence[Line]) -> str:
    """Liger-Kernel's layer beside ours, on an H200."""
    return moe_layer(lines, H200)


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def _layer_cell(line: Line | None) -> str:
    if line is None or line.failed:
        return NOT_RUN
    kept = f", {line['saved_mib']}" if (line["saved_mib"] or 0) > 0 else ""
    return f"{line['train_tflops']:.0f}{kept}"


def fp8_training(lines: Sequence[Line], gpu: str = H200) -> str:
    """A row per kind of linears and experts; what is not bitwise eager says so."""
    found = newest(lines, "fp8_training", "small", gpu)
    ran = [line for line in found.values() if not line.failed]
    if not ran:
        raise LookupError("no line of fp8_training.py: run it with --out below benchmarks/results")
    rows = [
        [
            line["contender"],
            "yes" if all(line[key] for key in FROM_COMPARE) else "no",
            f"{line['held_out_bits_per_byte']:.3f}",
            *(f"{line[f'{side}_step_ms']:.1f} ms" for side in ("eager", "graphed")),
            f"{line['tokens_per_second'] / 1e3:,.0f} k",
        ]
        for line in ran
    ]
    steps = ", ".join(sorted({str(line["steps"]) for line in ran}))
    header = (
        f"`small`, {steps} steps | graphed bitwise eager | held out, bits per byte | "
        f"eager step | graphed step | tokens/s, graphed"
    )
    return "\n\n".join([table(header, rows), *_failures(list(found.values())), sources(ran)])


def _ahead(label: str, run: Newest) -> str:
    timed = sorted((x for x in run.values() if x.get("step_ms")), key=_order)
    ours = [line for line in timed if line["contender"].startswith("ours")]
    if not ours:
        return f"{label}: none of ours ran."
    best = _order(ours[0])
    ahead = [f"{x['title']} ({times(best / _order(x))})" for x in timed if _order(x) < best]
    least = min(timed, key=lambda line: line["reserved_bytes"])
    name = ours[0]["title"]
    capture = ours[0].get("capture_s")
    waited = f" and took {capture:.0f} s to capture" if capture else ""
    return (
        f"{label}: ahead of {name}: {', '.join(ahead) or 'nobody'}. It reserves "
        f"{gibibytes(ours[0])}{waited}; least memory: {least['title']}, {gibibytes(least)}."
    )


def _failures(used: Sequence[Line]) -> list[str]:
    why = {
        x.get("title") or x["contender"]: x["error"].strip().splitlines()[-1]
        for x in used
        if x.failed and not _was_not_started(x)
    }
    texts = [f"{title}: `{error[:120]}`" for title, error in why.items()]
    return [f"Did not run: {'; '.join(texts)}."] if texts else []


def _was_not_started(line: Line) -> bool:
    """The time of the benchmark was over: nothing is known of it."""
    return line["error"].strip().splitlines()[-1].startswith("not started")


def _cell(line: Line | None) -> str:
    if line is None or not line.get("step_ms"):
        return NOT_RUN
    share = model_flops.cell_of(line).partition(", ")[2]
    return f"{milliseconds(line)}, {share}, {gibibytes(line)}"


def _order(line: Line | None) -> float:
    if line is None or not line.get("step_ms"):
        return float("inf")
    return line["step_ms"]["median"]
