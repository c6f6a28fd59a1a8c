"""Attention within the documents of a row: torch's with a mask, and flash attention by lengths.

    python benchmarks/document_attention.py --out benchmarks/results/document_attention_h200.jsonl

Forward and backward in CUDA graphs, in bf16, for the heads of Qwen3-30B-A3B; contenders take turns
in random order, median of the rounds. `mask` is what layers compute today. `varlen` is torch's
flash attention over a fixed number of lengths (the capacity): the lengths are computed on the
device, and those beyond the last document are 0. `causal` sees across documents: what the mask
costs. Gate first: outputs and gradients of `varlen` differ from fp32 at most twice as much as those
of `mask`, for numbers of documents up to the capacity, and a replay of one graph serves them all.
`--tiny` runs small shapes on the CPU, where a loop over documents stands in for flash attention,
without times: a test of this file.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measured_cases import measure_cases
from moe_graphs.bench.timing import capture_burst, elapsed, error
from moe_graphs.layers.documents import causal_attention

CALLS = 5


@dataclass(frozen=True)
class Case:
    """Rows of equal documents; ``capacity`` is the most documents of all rows together."""

    rows: int
    length: int
    documents: int
    capacity: int
    heads: tuple[int, int, int] = (32, 4, 128)  # of queries, of keys and values, their size


def cases(tiny: bool) -> list[Case]:
    if tiny:
        return [Case(2, 16, documents, 8, (4, 2, 8)) for documents in (1, 3)]
    short = [Case(1, 4096, documents, c) for documents in (1, 8, 64) for c in (64, 256)]
    return [*short, Case(1, 16384, 16, 64), Case(1, 16384, 16, 1024)]


def ids_of(case: Case, documents: int, device: str) -> Tensor:
    """Numbers of equal documents, the last one longer: int64 ``[B, S]``."""
    place_S = torch.arange(case.length, device=device)
    return (place_S * documents // case.length).expand(case.rows, -1).contiguous()


def ends_of(document_ids_BS: Tensor, capacity: int) -> Tensor:
    """Find the begins of the documents in all rows together, and the end: int32 ``[capacity + 1]``.

    Computed on the device. With more documents than ``capacity`` the last entry is not the end.
    """
    begins_BS = torch.ones_like(document_ids_BS)
    begins_BS[:, 1:] = document_ids_BS.diff(dim=1) != 0
    number_T = begins_BS.flatten().cumsum(0) - 1
    wanted = torch.arange(capacity + 1, device=number_T.device)
    return torch.searchsorted(number_T, wanted, out_int32=True)


def mask(query: Tensor, key: Tensor, value: Tensor, ids_BS: Tensor, capacity: int) -> Tensor:
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return causal_attention(*heads, ids_BS).transpose(1, 2)


def causal(query: Tensor, key: Tensor, value: Tensor, ids_BS: Tensor, capacity: int) -> Tensor:
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return causal_attention(*heads).transpose(1, 2)


def varlen(query: Tensor, key: Tensor, value: Tensor, ids_BS: Tensor, capacity: int) -> Tensor:
    """Call flash attention over documents; NaN where there are more than ``capacity``."""
    rows = [x.flatten(0, 1) for x in (query, key, value)]
    ends = ends_of(ids_BS, capacity)
    attend = _flash if query.is_cuda else _by_document
    fits = torch.where(ends[-1] == len(rows[0]), 1.0, float("nan")).to(query.dtype)
    return attend(rows, ends, ids_BS.shape[1]).view_as(query) * fits


def _flash(rows: list[Tensor], ends: Tensor, longest: int) -> Tensor:
    # The operator behind torch.nn.attention.varlen, whose arguments differ between versions.
    forward = torch.ops.aten._flash_attention_forward
    return forward(*rows, ends, ends, longest, longest, 0.0, True, False)[0]


def _by_document(rows: list[Tensor], ends: Tensor, longest: int) -> Tensor:
    lengths = ends.diff().tolist()
    parts = zip(*(x[: int(ends[-1])].split(lengths) for x in rows), strict=True)
    found = [causal_attention(*(x.transpose(0, 1)[None] for x in part))[0] for part in parts]
    left = torch.zeros_like(rows[0][int(ends[-1]) :])
    return torch.cat([*(x.transpose(0, 1) for x in found), left])


CONTENDERS: dict[str, Callable[..., Tensor]] = {"mask": mask, "varlen": varlen, "causal": causal}


class Inputs:
    """Queries, keys and values ``[B, S, heads, size]``, and a gradient of the output."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        queries, others, size = case.heads
        shapes = [(case.rows, case.length, heads, size) for heads in (queries, others, others)]
        self.leaves = [
            torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes
        ]
        self.gradient = torch.randn(shapes[0], device=device).to(dtype)
        self.ids_BS = ids_of(case, case.documents, device)

    def results(self, attend: Callable[..., Tensor], capacity: int) -> list[Tensor]:
        """The output and the gradients of queries, keys and values."""
        output = attend(*self.leaves, self.ids_BS, capacity)
        return [output.detach(), *torch.autograd.grad(output, self.leaves, self.gradient)]

    def exact(self, capacity: int) -> list[Tensor]:
        copy = object.__new__(Inputs)
        copy.leaves = [leaf.detach().float().requires_grad_() for leaf in self.leaves]
        copy.gradient, copy.ids_BS = self.gradient.float(), self.ids_BS
        return copy.results(mask, capacity)


