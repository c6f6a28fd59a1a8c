"""The page that says what runs where: GPUs and kernels, families and features, parts and facts."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import torch

from markdown_tables import code, table
from moe_graphs import registry
from moe_graphs.checkpoints.families import REQUIRED, Family
from moe_graphs.kernels.gemm.heuristics import choose_rows, choose_weights
from moe_graphs.kernels.gpu_architectures import TABLE, Architecture
from repository import ROOT

PLACE = "support.md"
HEAD = """# What runs where

This page is written from the code when the site is built: the tables of GPUs, of families and of
parts are those that the package itself reads.

## Versions

"""
GPUS = """## GPU architectures and kernels

A GPU runs the kernels of its row. A GPU that has no row and is newer than the oldest one runs the
portable kernels (`pointer`), with a warning and a count in `graphs.report().portable_launches`; an
older one is refused by name. All kernels are compiled for each row in a test; [kernels on GPU
architectures](development/architectures.md) has what they take of its shared memory.

"""
VARIANTS = """`cooperative` and `pingpong` are Gluon kernels for Hopper, `tma` and `pointer` are
plain Triton. Where a product of rows has two, the number of rows for an expert decides; where
gradients of weights have two, the dtype of the gradient does (bf16, fp32). All other kernels are
the same for every row: """
FAMILIES = """## Families of checkpoints

Directories of Hugging Face that `LanguageModel.from_pretrained` reads and `save_pretrained` writes.
Models of transformers themselves, under `accelerate_model`, are more:
[families](tutorial.md#families).

"""
PARTS = """## Parts and their facts

Parts of a model and of a run, by the name that options and configurations take. A part of your own
has the same standing ([the command](guide.md#the-command)).

"""
# Facts of a class that are a column where its registry stands, and what the column says.
FACTS: Mapping[str, Mapping[str, str]] = {
    "DISPATCHERS": {
        "between_ranks": "between ranks",
        "host_sync": "reads sizes on the host, so no graph holds it",
        "drops_tokens": "may drop tokens",
        "leaves_tail": "rows behind the experts' rows",
    },
    "OPTIMIZERS": {
        "takes_update_options": "states of another dtype, stochastic rounding, averages",
        "updates_in_backward": "updates within the backward",
        "needs_whole_columns": "refuses parts of a matrix (`tp`)",
    },
    "DEGREES": {
        "has_batches": "ranks have batches of their own",
        "has_tokens": "ranks have tokens of their own",
        "hides_documents": "refuses documents in a row",
    },
}
TITLES = {"DISPATCHERS": "dispatcher", "OPTIMIZERS": "optimizer", "DEGREES": "degree"}
NAMED = {
    "EXPERTS": "experts",
    "ATTENTIONS": "attention",
    "PROJECTIONS": "projections",
    "FP8_RECIPES": "FP8 recipes",
    "MODELS": "published models",
    "PRESETS": "presets",
}


def text() -> str:
    """Text of the page."""
    return HEAD + _versions() + GPUS + _gpus() + FAMILIES + _families() + PARTS + _parts()


def _versions() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = [["Python", code(project["requires-python"]), "always"]]
    always += [
        ["a package", code(each.split(";")[0]), "always"] for each in project["dependencies"]
    ]
    extras = project["optional-dependencies"].items()
    ours = [each for each in extras if each[0] not in ("browser", "dev", "docs")]
    some = [["packages", ", ".join(map(code, each)), code(f"[{name}]")] for name, each in ours]
    return table(["what", "versions", "extra"], always + some)


def _gpus() -> str:
    head = ["architecture", "GPUs", "kernels have run", "rows, bf16",
            "weights, bf16", "fp32", "shared memory of a block, bytes"]  # fmt: skip
    kernels = sorted(ROOT.glob("moe_graphs/kernels/*/triton_kernels.py"))
    names = ", ".join(code(file.parent.name) for file in kernels)
    return table(head, map(_gpu, TABLE.values())) + VARIANTS + names + ".\n\n"


def _gpu(gpu: Architecture) -> list[Any]:
    bf16, fp32 = torch.bfloat16, torch.float32
    rows = dict.fromkeys(choose_rows(gpu, bf16, rows, 1) for rows in (1, 1 << 20))
    weights = dict.fromkeys(choose_weights(gpu, bf16, out) for out in (bf16, fp32))
    ran = "yes" if gpu.ran else "never: compiled only"
    return [gpu.name, gpu.gpus, ran, [*rows], [*weights],
            choose_rows(gpu, fp32, 1, 1), f"{gpu.shared:,}"]  # fmt: skip


def _families() -> str:
    head = ["`model_type`", "class of transformers", "attention", "norm of queries and keys",
            "experts", "experts by groups", "window of attention",
            "fields that need this value"]  # fmt: skip
    return table(head, (_family(name, registry.FAMILIES[name]) for name in registry.FAMILIES))


def _family(name: str, family: Family) -> list[Any]:
    needed = {**REQUIRED, **family.required}
    return [
        code(name),
        code(family.architecture),
        "latent" if family.latent else "grouped query",
        family.qk_norm,
        bool(family.experts),
        family.grouped,
        family.window,
        ", ".join(code(f"{field}={value!r}") for field, value in needed.items()),
    ]


def _parts() -> str:
    text = ""
    for kind, facts in FACTS.items():
        entries = getattr(registry, kind)
        rows = [[code(name), *(getattr(entries[name], fact) for fact in facts)] for name in entries]
        text += table([TITLES[kind], *facts.values()], rows)
    rows = [[title, ", ".join(map(code, getattr(registry, kind)))] for kind, title in NAMED.items()]
    return text + table(["part", "names"], rows)
