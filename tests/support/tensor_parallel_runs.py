"""Training with shared tensors, on several ranks and on one process, to be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe_graphs
from full_iterations import batches
from moe_graphs.layers import HeadExchange, LanguageModel
from moe_graphs.optim import AdamW
from moe_graphs.parallel import ParallelConfig, make_mesh
from moe_graphs.parallel.context_parallel import apply_context_parallel
from moe_graphs.parallel.tensor_parallel import apply_tensor_parallel, fused_rows, global_fqn
from moe_graphs.parallel.whole_rows import runs_of
from moe_graphs.training.grad_norm import clip_grad_norm, local_part
from parallel_runs import (
    laid_out,
    local_state,
    loss_on,
    own_part,
    routed_by_parts,
    without_noise,
)
from training_runs import Trace, tiny_model

PLAIN: dict[str, Any] = {"count": 2, "dropout": 0.0, "dtype": torch.float32}


def whole(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors, as one process has them; ``tensors`` have the names of the parameters."""
    parts, found = fused_rows(model), {}
    for name, tensor in ((global_fqn(name), tensor) for name, tensor in tensors):
        if not hasattr(tensor, "full_tensor"):
            found[name] = tensor.detach().cpu()
        elif name not in parts:
            found[name] = tensor.detach().full_tensor().cpu()
        else:
            runs = [(run.first, run.rows.cpu()) for run in runs_of(tensor.detach(), parts[name])]
            for group in tensor.device_mesh.get_all_groups():
                every: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(every, runs, group=group)
                runs = [run for of_rank in every for run in of_rank]
            found[name] = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
            for first, rows in runs:
                found[name][first : first + len(rows)] = rows
    return found


def train(
    model: LanguageModel,
    device: str,
    parts: Sequence[int],
    steps: int,
    clip: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train by SGD, in which a small difference stays small.

    Args:
        parts: numbers of the parts of the data that this process takes.
        group: ranks with tokens of their own.

    Returns:
        Norms, the first gradients, and the last parameters with the biases of experts.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    norms, gradients = [], {}
    streams = [batches(device, steps, 2, seed=10 + part) for part in parts]
    for every in zip(*streams, strict=True):
        for batch in every:
            for tokens in own_part(model, batch)["tokens"]:
                loss = loss_on(model, tokens)
                (loss * batch["scale"] / len(parts)).backward()
        if not norms:
            named = ((name, p.grad) for name, p in model.named_parameters())
            gradients = whole(model, ((n, g) for n, g in named if g is not None))
            gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        norms.append(clip_grad_norm(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias(group)
    return norms, gradients, whole(model, model.state_dict().items())


def differences(device: str, config: ParallelConfig, layers: str = "mixed") -> dict[str, float]:
    """Largest differences from one process on the whole batch, relative to the largest number.

    The model is in fp32, which on a GPU is possible for "dense" layers only.
    """
    alone = tiny_model(device, layers, **PLAIN)
    without_noise(alone)
    routed_by_parts(alone, config.cp, rows=2)
    shared, with_tokens = laid_out(device, config, layers=layers, **PLAIN)
    expected = train(alone, device, range(config.data_parallel), 3, 0.5)
    part = [with_tokens.get_local_rank() // config.cp]
    found = train(shared, device, part, 3, 0.5, with_tokens.get_group())
    assert [global_fqn(n) for n, _ in shared.named_parameters()] == [
        n for n, _ in alone.named_parameters()
    ]
    check_alike(shared)
    told = {"norm": max(abs(a / b - 1) for a, b in zip(found[0], expected[0], strict=True))}
    for kind, ours, theirs in zip(("gradient", "parameter"), found[1:], expected[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            largest = value.abs().max().item()
            told[f"{kind} {name}"] = (ours[name] - value).abs().max().item() / max(largest, 1e-6)
    return told


def check_alike(model: nn.Module) -> None:
    """Check that replicated tensors and random numbers are equal to the bit on all ranks."""
    mesh = next(p.device_mesh for p in model.parameters() if "tp" in names_of(p))
    group = mesh["tp"].get_group() if mesh.ndim > 1 else mesh.get_group()
    held = {n: local_part(p).cpu() for n, p in model.named_parameters() if "tp" not in names_of(p)}
    held |= {name: buffer.cpu() for name, buffer in model.named_buffers()}
    device = next(model.parameters()).device
    held["random number"] = torch.rand(1, device=device).cpu()
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, held, group=group)
    for other in every:
        assert all(torch.equal(value, other[name]) for name, value in held.items())


def names_of(parameter: Tensor) -> tuple[str, ...]:
    mesh = getattr(parameter, "device_mesh", None)
    return () if mesh is None else mesh.mesh_dim_names


def at_their_addresses(device: str, config: ParallelConfig) -> LanguageModel:
    """Lay out a model without FSDP2; ranks of ``cp`` have to sum gradients themselves."""
    if config.cp == 1:
        return laid_out(device, config, layers="mixed", count=2)[0]
    mesh, model = make_mesh(config, device), tiny_model(device, "mixed", count=2)
    apply_tensor_parallel(model, mesh["tp"])
    apply_context_parallel(model, HeadExchange.over(mesh["cp"].get_group()))
    return model


def scopes_trace(device: str, config: ParallelConfig, scopes: str | None, steps: int) -> Trace:
    """Train scopes with two microbatches, dropout, clipping and an expert bias."""
    model = at_their_addresses(device, config)
    exchange = model.layers[0].attention.exchange
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2, device=device))
    choice = {"impl": "none"} if scopes is None else {"scopes": scopes}
    graphs = moe_graphs.graph(model, moe_graphs.GraphConfig(**choice))
    torch.manual_seed(3)
    trace = Trace()
    for index, batch in enumerate(batches(device, steps, 2, seed=5)):
        with graphs.step():
            for tokens in own_part(model, batch)["tokens"]:
                loss = loss_on(model, tokens)
                (loss * batch["scale"]).backward()
                trace.note(f"step {index} loss", loss)
        for name, parameter in model.named_parameters():
            if exchange is not None:
                dist.all_reduce(local_part(parameter.grad), group=exchange.group)
            trace.note(f"step {index} grad {name}", local_part(parameter.grad))
        trace.note(f"step {index} norm", clip_grad_norm(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias(None if exchange is None else exchange.group)
    for name, tensor in local_state(model):
        trace.note(name, tensor)
    trace.note("random number", torch.rand(1, device=device))
    check_alike(model)
    if scopes is not None:
        report = graphs.report()
        assert report.state == "captured", report
        assert set(report.eager_calls) == {"warmup"}, report
        assert all(scope.refused is None for scope in report.scopes), report
        assert all(scope.matched == 2 * (steps - 3) for scope in report.scopes), report
    graphs.release()
    return trace


def compare_scopes(device: str, config: ParallelConfig, choices: Iterable[str], steps: int) -> None:
    expected = scopes_trace(device, config, None, steps)
    for scopes in choices:
        scopes_trace(device, config, scopes, steps).assert_equal(expected)
