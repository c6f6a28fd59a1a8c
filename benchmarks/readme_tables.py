"""Writes the tables of the documents in `DOCUMENTS` from lines of `results/`, or checks them.

    python benchmarks/readme_tables.py            # writes
    python benchmarks/readme_tables.py --check    # says what differs, exit status 1

A table stands between `<!-- table: name -->` and `<!-- /table -->`. What it takes is declared in
`SELECTED`; new lines of a newer commit are taken as soon as one run has all contenders.
"""

from __future__ import annotations

import argparse
import difflib
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import model_flops
from markdown_cells import geometric_mean, gibibytes, idle, milliseconds, span, table, times
from more_tables import (
    OUR_ADAMW,
    accumulated,
    deepgemm,
    document_attention,
    few_bits,
    fp8_experts,
    fp8_pairs,
    fp8_products,
    fp8_projections,
    fp8_whole_steps,
    head_and_loss,
    lora,
    on_an_h100,
    results,
    trl,
)
from parallel_tables import (
    communication,
    dispatch,
    expert_rows,
    parallel_steps,
    shared_experts,
)
from peers_table import (
    fp8_training,
    moe_layer,
    moe_layer_beside_liger,
    peers,
    peers_on_an_h100,
)
from result_lines import Line, Select, fastest_eager, link, load, sources
from weak_scaling import weak_scaling

README = Path(__file__).resolve().parents[1] / "README.md"
MANY_GPUS = README.parent / "docs" / "many_gpus.md"
PERFORMANCE = README.parent / "docs" / "performance.md"
BLOCK = re.compile(r"<!-- table: (\w+) -->\n(.*?)<!-- /table -->", re.DOTALL)
WHOLE, COMPILED = "full iteration, optimizer", "torch.compile"
SCOPES = ("attn", "attn,moe_router,moe_preprocess", "attn,moe")


def _whole_steps(model: str, scopes: str) -> Select:
    return Select("full_iteration", {"model": model}, ("eager", scopes, WHOLE, COMPILED))


def _hugging_face(model: str) -> Select:
    ours = ("accelerate_model", "with AdamW", "with AdamW, graphs", "with AdamW, whole steps")
    return Select("huggingface", {"model": model}, ("eager", *ours))


def _kernel(op: str, shape: str) -> Select:
    return Select("layer_kernels", {"op": op, "shape": shape})


def _update(parameters: str, dtype: str) -> Select:
    return Select("optimizers", {"parameters": parameters, "dtype": dtype})


# Table -> label of a row, or of a group of rows -> the lines it shows.
SELECTED: Mapping[str, Mapping[str, Select]] = {
    "whole_steps": {
        "MoE, launch-bound (below)": _whole_steps("launch_bound", "attn,moe"),
        "Llama, 12 layers of 512, 2,048 tokens": _whole_steps("llama", "attn,mlp"),
        "UNet, fp16, 128 images of 8x8": _whole_steps("diffusion", "down.*,middle*,up.*"),
        "MoE, GPU-bound (below), 8,192 tokens": _whole_steps("gpu_bound", "attn,moe"),
    },
    "huggingface": {
        "12 small layers, 32 experts, 2,048 tokens": _hugging_face("hf_launch_bound"),
        "3 layers of 30B-A3B, 4,096 tokens": _hugging_face("hf_4k"),
        "3 layers of 30B-A3B, 16,384 tokens": _hugging_face("hf_16k"),
        "3 layers of 30B-A3B, 4,096 tokens, experts chosen evenly": _hugging_face("hf_4k_even"),
        "3 layers of 30B-A3B, 16,384 tokens, experts chosen evenly": _hugging_face("hf_16k_even"),
    },
    "partial_graphs": {
        "launch-bound: 12 layers, hidden 1024, 32 experts, top-4, 2,048 tokens": Select(
            "partial_graphs", {"model": "launch_bound"}, ("eager", *SCOPES)
        ),
        "GPU-bound: 3 layers of Qwen3-30B-A3B, 16,384 tokens": Select(
            "partial_graphs", {"model": "gpu_bound"}, ("eager", *SCOPES)
        ),
    },
    "grouped_gemm": {
        "forward": Select("grouped_gemm", {"direction": "fwd"}, ("torch", "dense", "ours")),
        "gradient of the rows": Select(
            "grouped_gemm", {"direction": "dgrad"}, ("torch", "dense", "ours")
        ),
        "gradient of the weights": Select(
            "grouped_gemm", {"direction": "wgrad"}, ("torch", "dense", "ours")
        ),
    },
    "layer_kernels": {
        "heads of attention: split, norm per head, rotation (16,384 tokens, 32/4 heads of 128)": (
            _kernel("split_heads", "4x4096 tokens, 32/4 heads of 128, norm per head")
        ),
        "router (16,384 tokens, top-8 of 128)": (
            _kernel("route", "16384 tokens of 2048, 8 of 128 experts, 1 groups")
        ),
        "cross entropy (16,384 tokens, vocabulary 32,768)": (
            _kernel("cross_entropy", "16384 tokens, vocabulary 32768")
        ),
        "RMS norm (16,384 rows of 2,048)": _kernel("rms_norm", "16384 rows of 2048"),
        "RMS norm of heads (524,288 rows of 128)": _kernel("rms_norm", "524288 rows of 128"),
    },
    "optimizers": {
        "two experts' matrices of Qwen3-30B-A3B, 604 M, bf16": _update(
            "experts of a layer of Qwen3-30B-A3B", "bfloat16"
        ),
        "111 parameters of 12 layers, 703 M, bf16": _update(
            "12 layers of 1024, 32 experts of 512", "bfloat16"
        ),
        "the same in fp32": _update("12 layers of 1024, 32 experts of 512", "float32"),
    },
    "training": {
        "`tiny`, two CPU cores": Select("training", {"model": "tiny"}, gpu="none"),
        "`small`, one H200": Select("training", {"model": "small"}),
    },
}


