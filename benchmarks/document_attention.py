"""Attention within the documents of a row: our kernel, a mask, and flash attention by lengths.

    python benchmarks/document_attention.py --out benchmarks/results/document_attention_h200.jsonl

Forward and backward in CUDA graphs, in bf16, for the heads of Qwen3-30B-A3B; contenders take turns
in random order, median of the rounds. `kernel` is what layers compute on a GPU, `mask` what they
compute elsewhere. `varlen` is torch's flash attention over a fixed number of lengths (the
capacity): the lengths are computed on the device, and those beyond the last document are 0.
`causal` sees across documents. `_mib` is the peak of an eager pass above its inputs. Gate first:
outputs and gradients of `kernel` and `varlen` differ from fp32 at most twice as much as those of
`mask`, and a replay of one graph serves other numbers of documents bit for bit as eager does.
`--op tiles` times tiles of the kernel's parts. `--tiny` runs small shapes on the CPU, where plain
torch stands in for kernels, without times: a test of this file.
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
from moe_graphs.kernels import document_attention
from moe_graphs.kernels.document_attention.reference import plain_attention

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
    short = [Case(1, 4096, documents, c) for documents, c in ((1, 64), (8, 64), (64, 256))]
    return [
        *short,
        *(Case(1, 16384, *each) for each in ((1, 64), (16, 64), (16, 1024), (200, 256))),
    ]


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


def kernel(query: Tensor, key: Tensor, value: Tensor, ids_BS: Tensor, capacity: int) -> Tensor:
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return document_attention(*heads, ids_BS).transpose(1, 2)


def mask(query: Tensor, key: Tensor, value: Tensor, ids_BS: Tensor, capacity: int) -> Tensor:
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return plain_attention(*heads, ids_BS, 0.0, None).transpose(1, 2)


def causal(query: Tensor, key: Tensor, value: Tensor, ids_BS: Tensor, capacity: int) -> Tensor:
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return plain_attention(*heads, None, 0.0, None).transpose(1, 2)


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


def by_document(query: Tensor, key: Tensor, value: Tensor, ids_BS: Tensor, capacity: int) -> Tensor:
    """Attend to one document at a time, whose heads do not share keys: no square of the row."""
    heads = query.shape[2]
    rows = [x.repeat_interleave(heads // x.shape[2], 2).flatten(0, 1) for x in (query, key, value)]
    return _by_document(rows, ends_of(ids_BS, capacity), ids_BS.shape[1]).view_as(query)


def _by_document(rows: list[Tensor], ends: Tensor, longest: int) -> Tensor:
    lengths = ends.diff().tolist()
    parts = zip(*(x[: int(ends[-1])].split(lengths) for x in rows), strict=True)
    found = [
        plain_attention(*(x.transpose(0, 1)[None] for x in part), None, 0.0, None)[0]
        for part in parts
    ]
    left = torch.zeros_like(rows[0][int(ends[-1]) :])
    return torch.cat([*(x.transpose(0, 1) for x in found), left])


CONTENDERS: dict[str, Callable[..., Tensor]] = {
    "kernel": kernel, "mask": mask, "varlen": varlen, "causal": causal
}  # fmt: skip
GATED = ("kernel", "varlen")


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
        return copy.results(by_document, capacity)


def errors(inputs: Inputs, case: Case) -> dict[str, float]:
    """Largest relative errors of output and gradients against fp32.

    Raises:
        RuntimeError: a contender is not as right as ``mask``, or ``varlen`` serves too many
            documents.
    """
    exact = inputs.exact(case.capacity)
    found = {
        name: max(map(error, inputs.results(CONTENDERS[name], case.capacity), exact))
        for name in ("mask", *GATED)
    }
    if max(found.values()) > 2 * found["mask"] + 1e-6:
        raise RuntimeError(f"{case}: errors {found}")
    too_few = case.documents * case.rows - 1
    if too_few and not varlen(*inputs.leaves, inputs.ids_BS, too_few).isnan().all():
        raise RuntimeError(f"{case}: {too_few} lengths are served silently")
    return found


def check_replays(inputs: Inputs, case: Case) -> None:
    """Check that one graph serves other numbers of documents than those of its capture."""
    kept = inputs.ids_BS.clone()
    for name in GATED:
        attend = CONTENDERS[name]
        inputs.results(attend, case.capacity)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = inputs.results(attend, case.capacity)
        for documents in (1, 2, case.capacity // case.rows):
            inputs.ids_BS.copy_(ids_of(case, documents, "cuda"))
            graph.replay()
            for one, other in zip(found, inputs.results(attend, case.capacity), strict=True):
                if not torch.equal(one, other):
                    raise RuntimeError(f"{case}, {name}: {documents} documents are not eager's")
        inputs.ids_BS.copy_(kept)


def peak_mib(step: Callable[[], object]) -> int:
    """Mebibytes that an eager pass takes at most, above what there was before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def measure(case: Case, device: str, rounds: int) -> dict:
    """One record. Raises if a contender is not right."""
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
    record |= {f"{name}_mib": peak_mib(step) for name, step in steps.items()}
    graphs = {name: capture_burst(step, CALLS) for name, step in steps.items()}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            spent[name].append(elapsed(graphs[name].replay) / CALLS * 1e3)
    record |= {f"{name}_us": round(sorted(x)[rounds // 2], 1) for name, x in spent.items()}
    for name in ("mask", "varlen"):
        record[f"ratio_{name}"] = round(record[f"{name}_us"] / record["kernel_us"], 2)
    return record


TRIED: dict[str, list[tuple[int, int, int, int]]] = {
    "FORWARD": [(128, 128, 2, 8), (128, 64, 2, 8), (128, 64, 3, 8), (64, 64, 3, 4), (64, 64, 2, 4)],
    "OF_QUERIES": [(128, 64, 2, 8), (128, 64, 3, 8), (128, 32, 3, 8), (64, 64, 2, 4)],
    "OF_KEYS": [(32, 128, 3, 8), (64, 128, 2, 8), (64, 64, 2, 4), (32, 64, 3, 4), (64, 64, 2, 8)],
}


def tiles() -> Iterator[dict]:
    """Microseconds of a forward, or of a backward, with other tiles in one of its parts."""
    from moe_graphs.kernels.document_attention import triton_kernels as parts

    for documents in (16, 1):
        inputs = Inputs(Case(1, 16384, documents, 64), "cuda")
        heads = [leaf.detach().transpose(1, 2) for leaf in inputs.leaves]
        bounds, scale = parts.document_bounds(inputs.ids_BS), heads[0].shape[3] ** -0.5
        out, sums = parts.attend_forward(*heads, bounds, scale)
        given = (inputs.gradient.transpose(1, 2), *heads, bounds, out, sums, scale)
        for name, tried in TRIED.items():
            before = getattr(parts, name)
            for tile in tried:
                setattr(parts, name, (tile,) * 4)
                run, args = parts.attend_backward, given
                if name == "FORWARD":
                    run, args = parts.attend_forward, (*heads, bounds, scale)
                run(*args)
                graph = capture_burst(lambda run=run, args=args: run(*args), CALLS)
                spent = min(elapsed(graph.replay) for _ in range(5)) / CALLS * 1e3
                yield {"documents": documents, "part": name, "tile": tile, "us": round(spent, 1)}
            setattr(parts, name, before)


def main(arguments: list[str] | None = None) -> None:
    def records(args: argparse.Namespace) -> Iterator[dict]:
        if args.op == "tiles":
            yield from tiles()
            return
        for case in cases(args.tiny):
            yield measure(case, "cpu" if args.tiny else "cuda", args.rounds)

    measure_cases("document_attention", __doc__, 21, records, arguments)


if __name__ == "__main__":
    main()
