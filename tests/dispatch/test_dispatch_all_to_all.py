"""Expert parallelism on two gloo ranks against all experts on one, by either dispatcher.

Every case runs in the same pair of processes, because starting processes takes most of the time.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distributed import run_distributed
from moe_graphs.dispatch import (
    AllToAllDispatcher,
    Dispatcher,
    LocalDispatcher,
    make_dispatcher,
)
from moe_graphs.layers import LanguageModel, MoEConfig, MoELayer, TransformerConfig
from moe_graphs.staged import Stop, resuming, run_until

CONFIG = MoEConfig(
    num_experts=6,
    top_k=2,
    ffn_hidden_size=5,
    aux_loss_coef=0.1,
    z_loss_coef=0.01,
    shared_ffn_hidden_size=3,
)
# Biases of the router's scores, which decide which experts have rows at all.
BIASES = {
    "random": [0, 0, 0, 0, 0, 0],
    "one-expert-without-rows": [0, 0, -9, 0, 0, 0],
    "first-rank-without-rows": [-9, -9, -9, 0, 0, 0],
    "last-rank-without-rows": [0, 0, 0, -9, -9, -9],
    "all-to-two-experts": [0, 9, 0, 0, 9, 0],
}
TOKENS = {"even": (12, 12), "odd": (7, 13), "a-rank-without-tokens": (0, 9)}


def _layer(dispatcher, bias: list[float], config: MoEConfig = CONFIG) -> MoELayer:
    torch.manual_seed(5)
    layer = MoELayer(replace(config, expert_bias=True), 8, dispatcher, dtype=torch.float64)
    layer.init_weights(std=0.4, out_std=0.4)
    layer.router.expert_bias.copy_(torch.tensor(bias))
    return layer


def _run_layer(layer: MoELayer, hidden):
    output = layer(hidden)
    generator = torch.Generator().manual_seed(hidden.shape[0])
    grad = torch.randn(hidden.shape, dtype=hidden.dtype, generator=generator)
    ((output.hidden * grad).sum() + output.aux_loss).backward()
    return output


def _check_layer(
    rank: int, dispatcher: Dispatcher, bias: list[float], tokens: tuple[int, ...]
) -> None:
    torch.manual_seed(100 + rank)
    hidden = torch.randn(tokens[rank], 8, dtype=torch.float64, requires_grad=True)
    config = replace(CONFIG, aux_loss_coef=0.0, z_loss_coef=0.0) if 0 in tokens else CONFIG
    parallel = _layer(dispatcher, bias, config)
    whole = _layer(LocalDispatcher(), bias, config)

    local = parallel.dispatcher.local_experts(6)
    assert torch.equal(parallel.experts.w1, whole.experts.w1[local.start : local.stop])
    reference_hidden = hidden.detach().clone().requires_grad_()
    output, reference = _run_layer(parallel, hidden), _run_layer(whole, reference_hidden)

    torch.testing.assert_close(output.hidden, reference.hidden)
    torch.testing.assert_close(output.aux_loss, reference.aux_loss)
    assert output.dropped_tokens == 0
    torch.testing.assert_close(hidden.grad, reference_hidden.grad)
    for name, parameter in whole.named_parameters():
        # A rank's experts see every rank's rows; all other modules see the rank's own tokens only.
        dist.all_reduce(parameter.grad)
        got = parallel.get_parameter(name).grad
        if name.startswith("experts."):
            want = parameter.grad[local.start : local.stop]
        else:
            dist.all_reduce(got)
            want = parameter.grad
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def _check_bias_update() -> None:
    layer = _layer(AllToAllDispatcher(), BIASES["random"])
    counts = torch.tensor([[6, 0, 0, 0, 0, 0], [0, 6, 6, 0, 0, 0]])[dist.get_rank()]
    layer.router.tokens_per_expert.copy_(counts)
    layer.router.update_expert_bias(dist.group.WORLD)
    want = torch.tensor([-1.0, -1, -1, 1, 1, 1]) * 1e-3
    torch.testing.assert_close(layer.router.expert_bias, want)


def _check_capture_boundary() -> None:
    """A forward cut at the dispatch and resumed behind it is the same forward."""
    layer = _layer(AllToAllDispatcher(), BIASES["random"])
    hidden = torch.randn(9, 8, dtype=torch.float64)
    _, boundary = run_until(Stop(capturing=True), lambda: layer(hidden))
    assert [frame.stage for frame in boundary.frames] == ["moe_experts"]
    with resuming(boundary):
        resumed = layer(hidden)
    assert torch.equal(resumed.hidden, layer(hidden).hidden)


def _check_model(rank: int, dispatcher: Dispatcher) -> None:
    config = TransformerConfig(hidden_size=16, num_layers=2, num_heads=2, vocab_size=11, moe=CONFIG)
    models = []
    for each in (dispatcher, LocalDispatcher()):
        torch.manual_seed(3)
        models.append(LanguageModel(config, each, dtype=torch.float64))
    parallel, whole = models
    torch.manual_seed(rank)
    tokens = torch.randint(11, (2, 5))
    got, want = parallel(tokens), whole(tokens)
    torch.testing.assert_close(got.logits_BSV, want.logits_BSV)
    torch.testing.assert_close(got.aux_loss, want.aux_loss)
    assert parallel.num_parameters() == whole.num_parameters()
    assert parallel.num_parameters(active=True) == whole.num_parameters(active=True)
    assert sum(p.numel() for p in parallel.parameters()) < whole.num_parameters()


def _check_indivisible(dispatcher: Dispatcher) -> None:
    with pytest.raises(ValueError, match="must be divisible by the ranks"):
        MoELayer(replace(CONFIG, num_experts=5), 8, dispatcher)


def _everything(rank: int, world_size: int) -> None:
    for name in ("all_to_all", "all_gather", "symmetric"):
        dispatcher = make_dispatcher(name)
        splits = TOKENS if name == "all_to_all" else ["even"]
        for (routing, bias), split in itertools.product(BIASES.items(), splits):
            try:
                _check_layer(rank, dispatcher, bias, TOKENS[split])
            except AssertionError as error:
                raise AssertionError(f"{name}, {routing}, {split}: {error}") from error
        _check_model(rank, dispatcher)
        _check_indivisible(dispatcher)
    _check_bias_update()
    _check_capture_boundary()


def test_two_ranks_equal_one():
    run_distributed(_everything, 2)


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the second rank's own words")
    dist.barrier()


def test_a_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"rank 1:(.|\n)*the second rank's own words"):
        run_distributed(_fail_on_one, 2)


def _hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_a_hanging_rank_is_stopped():
    with pytest.raises(TimeoutError, match=r"ranks \[.*1\] did not finish in time"):
        run_distributed(_hang_on_one, 2, timeout_seconds=3)