# ---- what a table says


def whole_steps(lines: list[Line]) -> str:
    runs, rows, used = {}, [], []
    for label, select in SELECTED["whole_steps"].items():
        run = runs[label] = select.run(lines)
        eager, *others = (run[name] for name in select.contenders)
        cells = [f"{milliseconds(line)}, {times(line['speedup']['median'])}" for line in others]
        cells[0] += f" (`{select.contenders[1]}`)"
        ours = run.get(OUR_ADAMW)
        shown = "-" if ours is None else f"{milliseconds(ours)}, {times(ours['speedup']['median'])}"
        cells.insert(2, shown)
        rate = model_flops.cell_of(run[WHOLE] if ours is None else ours)
        rows.append([label, milliseconds(eager), *cells, rate])
        used += [eager, *others]
    header = (
        f"a training step | eager | scopes | whole step | with our AdamW | `torch.compile` | "
        f"{model_flops.HEADER}, with our AdamW"
    )
    parts = [table(header, rows), f"{bitwise(used)} Our AdamW rounds otherwise. {sources(used)}"]
    parts += [slow_host(lines, run[WHOLE], run["eager"], label) for label, run in runs.items()]
    kernels = Select("layer_kernels").lines(lines)
    if max(line.run for line in kernels) > min(line.run for line in used):
        parts.append(
            "The kernels around the experts (below) are newer than these "
            "lines: whole steps with them have not been measured yet."
        )
    return "\n\n".join(filter(None, parts))


def huggingface(lines: list[Line]) -> str:
    rows, used, notes = [], [], []
    for label, select in SELECTED["huggingface"].items():
        run = select.run(lines)
        eager, *others = (run[name] for name in select.contenders)
        cells = [f"{milliseconds(line)}, {times(line['speedup']['median'])}" for line in others]
        rows.append([label, milliseconds(eager), *cells, model_flops.cell_of(others[-1])])
        used += [eager, *others]
        notes.append(slow_host(lines, others[-1], eager, label))
    header = (
        "transformers' Qwen3-MoE, a training step | as it comes | "
        "`accelerate_model(graphs=False)` | + `optim.AdamW` | + graphs of layers | or whole steps"
        f" | their {model_flops.HEADER}"
    )
    note = "Medians over interleaved rounds, torch's fused AdamW first; losses equal to rounding."
    parts = [table(header, rows), f"{note} {sources(used)}", *filter(None, notes)]
    return "\n\n".join(parts)


