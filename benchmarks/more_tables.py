"""Tables of other settings than one batch a step on an H200."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import model_flops
from markdown_cells import milliseconds, table, times
from real_runs import apart as apart_of_seeds
from result_lines import H100, H200, Line, Select, fastest_eager, sources

OUR_ADAMW = "full iteration, our AdamW"
MODELS = {
    "launch_bound": "launch-bound, 2,048 tokens",
    "gpu_bound": "GPU-bound, 8,192 tokens",
}
# Models of `full_iteration.py` whose routers choose by a rule; others choose as untrained.
ROUTED = {
    "gpu_bound_even": "GPU-bound, 8,192 tokens, experts chosen evenly",
    "gpu_bound_zipf": "GPU-bound, 8,192 tokens, experts chosen by Zipf's law",
}
UPDATES = {"bfloat16": "bf16", "float32": "fp32"}
_PARAMETERS = "12 layers of 1024, 32 experts of 512"
# Rows of `fine_tuning.py`; lines from before rows had names are known by their tokens.
LORA = {
    "attention_16k": "adapters on attention",
    "experts_16k": "adapters on attention and experts",
    "nf4_attention_16k": "adapters on attention, experts in NF4",
    "nf4_experts_16k": "adapters on attention and experts, experts in NF4",
    "attention_2k": "adapters on attention",
    "gpt_oss_attention_16k": "gpt-oss-20b, adapters on attention, experts in MXFP4",
    "gpt_oss_experts_16k": "gpt-oss-20b, adapters on attention and experts, experts in MXFP4",
    "gpt_oss_attention_2k": "gpt-oss-20b, adapters on attention, experts in MXFP4",
    "launch_bound": "12 small layers, adapters on attention",
    "all_weights": "all weights",
    "all_weights_4_layers": "4 layers, all weights",
}
LORA_ROW_OF = {16_384: "attention_16k", 2_048: "attention_2k"}
FULL_SIZE = ("attention_16k", "experts_16k", "attention_2k")


def accumulated(lines: list[Line]) -> str:
    """Several microbatches a step."""
    rows, used = [], []
    given = [line for line in lines if "4 microbatches" in (line.get("setting") or "")]
    for model, label in MODELS.items():
        run = Select("partial_graphs", {"model": model}, ("eager", "attn,moe")).run(given)
        eager, graphed = run["eager"], run["attn,moe"]
        memory = [f"{line['reserved_steady_bytes'] / 2**30:.1f} GiB" for line in (eager, graphed)]
        rows.append([
            f"{label} each", milliseconds(eager), milliseconds(graphed),
            times(graphed["speedup"]["median"]), *memory,
        ])  # fmt: skip
        used += [eager, graphed]
    header = (
        "a step of four microbatches | eager | `attn,moe` | x | eager, reserved | `attn,moe`, "
        "reserved"
    )
    return f"{table(header, rows)}\n\nLosses bitwise eager's. {sources(used)}"


def on_an_h100(lines: list[Line]) -> str:
    rows, used = [], []
    for model, label in (MODELS | ROUTED).items():
        wanted = ("eager", OUR_ADAMW, *(("attn,moe",) if model in ROUTED else ()))
        whole = Select("full_iteration", {"model": model}, wanted, H100).run(lines)
        scopes = whole
        if model in MODELS:
            scopes = Select("partial_graphs", {"model": model}, ("eager", "attn,moe"), H100).run(
                [line for line in lines if not line.accumulates]
            )
        shown = scopes["attn,moe"], whole[OUR_ADAMW]
        cells = [f"{milliseconds(each)}, {times(each['speedup']['median'])}" for each in shown]
        cells.append(model_flops.cell_of(shown[1]))
        rows.append([label, milliseconds(whole["eager"]), *cells])
        used += [whole["eager"], *shown]
    updates = []
    for dtype, name in UPDATES.items():
        where = {"parameters": _PARAMETERS, "dtype": dtype}
        (line,) = Select("optimizers", where, gpu=H100).run(lines).values()
        updates.append(
            f"{name} {line['ours_us'] / 1e3:.2f} ms, {line['ours_tb_s']:.2f} TB/s, "
            f"{times(line['torch_us'] / line['ours_us'])} of torch's fused one"
        )
        used.append(line)
    header = (
        f"a training step | eager | scopes (`attn,moe`) | whole step, our AdamW | its "
        f"{model_flops.HEADER}"
    )
    loads = [f"{line['load']:.1f}" for line in used if line.get("load")]
    note = (
        f"x eager of the same run. The fullest expert has {loads[0]} times the mean where experts "
        f"are chosen evenly, {loads[-1]} times by Zipf's law; in the first two rows they are "
        f"chosen as by the untrained model. The update of 111 parameters, 703 M: "
        f"{'; '.join(updates)}."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


def results(lines: list[Line]) -> str:
    """Table of the main results: a row each, by transformers or eager, and by the best of ours."""
    rows, used = [], []
    for what, how, before, after, flops in (*_lora(lines), *_full_training(lines)):
        cells = [f"{before:,.0f}", f"{after:,.0f} ({how})", times(after / before), flops]
        rows.append([what, *cells])
    for names in ("lora", "huggingface", "full_iteration"):
        used += _shown(lines, names)
    header = f"one H200, bf16 | before, tokens/s | here, tokens/s | x | {model_flops.HEADER}"
    note = (
        "Before: transformers with `grouped_mm` (LoRA: PEFT), in the last row our model eagerly, "
        "on the fastest host that was measured. "
        "[How FLOPs are counted](docs/performance.md#how-flops-are-counted)."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used, commands=False)}"


Row = tuple[str, str, float, float, str]


def _shown(lines: list[Line], benchmark: str) -> list[Line]:
    """The lines of the table that are of this benchmark."""
    if benchmark == "lora":
        runs = _lora_runs(lines)
        before = [_on_the_fastest_host(lines, runs[row][0]) for row in FULL_SIZE]
        return before + [line for row in FULL_SIZE for line in runs[row]]
    where, contenders = FULL[benchmark]
    run = Select(benchmark, where, contenders).run(lines)
    before, after = (run[name] for name in contenders)
    return [fastest_eager(lines, before), after]


def _lora_runs(lines: list[Line], gpu: str = H200) -> dict[str, list[Line]]:
    """Lines of the newest run of each row, the one of transformers first."""
    given = [
        line
        for benchmark in ("lora", "fine_tuning")
        for line in Select(benchmark, {"smoke": False}, gpu=gpu).lines(lines)
    ]
    found = _newest_runs(given, _lora_row_of)
    return {row: found[row] for row in LORA if row in found}


def _lora_row_of(line: Line) -> str:
    return line.get("row") or LORA_ROW_OF[line["tokens"]]


def _on_the_fastest_host(lines: list[Line], like: Line) -> Line:
    """The fastest line of the same contender, row and checkpointing on an H200, of any commit."""
    found = [
        line
        for line in Select("fine_tuning", {"smoke": False}, gpu=H200).lines(lines)
        if not line.failed
        and all(line[key] == like[key] for key in ("row", "contender", "checkpointing"))
    ]
    return max(found, key=lambda line: line["tokens_per_second"])


def _newest_runs(lines: Iterable[Line], row_of: Callable[[Line], str]) -> dict[str, list[Line]]:
    """Lines of the newest run of each row, without those that failed."""
    found: dict[str, dict[Any, list[Line]]] = {}
    for line in lines:
        if not line.failed:
            found.setdefault(row_of(line), {}).setdefault(line.run, []).append(line)
    return {row: runs[max(runs)] for row, runs in found.items()}


def _lora(lines: list[Line]) -> Iterator[Row]:
    runs = _lora_runs(lines)
    for row in FULL_SIZE:
        first, *others = runs[row]
        best = max(others, key=lambda line: line["tokens_per_second"])
        rate = best["tokens_per_second"]
        lora = "LoRA, on experts, too" if row == "experts_16k" else "LoRA"
        what = f"{lora}, all 48 layers of Qwen3-30B-A3B, {first['tokens']:,} tokens a step"
        flops = model_flops.cell(1e12 * best["model_tflops"])
        alike = best["checkpointing"] == first["checkpointing"]
        how = f"`{best['contender']}`{'' if alike else _with_or_without(best)}"
        before = _on_the_fastest_host(lines, first)["tokens_per_second"]
        yield what + _with_or_without(first), how, before, rate, flops


def _with_or_without(line: Line) -> str:
    return f", {'with' if line['checkpointing'] else 'without'} checkpointing"


def lora(lines: list[Line]) -> str:
    """Every contender of every row, with memory."""
    return _lora_table(_lora_runs(lines))


def few_bits(lines: list[Line]) -> str:
    """Experts in few bits beside experts in bf16, on an H100."""
    runs = _lora_runs(lines, H100)
    return _lora_table({row: run for row, run in runs.items() if row.startswith("nf4")})


def _lora_table(runs: Mapping[str, Sequence[Line]]) -> str:
    rows, used = [], []
    for row, run in runs.items():
        first = run[0]
        for line in run:
            rows.append([
                f"{line['tokens']:,}, {LORA[row]}" if line is first else "",
                f"`{line['contender']}`{_with_or_without(line)}",
                f"{line['step_ms']:.0f} ms", f"{line['tokens_per_second']:,.0f}",
                times(line["tokens_per_second"] / first["tokens_per_second"]),
                model_flops.cell(1e12 * line["model_tflops"]),
                f"{line['max_allocated_bytes'] / 2**30:.1f} GiB",
            ])  # fmt: skip
            used.append(line)
    header = (
        f"tokens a step | contender | step | tokens/s | x | {model_flops.HEADER} | "
        f"allocated at most"
    )
    note = (
        "Qwen3-30B-A3B with all of its 48 layers unless a row says other sizes, random weights, "
        "bf16; LoRA of rank 16 with torch's fused AdamW, all weights with ours; losses equal to "
        "rounding. Rows of LoRA spread tokens over experts evenly (the fullest expert has 2.2 "
        "times the mean), other rows as the untrained model does. Graphs are timed without audits. "
        "Steps of 2,048 tokens without graphs take the time of the host, which differs by 2x from "
        "one machine to the next."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


def trl(lines: list[Line]) -> str:
    """TRL's trainers as they come, and with ``GraphCallback``."""
    rows, used = [], []
    given = Select("trl_trainers", {"smoke": False}).lines(lines)
    # A call may measure one contender only, as GRPO's generation takes long: pairs have a commit.
    found: dict[str, dict[str, dict[str, Line]]] = {}
    for line in sorted(given, key=lambda line: line["environment"]["date"]):
        if not line.failed:
            pairs = found.setdefault(line["trainer"], {})
            pairs.setdefault(line["environment"]["commit"], {})[line["contender"]] = line
    for trainer, pairs in found.items():
        whole = [pair for pair in pairs.values() if len(pair) == 2]
        both = sorted(whole[-1].values(), key=lambda x: x["contender"]) if whole else ()
        for line in reversed(both):
            plain = both[-1]
            kind, _, cache = trainer.partition("_")
            label = f"`{kind.upper()}Trainer`{f', {cache} cache' if cache else ''}"
            rows.append([
                label if line is plain else "",
                line["contender"] if line is plain else f"`{line['contender']}`",
                f"{line['step_ms']:.0f} ms", f"{line['tokens_per_second']:,.0f}",
                times(line["tokens_per_second"] / plain["tokens_per_second"]),
                f"{line['generation_ms']:.0f} ms" if line.get("generation_ms") else "",
                f"{100 * line['share']:.0f}%" if line.get("share") else "",
                f"{line['max_allocated_bytes'] / 2**30:.1f} GiB",
            ])  # fmt: skip
            used.append(line)
    header = (
        "trainer | contender | step | tokens/s | x | of a step, generation | replayed | "
        "allocated at most"
    )
    note = (
        "Every option at its default, audits as well; Qwen3-MoE of 12 small layers with LoRA on "
        "attention, texts of up to 1,000 words; steps behind the 20th. Tokens leave out padding."
    )
    generated = dict.fromkeys(  # pairs of the same sizes share a sentence
        f" GRPO has {len(line['losses'])} steps, {line['sizes']['num_hidden_layers']} layers and "
        f"completions of {line['sizes']['max_completion_length']} tokens."
        for line in used
        if line.get("sizes")
    )
    note += "".join(generated)
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


