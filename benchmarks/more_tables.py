"""Tables of other settings than one batch a step on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from contenders import gpu_bound, launch_bound
from markdown_cells import milliseconds, table, times
from moe_graphs.layers import LanguageModel, TransformerConfig
from result_lines import H200, Line, Select, fastest_eager, sources

H100 = "NVIDIA H100 80GB HBM3"
OUR_ADAMW = "full iteration, our AdamW"
MODELS = {
    "launch_bound": "launch-bound, 2,048 tokens",
    "gpu_bound": "GPU-bound, 8,192 tokens",
}
UPDATES = {"bfloat16": "bf16", "float32": "fp32"}
_PARAMETERS = "12 layers of 1024, 32 experts of 512"
H200_PEAK = 989e12  # dense bf16 FLOP/s of the data sheet
LORA = {16_384: "with checkpointing", 2_048: "without checkpointing"}


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
    for model, label in MODELS.items():
        whole = Select("full_iteration", {"model": model}, ("eager", OUR_ADAMW), H100).run(lines)
        scopes = Select("partial_graphs", {"model": model}, ("eager", "attn,moe"), H100).run(
            [line for line in lines if "microbatches" not in (line.get("setting") or "")]
        )
        shown = scopes["attn,moe"], whole[OUR_ADAMW]
        cells = [f"{milliseconds(each)}, {times(each['speedup']['median'])}" for each in shown]
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
    header = "a training step | eager | scopes (`attn,moe`) | whole step, our AdamW"
    note = f"x eager of the same run. The update of 111 parameters, 703 M: {'; '.join(updates)}."
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


def results(lines: list[Line]) -> str:
    """Table of the main results: a row each, by transformers or eager, and by the best of ours."""
    rows, used = [], []
    for what, how, before, after, flops in (*_lora(lines), *_full_training(lines)):
        rows.append([
            what, f"{before:,.0f}", f"{after:,.0f} ({how})", times(after / before),
            f"{after * flops / 1e12:.0f}", f"{after * flops / H200_PEAK:.0%}",
        ])  # fmt: skip
    for names in ("lora", "huggingface", "full_iteration"):
        used += _shown(lines, names)
    header = "one H200, bf16 | before, tokens/s | here, tokens/s | x | model TFLOP/s | of peak"
    note = (
        "Before: transformers with `grouped_mm` (LoRA: PEFT), in the last row our model eagerly; "
        "for all weights on the fastest host that was measured. Model FLOPs leave out what "
        "checkpointing computes again."
    )
    return f"{table(header, rows)}\n\n{note} {sources(used)}"


Row = tuple[str, str, float, float, float]


def _shown(lines: list[Line], benchmark: str) -> list[Line]:
    """The lines of the table that are of this benchmark."""
    if benchmark == "lora":
        return [line for runs in _lora_runs(lines).values() for line in runs.values()]
    where, contenders = FULL[benchmark]
    run = Select(benchmark, where, contenders).run(lines)
    before, after = (run[name] for name in contenders)
    return [fastest_eager(lines, before), after]


def _lora_runs(lines: list[Line]) -> dict[int, dict[str, Line]]:
    """Newest line of each contender, by number of tokens."""
    found: dict[int, dict[str, Line]] = {}
    for line in sorted(Select("lora", {"smoke": False}).lines(lines), key=lambda line: line.run):
        if not line.failed and line["environment"]["gpu"] == H200:
            found.setdefault(line["tokens"], {})[line["contender"]] = line
    return found


def _lora(lines: list[Line]) -> Iterator[Row]:
    for tokens, runs in _lora_runs(lines).items():
        first, *others = runs.values()
        best = max(others, key=lambda line: line["tokens_per_second"])
        rate = best["tokens_per_second"]
        what = f"LoRA, all 48 layers of Qwen3-30B-A3B, {tokens:,} tokens a step, {LORA[tokens]}"
        flops = 1e12 * best["model_tflops"] / rate
        yield what, f"`{best['contender']}`", first["tokens_per_second"], rate, flops


def lora(lines: list[Line]) -> str:
    """Every contender at both sizes, with memory."""
    rows, used = [], []
    for tokens, runs in _lora_runs(lines).items():
        first = next(iter(runs.values()))
        for name, line in runs.items():
            rows.append([
                f"{tokens:,}, {LORA[tokens]}" if line is first else "", f"`{name}`",
                f"{line['step_ms']:.0f} ms", f"{line['tokens_per_second']:,.0f}",
                times(line["tokens_per_second"] / first["tokens_per_second"]),
                f"{line['max_allocated_bytes'] / 2**30:.1f} GiB",
            ])  # fmt: skip
            used.append(line)
    header = "tokens a step | contender | step | tokens/s | x | allocated at most"
    note = (
        "LoRA of rank 16 on the projections of attention, all 48 layers of Qwen3-30B-A3B with "
        "random weights, bf16, torch's fused AdamW; losses equal to rounding. Checkpointed layers "
        "run eagerly, so graphs are measured without checkpointing."
    )
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
        yield what, how, *rates, _flops_per_token(benchmark)


@cache
def _flops_per_token(benchmark: str) -> float:
    config: TransformerConfig = launch_bound().config
    if benchmark == "huggingface":
        config = replace(gpu_bound().config, qk_norm="head")
    model = LanguageModel(config, device="meta")
    return model.flops_per_token(config.max_sequence_length)