def partial_graphs(lines: list[Line]) -> str:
    rows, used, notes = [], [], []
    for label, select in SELECTED["partial_graphs"].items():
        run = select.run(lines)
        eager = run["eager"]
        for name in select.contenders:
            line = run[name]
            used.append(line)
            rows.append([
                label if line is eager else "",
                name if line is eager else f"`{name}`",
                milliseconds(line), times(line["speedup"]["median"]),
                model_flops.cell_of(line), milliseconds(line, "host_ms"), idle(line),
                gibibytes(line),
            ])  # fmt: skip
        best = min(run.values(), key=lambda line: line["step_ms"]["median"])
        notes.append(slow_host(lines, best, eager, label))
    graphed = [run[name] for name in SCOPES]  # the last model's: where the GPU is the limit
    cost = span([1 - line["speedup"]["median"] for line in graphed])
    more = ""
    if all(line.get("reserved_bytes") for line in (eager, *graphed)):
        shares = [line["reserved_bytes"] / eager["reserved_bytes"] - 1 for line in graphed]
        more = f", and {span(shares)} more memory"
    notes.append(
        f"Where launches dominate, graphs win what the host costs. Where the GPU is the limit they "
        f"cost {cost} of time, mostly the copy that makes gradients your own{more}."
    )
    header = (
        f"model | captured | step | x eager | {model_flops.HEADER} | host time | GPU idle | "
        f"reserved"
    )
    found = f"{bitwise(used)} {sources(used)}"
    return "\n\n".join([table(header, rows), found, *filter(None, notes)])


def bitwise(used: Sequence[Line]) -> str:
    """Raises ``ValueError`` if that is not what the gates said."""
    exact = [line for line in used if line["contender"] != COMPILED]
    wrong = [line for line in exact if "bitwise equal to eager" not in line["gate"]["message"]]
    if wrong:
        raise ValueError(f"not bitwise eager: {wrong}")
    rest = "" if len(exact) == len(used) else f" (but for `{COMPILED}`)"
    return (
        f"Medians over interleaved rounds, x eager of the same run; losses bitwise eager's{rest}."
    )


def slow_host(lines: list[Line], best: Line, eager: Line, label: str) -> str | None:
    """Eager's time is the host's where launches dominate: what is left against the best eager."""
    fastest = fastest_eager(lines, eager)
    if eager["step_ms"]["median"] < 1.05 * fastest["step_ms"]["median"]:
        return None
    ratio = fastest["step_ms"]["median"] / best["step_ms"]["median"]
    return (
        f"{label.partition(':')[0]}: hosts differ, and eager's time is the host's. It "
        f"took {milliseconds(eager)} in this run and {milliseconds(fastest)} on the fastest host "
        f"so far (commit {fastest.commit}, {link(fastest.file)}); against that, "
        f"{milliseconds(best)} are **{times(ratio)}**."
    )


def grouped_gemm(lines: list[Line]) -> str:
    rows, used = [], []
    for label, select in SELECTED["grouped_gemm"].items():
        keys = ("model", "gemm", "tokens", "routing")
        own = select.lines(lines)
        cells = {tuple(line[key] for key in keys) for line in own}
        where = [select.where | dict(zip(keys, cell, strict=True)) for cell in sorted(cells)]
        runs = [Select("grouped_gemm", each, select.contenders).run(own) for each in where]
        torch = [run["torch"]["us"][1] / run["ours"]["us"][1] for run in runs]
        large = [run for run in runs if run["ours"]["rows"] >= 512]
        dense = [run["dense"]["us"][1] / run["ours"]["us"][1] for run in large]
        shares = [f"{value:.3f}" for value in (geometric_mean(torch), min(torch))]
        rows.append([label, *shares, f"{geometric_mean(dense):.3f} ({len(dense)})"])
        used += [run[name] for run in runs for name in select.contenders]
    header = (
        f"{len(runs)} cells | x `torch._grouped_mm`, geometric mean | least | "
        "of one dense cuBLAS GEMM, cells of 512 and more rows per expert"
    )
    used.sort(key=lambda line: line.run)
    return f"{table(header, rows)}\n\n{sources(used)}"


def layer_kernels(lines: list[Line]) -> str:
    rows, used = [], []
    for label, select in SELECTED["layer_kernels"].items():
        (line,) = select.run(lines).values()
        used.append(line)
        cells = [f"{line[key]:.0f} us" for key in ("torch_us", "ours_us")]
        rows.append([label, *cells, times(line["torch_us"] / line["ours_us"])])
    parts = [table("forward and backward, as graphs | torch's ops | here | x", rows)]
    parts.append(sources(used))
    if len({line.run for line in used}) > 1:
        parts.append(
            "Each was measured by itself, on the branch it was written on: the three have been "
            "neither measured nor tested together on a GPU yet."
        )
    return "\n\n".join(parts)


def optimizers(lines: list[Line]) -> str:
    rows, used = [], []
    for label, select in SELECTED["optimizers"].items():
        (line,) = select.run(lines).values()
        used.append(line)
        cells = [
            f"{line[f'{who}_us'] / 1e3:.2f} ms, {line[f'{who}_tb_s']:.2f} TB/s"
            for who in ("torch", "ours", "8bit")
        ]
        for place, who in ((2, "ours"), (4, "8bit")):
            cells.insert(place, times(line["torch_us"] / line[f"{who}_us"]))
        rows.append([label, *cells])
    header = (
        "an update, in a graph | torch's fused AdamW | `moe_graphs.optim.AdamW` | x | "
        "with states of 8 bits | x"
    )
    return f"{table(header, rows)}\n\n{sources(used)}"


