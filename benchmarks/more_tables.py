"""Tables of other settings than one batch a step on an H200."""

from __future__ import annotations

from markdown_cells import milliseconds, table, times
from result_lines import Line, Select, sources

H100 = "NVIDIA H100 80GB HBM3"
OUR_ADAMW = "full iteration, our AdamW"
MODELS = {
    "launch_bound": "launch-bound, 2,048 tokens",
    "gpu_bound": "GPU-bound, 8,192 tokens",
}
UPDATES = {"bfloat16": "bf16", "float32": "fp32"}
_PARAMETERS = "12 layers of 1024, 32 experts of 512"


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
