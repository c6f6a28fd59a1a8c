"""Entries of the comparison: each has a file of this folder and options for its `build`.

An entry's `contenders.Contender` has the options of the step around the model (our engine and
optimizer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contenders import Contender

SCOPES = "attn,moe_router,moe_preprocess"
MEGATRON_SCOPES = "attn+moe_router+moe_preprocess"

TE = "transformer_engine"
PLAIN = Contender("peer")
WHOLE = dict(full_iteration=True, optimizer_in_graph=True, our_adamw=True)


@dataclass(frozen=True)
class Entry:
    """``title`` stands in tables, ``runs_on_cpu`` for whether a test can start it."""

    title: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    contender: Contender = PLAIN
    runs_on_cpu: bool = False


def _ours(title: str, **contender: Any) -> Entry:
    return Entry(title, "ours", {}, Contender("ours", **contender), runs_on_cpu=True)


def _ours_fp8(title: str, precision: str, **contender: Any) -> Entry:
    title = f"moe_graphs, {title}, experts and all projections"
    return Entry(title, "ours", {"precision": precision}, Contender("ours", **contender))


def _ours_te(title: str, experts: str, fp8: str | None, **contender: Any) -> Entry:
    """Our model with Transformer Engine's linear layers, and its experts where said."""
    title = f"moe_graphs, TE {'linears' if experts == 'moe_graphs' else 'parts'}, {title}"
    options = dict(linear="transformer_engine", experts=experts, fp8=fp8)
    return Entry(title, "ours", options, Contender("ours", **contender))


def _megatron(dispatcher: str, graphs: str = "none", scope: str = "full") -> Entry:
    graphed = "eager" if graphs == "none" else f"{graphs} graphs of {scope}"
    options = dict(dispatcher=dispatcher, graphs=graphs, scope=scope)
    return Entry(f"Megatron-core, {dispatcher}, {graphed}", "megatron_peer", options)


def _block(block: str) -> Entry:
    return Entry(f"{block} in plain torch", "block_peer", {"block": block})


def _te(fp8: str | None = None, graphs: bool = False) -> Entry:
    parts = ["Transformer Engine", f"FP8 {fp8}" if fp8 else "bf16", *["attn graphs"] * graphs]
    return Entry(", ".join(parts), "te_peer", dict(fp8=fp8, graphs=graphs))


ENTRIES: dict[str, Entry] = {
    "ours": _ours("moe_graphs, eager"),
    "ours-router": _ours(f"moe_graphs, graphs of {SCOPES}", scopes=SCOPES),
    "ours-moe": _ours("moe_graphs, graphs of attn,moe", scopes="attn,moe"),
    "ours-whole": _ours("moe_graphs, whole steps", full_iteration=True, optimizer_in_graph=True),
    "ours-whole-adamw": _ours("moe_graphs, whole steps, our AdamW", **WHOLE),
    "ours-whole-in-backward": _ours(
        "moe_graphs, whole steps, our AdamW within the backward", in_backward=True, **WHOLE
    ),
    "ours-fp8-moe": _ours_fp8("FP8, graphs of attn,moe", "fp8", scopes="attn,moe"),
    "ours-fp8-whole": _ours_fp8("FP8, whole steps, our AdamW", "fp8", **WHOLE),
    "ours-fp8-rows-whole": _ours_fp8(
        "FP8 but gradients of weights, whole steps, our AdamW", "fp8_rows", **WHOLE
    ),
    "ours-te": _ours_te(f"bf16, graphs of {SCOPES}", TE, None, scopes=SCOPES),
    "ours-te-fp8-delayed": _ours_te(
        f"FP8 delayed, graphs of {SCOPES}", TE, "delayed", scopes=SCOPES
    ),
    "ours-te-fp8-current": _ours_te(
        f"FP8 current, graphs of {SCOPES}", TE, "current", scopes=SCOPES
    ),
    "ours-te-fp8-block": _ours_te(f"FP8 block, graphs of {SCOPES}", TE, "block", scopes=SCOPES),
    "ours-te-fp8-current-whole": _ours_te(
        "FP8 current, whole steps, our AdamW",
        "moe_graphs",
        "current",
        **WHOLE,
    ),
    "megatron": _megatron("alltoall"),
    "megatron-attn": _megatron("alltoall", "transformer_engine", "attn"),
    "megatron-router": _megatron("alltoall", "transformer_engine", MEGATRON_SCOPES),
    "megatron-allgather": _megatron("allgather"),
    "megatron-allgather-router": _megatron("allgather", "transformer_engine", MEGATRON_SCOPES),
    "megablocks-grouped": Entry("MegaBlocks, grouped", "megablocks_peer"),
    "te": _te(),
    "te-graphs": _te(graphs=True),
    "te-fp8-delayed": _te("delayed"),
    "te-fp8-current": _te("current"),
    "te-fp8-current-graphs": _te("current", graphs=True),
    "te-fp8-block": _te("block"),
    "torchtitan": Entry("as torchtitan, eager", "plain", runs_on_cpu=True),
    "torchtitan-compile": Entry("as torchtitan, torch.compile", "plain", dict(compiled=True)),
    "sonicmoe": _block("SonicMoE"),
    "scattermoe": _block("ScatterMoE"),
    "unsloth": _block("Unsloth"),
    "liger": Entry("transformers, Liger-Kernel", "huggingface_peer", {"liger": True}),
    "huggingface": Entry("transformers, grouped_mm", "huggingface_peer", runs_on_cpu=True),
}