FULL = {
    "huggingface": ({"model": "hf_4k"}, ("eager", "with AdamW, whole steps")),
    "full_iteration": ({"model": "launch_bound"}, ("eager", OUR_ADAMW)),
}


def _full_training(lines: list[Line]) -> Iterator[Row]:
    names = {
        "huggingface": "all weights, 3 layers of Qwen3-30B-A3B by transformers, 4,096 tokens",
        "full_iteration": "all weights, 12 small layers of our own, 2,048 tokens",
    }
    for benchmark, what in names.items():
        before, after = _shown(lines, benchmark)
        rates = [1e3 * line["tokens"] / line["step_ms"]["median"] for line in (before, after)]
        how = "`accelerate_model`, whole steps" if benchmark == "huggingface" else "whole steps"
        yield what, how, *rates, model_flops.cell_of(after)


def head_and_loss(lines: list[Line]) -> str:
    """Projection onto the vocabulary with its cross entropy, beside Liger-Kernel's."""
    used = Select("layer_kernels", {"op": "linear_cross_entropy"}, gpu=H100).lines(lines)
    newest = {line["shape"]: line for line in sorted(used, key=lambda line: line.run)}
    rows = []
    for line in newest.values():
        names = ("torch", "ours", "liger", "liger_fp32_sums")
        errors = (line["error" if name == "ours" else f"{name}_error"] for name in names)
        rows.append([
            line["shape"],
            *(
                f"{line[f'{name}_us'] / 1e3:.1f} ms, {line[f'{name}_peak_mib']:,.0f} MiB, {e:.4f}"
                for name, e in zip(names, errors, strict=True)
            ),
        ])  # fmt: skip
    header = (
        "forward and backward: time, peak memory, error | whole logits | here | "
        "Liger-Kernel | Liger-Kernel, sums in fp32"
    )
    note = (
        "Liger-Kernel waits for the device and is timed eagerly, the others as graphs. Errors are "
        "relative, against fp64, in the gradient that is worst."
    )
    return f"{table(header, rows)}\n\n{note} {sources(newest.values())}"


