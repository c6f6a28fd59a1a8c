"""Peak memory of LoRA with gradient checkpointing, predicted without a GPU, by part.

    python benchmarks/predicted_memory.py --rows nf4_experts_16k

The model of a row of `fine_tuning.py` runs one step on fake tensors, which have shapes and no
memory, with two layers and with four. Every part grows by as much for each further layer. Graphs,
memory that kernels use for themselves, and the workspaces of libraries are not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fine_tuning
from moe_graphs.integrations.transformers import accelerate_model, adapted_projections
from moe_graphs.integrations.transformers.packing import WEIGHTS, packing_of
from moe_graphs.kernels.availability import as_on_gpus
from moe_graphs.kernels.packed_weights import FORMATS
from moe_graphs.optim import AdamW
from moe_graphs.planning.microbatch_memory import LiveStorages, Moment, without_memory

LAYERS = 2, 4
ATTENTION = "predicted"


def predicted(case: fine_tuning.Case) -> dict[str, int]:
    """Bytes of a case by part, and their sum, the peak of a step.

    Returns:
        weights: frozen ones that are not packed, and buffers.
        packed: experts in few bits, with their scales.
        scratch: memory that experts in few bits are dequantised into.
        adapters, states: their parameters, and what AdamW keeps of them.
        kept: what the forward keeps, which is the input of every layer.
        passing: everything else at the peak: one layer's tensors, and gradients until then.
        peak: all parts together.
    """
    fewer, more = LAYERS
    a, b = (of_layers(case, layers) for layers in LAYERS)
    further = case.size.model["num_hidden_layers"] - fewer
    return {name: a[name] + (b[name] - a[name]) * further // (more - fewer) for name in a}


def of_layers(case: fine_tuning.Case, layers: int) -> dict[str, int]:
    sizes = {**case.size.model, "num_hidden_layers": layers}
    with contextlib.redirect_stdout(io.StringIO()):
        model = fine_tuning.model_of(case, torch.device("meta"), sizes)
    if case.size.attention != "eager":
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
        model.config._attn_implementation = ATTENTION
    return bytes_of(model, case, as_on_gpus())


def bytes_of(
    model: nn.Module, case: fine_tuning.Case, paths: contextlib.AbstractContextManager[None]
) -> dict[str, int]:
    """The parts of a model on the meta device, which has all of its layers."""
    _give_values(model)
    accelerate_model(model, graphs=False)
    found = held(model, case)
    with FakeTensorMode(allow_non_fake_inputs=True), _fakes_are_plain(), paths:
        without_memory(model, "cpu")
        shape = case.size.sequences, case.size.sequence
        return found | step_bytes(model, torch.zeros(shape, dtype=torch.int64), found)


def held(model: nn.Module, case: fine_tuning.Case) -> dict[str, int]:
    """Bytes that are held between two steps, by part."""
    found = dict.fromkeys(("weights", "packed", "scratch", "adapters", "states"), 0)
    packed, scratches = set(), {}
    for module in model.modules():
        packing = packing_of(module)
        if packing is not None:
            scratches[packing.scratch.number] = packing.scratch.nbytes
            ends = FORMATS[packing.format].suffixes
            packed |= {id(getattr(module, name + end)) for name in WEIGHTS for end in ends}
    for tensor in (*model.parameters(), *model.buffers()):
        is_packed = id(tensor) in packed
        part = "adapters" if tensor.requires_grad else "packed" if is_packed else "weights"
        found[part] += tensor.nbytes
    found["states"], found["scratch"] = states(model, case), sum(scratches.values())
    return found


def states(model: nn.Module, case: fine_tuning.Case) -> int:
    """Bytes that the optimizer of a case keeps of adapters, but for its counts of steps."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = fine_tuning.optimizer_of(case, model)
    if not isinstance(optimizer, AdamW):
        return 2 * sum(each.nbytes for each in trained)
    found: list[dict[str, torch.Tensor]] = [{} for _ in trained]
    for state, each in zip(found, trained, strict=True):
        optimizer.options.complete(state, torch.empty_like(each, device="meta"))
    return sum(s.nbytes for state in found for s in state.values() if s.dim())


def step_bytes(model: nn.Module, tokens: torch.Tensor, held: dict[str, int]) -> dict[str, int]:
    """Bytes that a step keeps in its forward, that pass at its peak, and the peak of everything."""
    with LiveStorages() as live:
        loss = model(input_ids=tokens, labels=tokens).loss
        kept = live.bytes
        live.begin(Moment(1, backward=True))
        loss.backward()
    most = max(live.peaks.values())
    return {"kept": kept, "passing": most - kept, "peak": sum(held.values()) + most}


def _give_values(model: nn.Module) -> None:
    """Gives values to the vectors, by which kinds of norms are told apart."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or (tensor.dim() > 1 and tensors is module._parameters):
                    continue
                made = torch.ones(tensor.shape, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                tensors[name] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made


def _attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    return _Attention.apply(q, k, v), None


class _Attention(torch.autograd.Function):
    """Attention that makes and keeps what a GPU's fused one does without a mask."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.transpose(1, 2).new_empty(q.transpose(1, 2).shape)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


@contextlib.contextmanager
def _fakes_are_plain() -> Iterator[None]:
    """LoRA on linear layers takes plain tensors, of which fake ones are a kind here."""
    with mock.patch.object(adapted_projections, "_why_own", return_value=None):
        yield


def in_gib(parts: dict[str, int]) -> dict[str, float]:
    return {name: round(size / 2**30, 2) for name, size in parts.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [row for row, size in fine_tuning.SIZES.items() if fine_tuning.is_lora(size)]
    parser.add_argument("--rows", type=lambda given: given.split(","), default=known)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    options = parser.parse_args(arguments)
    for row in options.rows:
        for contender, checkpointing in fine_tuning.SIZES[row].runs:
            if contender in fine_tuning.PREDICTED and checkpointing:
                case = fine_tuning.Case(row, contender, checkpointing, options.smoke)
                line = {"row": row, "contender": contender} | in_gib(predicted(case))
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