def errors(inputs: Inputs, case: Case) -> dict[str, float]:
    """Largest relative errors of output and gradients against fp32.

    Raises:
        RuntimeError: ``varlen`` is not as right as ``mask``, or serves too many documents.
    """
    exact = inputs.exact(case.capacity)
    found = {
        name: max(map(error, inputs.results(CONTENDERS[name], case.capacity), exact))
        for name in ("mask", "varlen")
    }
    if found["varlen"] > 2 * found["mask"] + 1e-6:
        raise RuntimeError(f"{case}: errors {found}")
    too_few = case.documents * case.rows - 1
    if too_few and not varlen(*inputs.leaves, inputs.ids_BS, too_few).isnan().all():
        raise RuntimeError(f"{case}: {too_few} lengths are served silently")
    return found


def check_replays(inputs: Inputs, case: Case) -> None:
    """Check that one graph serves other numbers of documents than those of its capture."""
    inputs.results(varlen, case.capacity)
    graph, kept = torch.cuda.CUDAGraph(), inputs.ids_BS.clone()
    with torch.cuda.graph(graph):
        found = inputs.results(varlen, case.capacity)
    for documents in (1, 2, case.capacity // case.rows):
        inputs.ids_BS.copy_(ids_of(case, documents, "cuda"))
        graph.replay()
        for one, other in zip(found, inputs.results(varlen, case.capacity), strict=True):
            if not torch.equal(one, other):
                raise RuntimeError(f"{case}: a replay with {documents} documents is not eager")
    inputs.ids_BS.copy_(kept)


def measure(case: Case, device: str, rounds: int) -> dict:
    """One record. Raises if ``varlen`` is not right."""
    inputs = Inputs(case, device)
    record = {
        "rows": case.rows,
        "length": case.length,
        "documents": case.documents,
        "capacity": case.capacity,
    }
    record |= {f"{name}_error": found for name, found in errors(inputs, case).items()}
    if device == "cpu":
        return record
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # the backward of flash attention adds with atomics
    check_replays(inputs, case)
    torch.use_deterministic_algorithms(before)
    steps = {
        name: lambda attend=attend: inputs.results(attend, case.capacity)
        for name, attend in CONTENDERS.items()
    }
    for step in steps.values():
        step()
    graphs = {name: capture_burst(step, CALLS) for name, step in steps.items()}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            spent[name].append(elapsed(graphs[name].replay) / CALLS * 1e3)
    record |= {f"{name}_us": round(sorted(x)[rounds // 2], 1) for name, x in spent.items()}
    record["ratio"] = round(record["mask_us"] / record["varlen_us"], 2)
    return record


def main(arguments: list[str] | None = None) -> None:
    def records(args: argparse.Namespace) -> Iterator[dict]:
        for case in cases(args.tiny):
            yield measure(case, "cpu" if args.tiny else "cuda", args.rounds)

    measure_cases("document_attention", __doc__, 21, records, arguments)


if __name__ == "__main__":
    main()