def _rows_an_expert(line: Line) -> int:
    return line["tokens"] * line["top_k"] // line["experts"]


def _speedup(line: Line, bf16: Line) -> float:
    """The median of the rounds' own speedups; older lines have medians of times alone."""
    paired = line.get("train_speedup")
    return paired[1] if paired else bf16["train_ms"][1] / line["train_ms"][1]


def fp8_experts(lines: list[Line]) -> str:
    """One MoE layer with experts in FP8, beside the same in bf16."""
    kinds = ("", " in FP8", " in FP8 but gradients of weights", " in FP8, codes of weights at hand")
    contenders = [f"ours{kind}, one graph" for kind in kinds]
    sizes = ("tokens", "hidden", "ffn", "experts", "top_k")
    given = Select("moe_layer_fp8").lines(lines)
    rows, used = [], []
    runs = _newest_runs(given, lambda line: ", ".join(f"{line[key]:,}" for key in sizes))
    by_rows = sorted(runs, key=lambda name: _rows_an_expert(runs[name][0]))
    for name in by_rows:
        by_name = {line["contender"]: line for line in runs[name]}
        shown = [by_name[contender] for contender in contenders]
        bf16, *others = shown
        faster = [f"{line['train_ms'][1]:.1f} ms, {times(_speedup(line, bf16))}" for line in others]
        rows.append([
            name, f"{_rows_an_expert(bf16):,}", f"{bf16['train_ms'][1]:.1f} ms", *faster,
            " -> ".join(f"{line['saved_mib']:,}" for line in shown[:2]),
        ])  # fmt: skip
        used += shown
    apart = max(line["train_ms"][2] / line["train_ms"][0] for line in used) - 1
    header = (
        "tokens, hidden, ffn, experts, top-k | rows an expert | bf16 | `fp8` | `fp8_rows` | `fp8`, "
        "codes at hand | MiB kept, bf16 -> `fp8`"
    )
    note = (
        "Forward and backward of one MoE layer as a graph, even routing. Codes of weights are at "
        "hand for the second microbatch and later ones of a step (`unchanged_weights`). Medians; "
        f"rounds of one contender are up to {100 * apart:.0f} % apart."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


def deepgemm(lines: list[Line]) -> str:
    """Products in FP8 beside DeepGEMM's, with the same codes."""
    given = Select("deepgemm").lines(lines)
    newest = {(line["model"], line["product"]): line for line in given}
    rows, ahead = [], []
    for key, line in newest.items():
        name = ", ".join(key)
        ours, theirs = (line[side]["us"] for side in ("ours", "deepgemm"))
        rates = [f"{line[side]['tflops']:,.0f}" for side in ("ours", "deepgemm")]
        rows.append([name, f"{line['rows']:,}", *rates, times(theirs / ours)])
        ahead += [times(ours / theirs)] if theirs < ours else []
    first = f"DeepGEMM is ahead in {len(ahead)} of {len(rows)} products ({', '.join(ahead)})."
    header = "a grouped product | rows | ours, TFLOP/s | DeepGEMM, TFLOP/s | ours over DeepGEMM"
    note = (
        "Same codes and scales; products of rows have the same bits. DeepGEMM wants experts' rows "
        "to begin at multiples of 128, and adds gradients of weights into fp32, where ours are "
        "written in bf16. Made by a script that is not part of this project."
    )
    return f"{first}\n\n{table(header, rows)}\n\n{note} {sources(newest.values(), commands=False)}"


def fp8_products(lines: list[Line]) -> str:
    """Grouped products in FP8 beside one dense product of the same FLOPs."""
    given = Select("fp8_products").lines(lines)
    newest = {tuple(line["shape"]): line for line in given if line.get("shape")}
    rows = []
    for (routing, count, experts, K, N), line in newest.items():
        rates = line["tflops"]
        dense, ours = rates["dense fp8, scales of rows"], rates["ours fp8, 128x256, by turns"]
        shown = [f"{each:,}" for each in (rates["ours bf16"], dense, ours)]
        name = f"{experts} experts, {K:,} to {N:,}" + ", skewed" * (routing == "zipf")
        rows.append([name, f"{count // experts:,}", *shown, times(ours / dense)])
    header = (
        "a product of rows, TFLOP/s | rows an expert | bf16 | one dense product in FP8 | `fp8` | "
        "`fp8` over dense"
    )
    note = (
        "The dense product is `torch._scaled_mm` with a scale per row and column and "
        "`use_fast_accum=False`. Codes are made beforehand."
    )
    return f"{table(header, rows)}\n\n{note} {sources(newest.values())}"


def fp8_projections(lines: list[Line]) -> str:
    """Forward and backward of projections in FP8, beside bf16."""
    given = Select("fp8_products").lines(lines)
    newest = {tuple(line["projection"]): line for line in given if line.get("projection")}
    rows = []
    for (count, columns, out), line in newest.items():
        us = line["microseconds"]
        shown = [f"{us[k] / 1e3:.2f} ms, {times(us['bf16'] / us[k])}" for k in ("fp8", "fp8_rows")]
        sizes = f"{count:,} rows, {columns:,} to {out:,}"
        rows.append([sizes, f"{us['bf16'] / 1e3:.2f} ms", *shown])
    header = "a projection | bf16 | `fp8` | `fp8_rows`"
    note = "Forward and backward as graphs; the weight is quantized in both."
    return f"{table(header, rows)}\n\n{note} {sources(newest.values())}"


IN_FP8 = {
    "fp8": f"{OUR_ADAMW}, FP8",
    "fp8_rows": f"{OUR_ADAMW}, FP8 but gradients of weights",
    "fp8_8_bits": f"{OUR_ADAMW}, FP8, 8-bit states",
}


def fp8_whole_steps(lines: list[Line]) -> str:
    """Whole steps with experts and all projections in FP8, beside bf16."""
    rows, used = [], []
    for gpu, model, microbatches in product((H200, H100), ROUTED, (False, True)):
        given = [line for line in lines if line.accumulates is microbatches]
        where = Select("full_iteration", {"model": model}, ("eager", IN_FP8["fp8"]), gpu)
        try:
            run = where.run(given)
        except LookupError:
            continue
        cells = [milliseconds(run["eager"])]
        for name in (OUR_ADAMW, *IN_FP8.values()):
            line = run.get(name)
            if line is None:
                cells.append("-")
                continue
            cells.append(f"{milliseconds(line)}, {times(line['speedup']['median'])}")
            used.append(line)
        label = f"{gpu.split()[1]}: {ROUTED[model]}{', four times' * microbatches}"
        rows.append([label, *cells])
        used.append(run["eager"])
    header = "a training step | bf16, eager | whole step, bf16 | `fp8` | `fp8_rows` | "
    header += "`fp8`, 8-bit states"
    note = (
        "Experts, and projections of all layers; our AdamW within the graph; x eager in bf16. "
        "Experts have 512 rows on average. Four microbatches share the codes of experts' weights "
        "(`unchanged_weights`)."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


def fp8_pairs(lines: list[Line]) -> str:
    """Training in FP8 beside bf16, from the same seeds."""
    pairs: dict[int, dict[str, Line]] = {}
    for line in Select("real_runs", {"set": "fp8"}, gpu=H100).lines(lines):
        if not line.failed:
            pairs.setdefault(line["seed"], {})[line["contender"]] = line
    both = [pair for _, pair in sorted(pairs.items()) if len(pair) == 2]
    plain, ours = ([pair[name] for pair in both] for name in ("bf16", "experts in FP8"))
    rows = []
    for one, other in zip(plain, ours, strict=True):
        bits = [line["held_out_bits_per_byte"] for line in (one, other)]
        rows.append([
            str(one["seed"]), *(f"{each:.4f}" for each in bits),
            f"{100 * (bits[1] / bits[0] - 1):+.2f} %",
            times(other["tokens_per_second"] / one["tokens_per_second"]),
        ])  # fmt: skip
    header = "seed | held out, bits per byte, bf16 | FP8 | difference | tokens/s, FP8 over bf16"
    difference = apart_of_seeds(ours, plain)
    note = (
        f"`small`, {plain[0]['steps']} steps on 57 MB of the text of installed packages, five "
        f"times Python's library; experts in FP8. Difference: {difference} (95 % interval)."
    )
    return f"{table(header, rows)}\n\n{note} {sources([*plain, *ours])}"


def document_attention(lines: list[Line]) -> str:
    """Attention within the documents of a row: our kernel and what torch has."""
    given = Select("document_attention", gpu=H100).lines(lines)
    shown = [line for line in given if line.get("length")]
    rows = []
    for line in shown:
        cells = (
            f"{line[f'{name}_us'] / 1e3:.2f} ms, {line[f'{name}_mib']} MiB"
            for name in ("kernel", "mask", "varlen", "causal")
        )
        rows.append([f"{line['length']:,} tokens, {line['documents']}", *cells])
    header = (
        "a row, documents in it | here | a mask of the row's square | torch's `varlen_attn` | "
        "causal, across documents"
    )
    note = (
        "Forward and backward in bf16, 32 heads of 128 and 4 of keys, as graphs; memory at most. "
        "The last column computes something else: what it costs to know no documents."
    )
    return f"{table(header, rows)}\n\n{note} {sources(shown)}"