def training(lines: list[Line]) -> str:
    rows, used = [], []
    for label, select in SELECTED["training"].items():
        (line,) = select.run(lines).values()
        used.append(line)
        python = line["environment"]["python"]
        bits = [*line["compressors"].values(), line["held_out_bits_per_byte"]]
        name = f"{label}, {line['parameters'] / 1e6:.3g} M parameters, Python {python}'s library"
        minutes, seconds = divmod(round(line["seconds"]), 60)
        rows.append([name, *(f"{value:.3f}" for value in bits), f"{minutes} min {seconds} s"])
    header = f"held out, bits per byte | {' | '.join(line['compressors'])} | this | trained in"
    return f"{table(header, rows)}\n\n{sources(used)}"


def real_runs(lines: list[Line]) -> str:
    """A row per variant, its newest line of every seed."""
    newest: dict[tuple, Line] = {}
    for line in sorted(Select("real_runs").lines(lines), key=lambda line: line.run):
        if not line.failed:
            newest[line["set"], line["contender"], line["seed"]] = line
    variants: dict[tuple[str, str], list[Line]] = {}
    for (name, contender, _), line in newest.items():
        variants.setdefault((name, contender), []).append(line)
    rows = []
    for (_, contender), seeds in variants.items():
        bits = [line["held_out_bits_per_byte"] for line in seeds]
        spread = f" ± {statistics.stdev(bits):.3f}" if len(bits) > 1 else ""
        alone, reached = seeds[0]["jobs_per_gpu"] == 1, seeds[0]["seconds_to_target"]
        cells = [f"{seeds[0]['tokens_per_second'] / 1e3:,.0f} k", f"{reached or 0:.0f} s"]
        rows.append([
            f"`{seeds[0]['model']}`, {seeds[0]['steps']} steps: {contender}", str(len(seeds)),
            f"{statistics.mean(bits):.3f}{spread}", *(cells if alone else ["-", "-"]),
        ])  # fmt: skip
    header = "a run | seeds | held out, bits per byte | tokens/s | to 0.85 bits per byte"
    note = (
        "Everything off: eager, torch's AdamW; on: whole steps with our AdamW, bf16 parameters "
        "rounded stochastically. Times have captures and compilation in them; -: many runs on a "
        "GPU."
    )
    return f"{table(header, rows)}\n\n{note} {sources(newest.values())}"


Tables = Mapping[str, Callable[[list[Line]], str]]


def _named(*tables: Callable[[list[Line]], str]) -> Tables:
    return {table.__name__: table for table in tables}


DOCUMENTS: Mapping[Path, Tables] = {
    README: _named(results),
    PERFORMANCE: _named(
        whole_steps,
        huggingface,
        lora,
        few_bits,
        trl,
        partial_graphs,
        accumulated,
        on_an_h100,
        peers,
        peers_on_an_h100,
        fp8_training,
        dispatch,
        parallel_steps,
        shared_experts,
        grouped_gemm,
        moe_layer,
        moe_layer_beside_liger,
        fp8_experts,
        deepgemm,
        fp8_products,
        fp8_projections,
        fp8_whole_steps,
        fp8_pairs,
        document_attention,
        layer_kernels,
        head_and_loss,
        optimizers,
        training,
        real_runs,
    ),
    MANY_GPUS: _named(communication, expert_rows, weak_scaling),
}


# ---- documents


def written(text: str, lines: list[Line], tables: Tables) -> str:
    """``text`` with every table anew. Raises ``ValueError`` unless it has each of them once."""
    names = sorted(match[1] for match in BLOCK.finditer(text))
    if names != sorted(tables):
        raise ValueError(f"the document has the tables {names}, and should have {sorted(tables)}")

    def block(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{tables[match[1]](lines)}\n\n<!-- /table -->"

    return BLOCK.sub(block, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    lines, differ = load(), False
    for path, tables in DOCUMENTS.items():
        before = path.read_text()
        after = written(before, lines, tables)
        if path != README:
            after = after.replace("](benchmarks/", "](../benchmarks/")
        if not check:
            path.write_text(after)
            continue
        difference = difflib.unified_diff(
            before.splitlines(), after.splitlines(), path.name, "the lines", lineterm="", n=0
        )
        print(*difference, sep="\n")
        differ |= before != after
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
