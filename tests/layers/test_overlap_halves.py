"""Two halves of the tokens, one travelling beside the experts of the other: the layer uncut, to
rounding, on gloo ranks and on GPUs. On the CPU a checker stands in for the two streams.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distributed import RANKS, run_distributed
from moe_graphs import side_stream
from moe_graphs.dispatch import (
    AllGatherDispatcher,
    Dispatcher,
    LocalDispatcher,
    SymmetricDispatcher,
)
from moe_graphs.layers import ActivationStack, MoEConfig, MoELayer, TransformerConfig
from moe_graphs.layers.router import Routing
from moe_graphs.parallel import ParallelConfig
from moe_graphs.parallel.tensor_parallel import check_tensor_parallel
from moe_graphs.planning import PlannedStep, plan_layout
from routed_ranks import ROUTINGS, D, E, F
from side_streams import TwoStreams

CONFIG = MoEConfig(
    num_experts=E,
    top_k=2,
    ffn_hidden_size=F,
    aux_loss_coef=0.1,
    shared_ffn_hidden_size=8,
    overlap="halves",
)
SOME = ["random", "all-at-the-first-rank", "all-at-the-last-rank"]
ON_BOTH = [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.multigpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # grouped products on CUDA are bf16


def layer_of(dispatcher: Dispatcher, device: str = "cpu", halves: bool = True) -> MoELayer:
    torch.manual_seed(0)
    config = replace(CONFIG, overlap="halves" if halves else "none")
    return MoELayer(config, D, dispatcher, device=device, dtype=DTYPES[device])


def results(layer: MoELayer, hidden: torch.Tensor, experts_TK: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients, of tokens that go to these experts."""
    router = layer.router.forward

    def routed(hidden_TD: torch.Tensor) -> Routing:
        routing = router(hidden_TD)
        weights_TK = hidden_TD[:, :1].sigmoid() * (1 + experts_TK)
        return replace(routing, weights_TK=weights_TK.float(), experts_TK=experts_TK)

    layer.router.forward = routed
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden * 1.5)
    assert not output.dropped_tokens
    loss = output.hidden.square().sum() + output.aux_loss
    leaves = [hidden, *layer.parameters()]
    return [output.hidden, *torch.autograd.grad(loss, leaves)]


def _equals_uncut(rank: int, world_size: int, device: str) -> None:
    cases = [(name, 24, SymmetricDispatcher()) for name in SOME]
    cases += [("random", 24, SymmetricDispatcher(one_barrier=True))]
    cases += [("random", 3, SymmetricDispatcher())]
    for name, tokens, dispatcher in cases:
        torch.manual_seed(10 + rank)
        hidden = torch.randn(tokens, D).to(device, DTYPES[device])
        experts_TK = ROUTINGS[name][0](tokens, world_size).to(device)
        uncut = results(layer_of(dispatcher, device, False), hidden, experts_TK)
        first, again = (results(layer_of(dispatcher, device), hidden, experts_TK) for _ in range(2))
        assert all(map(torch.equal, first, again)), name
        if device == "cpu":
            torch.testing.assert_close(first, uncut, rtol=1e-4, atol=1e-5)
        for there, here in zip(uncut, first, strict=True):
            _check_rounding(here.float(), there.float(), name)


def _check_rounding(here: torch.Tensor, there: torch.Tensor, name: str) -> None:
    """A sum of two halves has two more roundings of bf16 than the whole, 2**-9 of what is rounded
    each: 0.002 to 0.004 of the norm on the CPU. Four times that is allowed; a token that goes wrong
    is 0.2 of it. Elements may cancel, so they are not compared by themselves."""
    assert (here - there).norm() <= 2**-6 * there.norm(), name


@pytest.mark.parametrize(("backend", "device"), ON_BOTH)
def test_halves_are_the_layer_uncut(backend, device):
    run_distributed(_equals_uncut, RANKS, backend, arguments=(device,))


def _keeps_lifetimes(rank: int, world_size: int) -> None:
    torch.manual_seed(10 + rank)
    layers = [layer_of(SymmetricDispatcher(one_barrier=one)) for one in (False, True)]
    x = torch.randn(6, D, requires_grad=True)
    for layer in layers:
        layer(x)  # makes the memory
    with pytest.MonkeyPatch.context() as patch, TwoStreams(patch) as streams:
        for training in (True, False):
            with torch.set_grad_enabled(training):
                hidden = x * 2
                for layer in layers:
                    hidden = layer(hidden * 1.5).hidden
                loss = hidden.square().sum()
            if training:
                loss.backward()
            torch.ones(3)
    assert not streams.hazards, set(streams.hazards)
    assert streams.events.count("fork") == streams.events.count("join") == 2 * (2 * 4) - 4


def test_nothing_is_freed_or_read_too_early():
    run_distributed(_keeps_lifetimes, RANKS, "gloo")


def _waits_beside_experts_alone(rank: int, world_size: int) -> None:
    """The order of work in both directions."""
    layer, work = layer_of(SymmetricDispatcher()), []
    layer(torch.randn(6, D))
    forked, join = side_stream.forked, side_stream.join

    def forking(device: torch.device):
        work.append("fork")
        return forked(device)

    def joining(device: torch.device) -> None:
        work.append("join")
        join(device)

    layer.experts.register_forward_hook(lambda *_: work.append("experts"))
    layer.experts.register_full_backward_hook(lambda *_: work.append("experts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_stream, "forked", forking)
        patch.setattr(side_stream, "join", joining)
        output = layer(torch.randn(6, D, requires_grad=True)).hidden
        assert work == 2 * ["fork", "experts", "join"]
        output.sum().backward()
    assert work == 4 * ["fork", "experts", "join"]


def test_experts_run_between_fork_and_join():
    run_distributed(_waits_beside_experts_alone, RANKS, "gloo")


def _refused(rank: int, world_size: int) -> None:
    cases = [
        (AllGatherDispatcher(), 4, "has 'all_gather'"),
        (LocalDispatcher(), 4, "has 'local'"),
        (SymmetricDispatcher(rows_factor=1.5), 4, "rows_factor is 1.5"),
        (SymmetricDispatcher(), 1, "1 tokens have no two halves"),
    ]
    for dispatcher, tokens, message in cases:
        with pytest.raises(ValueError, match=f"overlap='halves': .*{message}"):
            layer_of(dispatcher)(torch.randn(tokens, D))
    layer = layer_of(SymmetricDispatcher())
    layer.use_activation_stack(ActivationStack(64, D, F))
    with pytest.raises(ValueError, match="overlap='halves': .*activation stack"):
        layer(torch.randn(4, D))
    dist.barrier()


def test_what_is_refused_on_ranks():
    run_distributed(_refused, RANKS, "gloo")


def test_what_is_refused_on_one():
    with pytest.raises(ValueError, match="overlap='halves': .*one rank"):
        layer_of(SymmetricDispatcher())(torch.randn(4, D))
    with pytest.raises(ValueError, match="overlap 'half' is unknown: choose one of none, shared"):
        replace(CONFIG, overlap="half")
    config = TransformerConfig(
        hidden_size=D, num_layers=1, num_heads=2, vocab_size=8, moe=CONFIG, max_sequence_length=8
    )
    with pytest.raises(ValueError, match="overlap='halves': what two halves hold is not planned"):
        plan_layout(config, ParallelConfig(), PlannedStep(sequences=1, sequence_length=8))
    with pytest.raises(ValueError, match="tp: overlap='halves' is not built"):
        check_tensor_parallel(config, 2)
