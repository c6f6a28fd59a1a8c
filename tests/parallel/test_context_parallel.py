"""Context parallelism: sequences on several ranks are those of one process, also in graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_graphs
from distributed import RANKS, run_distributed
from full_iterations import batches, optimizer_of
from moe_graphs import GraphConfig
from moe_graphs.layers import HeadExchange, LanguageModel, MoELayer
from moe_graphs.layers.model_config import LatentAttentionConfig
from moe_graphs.layers.router import rule_of
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize
from moe_graphs.parallel.context_parallel import (
    apply_context_parallel,
    part_of_sequences,
    whole_sequences,
)
from moe_graphs.training.grad_norm import clip_grad_norm
from parallel_runs import compare, own_part, told
from training_runs import Trace, loss_of, microbatches, tiny_model

STEPS = 3
OF_TWO = [
    {"cp": 2},
    {"cp": 2, "ep": 2},
    {"cp": 2, "kind": "latent"},
    {"cp": 2, "kind": "full norm"},
]
OF_FOUR = [
    {"dp_replicate": 2, "cp": 2},
    {"dp_shard": 2, "cp": 2, "ep": 2},
    {"cp": 4},  # more ranks than the two kv heads
]
GRAPHED = [{"cp": 2, "mixed": True}, {"cp": 2, "ep": 2, "reshard_after_forward": False}]


def model_of(kind: str, device: str) -> LanguageModel:
    """Build a model without noise and without aux losses, which differ between ranks' tokens."""
    given = tiny_model("meta", "dense" if kind == "dense" else "mixed", dropout=0.0)
    config = given.config
    if kind == "latent":
        latent = LatentAttentionConfig(
            query_rank=12, kv_rank=16, plain_head_dim=8, rope_head_dim=4, value_head_dim=6
        )
        config = replace(config, latent=latent, num_kv_heads=None, qk_norm="none", head_dim=None)
    elif kind == "full norm":
        config = replace(config, qk_norm="full")
    torch.manual_seed(0)
    model = LanguageModel(config, device=device, dtype=torch.float32)
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            router = layer.router
            router.config = replace(router.config, input_jitter=0.0, aux_loss_coef=0.0)
            router.rule = rule_of(router.config)
    return model


def train(device: str, kind: str, rank: int, layout: ParallelConfig | None, ranks: int) -> dict:
    """Train by SGD, in which a small difference stays small.

    Without a ``layout`` one process trains on the batches of ``ranks`` data-parallel ranks. With
    one, a rank trains on its part of its own batch.

    Returns:
        Losses of all tokens, gradients before clipping in every step, and the final parameters.
    """
    model, mine = model_of(kind, device), range(ranks)
    if layout is not None:
        mesh = make_mesh(layout, device)
        options = {"dispatcher": "all_gather"} if layout.ep > 1 else {}
        parallelize(model, layout, mesh, **options)
        mine = [rank // layout.cp]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = {"losses": []}
    given = [batches(device, STEPS, 2, seed=10 + each) for each in mine]
    for step, every in enumerate(zip(*given, strict=True)):
        total = torch.zeros((), device=device)
        for batch in every:
            for tokens in own_part(model, batch)["tokens"]:
                loss = loss_of(model, tokens)[0]
                (loss * batch["scale"] / len(mine)).backward()
                total += loss.detach() * batch["scale"] / len(mine)
        if layout is not None:
            dist.all_reduce(total)
            total /= layout.world_size
        found["losses"].append(total.item())
        for name, p in model.named_parameters():
            found[f"gradient {step} {name}"] = whole(p.grad)
        found[f"norm {step}"] = clip_grad_norm(model.parameters(), 0.5)
        assert found[f"norm {step}"] > 0.5
        optimizer.step()
        optimizer.zero_grad()
    found |= {name: whole(p.detach()) for name, p in model.named_parameters()}
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def compare_with_one_process(
    rank: int, world_size: int, layouts: list[dict], device: str = "cpu"
) -> list[dict[str, float]]:
    """Largest differences of losses, norms, gradients and parameters, relative to the largest."""
    found = []
    for given in layouts:
        degrees = dict(given)
        kind = degrees.pop("kind", "plain")
        layout = ParallelConfig(**degrees)
        expected = train(device, kind, rank, None, layout.data_parallel)
        seen = train(device, kind, rank, layout, layout.data_parallel)
        losses = zip(seen.pop("losses"), expected.pop("losses"), strict=True)
        furthest = {"loss": max(abs(a - b) for a, b in losses)}
        assert seen.keys() == expected.keys()
        for name, value in expected.items():
            far = (seen[name] - value).abs().max() / value.abs().max()
            furthest[name] = far.item()
        found.append(furthest)
    return found


@pytest.mark.parametrize("layouts", [OF_TWO, OF_FOUR], ids=["two ranks", "four ranks"])
@pytest.mark.long
def test_training_is_that_of_one_process_on_whole_sequences(layouts):
    ranks = ParallelConfig(**{k: v for k, v in layouts[0].items() if k != "kind"}).world_size
    for found in run_distributed(compare_with_one_process, ranks, arguments=(layouts,)):
        for furthest in found:
            assert not {name: far for name, far in furthest.items() if not far < 5e-6}


@pytest.mark.long
def test_graphed_is_eager():
    first, second = run_distributed(compare, 2, arguments=("cpu", GRAPHED, 6))
    assert first == second  # both ranks know the whole norm
    assert all(0 < norm < 10 for norms in first for norm in norms)


def train_in_scopes(rank: int, device: str, scopes: str | None, changed: int) -> tuple[Trace, dict]:
    """Train an unsharded model in scopes; from step ``changed`` on rank 1 has another model."""
    model = tiny_model(device, "mixed")
    apply_context_parallel(model, HeadExchange.over(dist.group.WORLD))
    config = GraphConfig(scopes, warmup_steps=2) if scopes else GraphConfig(impl="none")
    graphs, optimizer = moe_graphs.graph(model, config), optimizer_of(model, device)
    trace = Trace()
    torch.manual_seed(rank)
    for index, every in enumerate(microbatches(device, changed + 2)):
        if index == changed and rank == 1:
            model.layers[0].attention.norm_eps *= 10
        with graphs.step():
            for tokens in own_part(model, {"tokens": every})["tokens"]:
                loss = loss_of(model, tokens)[0]
                loss.backward()
                trace.note(f"loss {index}", loss)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        trace.note(f"norm {index}", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias(dist.group.WORLD)
        trace.note_state(model, f"step {index}")
    report = graphs.report()
    graphs.release()
    return trace, report


def compare_scopes(rank: int, world_size: int, device: str, lists: list[str]) -> list[dict]:
    expected, _ = train_in_scopes(rank, device, None, 5)
    found = []
    for scopes in lists:
        trace, report = train_in_scopes(rank, device, scopes, 5)
        trace.assert_equal(expected)
        found.append(dict(report.eager_calls))
        assert report.replayed > report.captured, report
    return found


@pytest.mark.long
def test_scopes_hold_the_exchange():
    """Eager calls of rank 1 exchange data with replays of rank 0.

    Rank 1 cannot replay the first of two layers in two of the steps.
    """
    first, second = run_distributed(compare_scopes, 2, arguments=("cpu", ["attn", "full"]))
    assert first == [{"warmup": 8}] * 2
    assert second == [{"warmup": 8, "attribute": 4}] * 2


def graphed_on_gpus() -> list:
    """Layouts on GPUs; with RANKS=4 there are data-parallel ranks, too."""
    return GRAPHED if RANKS == 2 else [{"dp_shard": 2, "cp": 2, "ep": 2}, {"cp": 4}]


@pytest.mark.multigpu
def test_graphed_is_eager_on_gpus():
    """Twenty steps have two microbatches, dropout, clipping, a scaler and an expert bias."""
    arguments = ("cuda", graphed_on_gpus(), 20)
    first, *others = run_distributed(
        compare, RANKS, "nccl", arguments=arguments, timeout_seconds=300
    )
    assert all(0 < norm < 100 for norms in first for norm in norms)
    assert others == [first] * (RANKS - 1)


@pytest.mark.multigpu
def test_training_on_gpus_is_that_of_one_process():
    """The model is in fp32 and has no experts, since a last bit can change a token's experts."""
    arguments = ([{"cp": 2, "kind": "dense"}], "cuda")
    for (furthest,) in run_distributed(compare_with_one_process, 2, "nccl", arguments=arguments):
        assert not {name: far for name, far in furthest.items() if not far < 1e-4}


@pytest.mark.multigpu
def test_scopes_hold_the_exchange_on_gpus():
    arguments = ("cuda", ["attn", "full"])
    first, second = run_distributed(compare_scopes, 2, "nccl", arguments=arguments)
    assert first == [{"warmup": 8}] * 2
    assert second == [{"warmup": 8, "attribute": 4}] * 2


def misuse(rank: int, world_size: int) -> dict[str, str]:
    group = dist.group.WORLD
    model, exchange = model_of("plain", "cpu"), HeadExchange(rank, 3, group)
    found = {
        "heads": told(lambda: apply_context_parallel(model, exchange)),
        "none": told(lambda: apply_context_parallel(nn.Linear(2, 2), HeadExchange.over(group))),
        "tokens": told(lambda: part_of_sequences(torch.zeros(2, 33), group)),
        "windows": told(lambda: part_of_sequences(torch.zeros(2, 32), group, overlap=1)),
    }
    layout = ParallelConfig(cp=2)
    parallelize(model, layout, make_mesh(layout, "cpu"))
    tokens_BS = torch.arange(66).view(2, 33) % 64
    found["too long"] = told(lambda: model(tokens_BS))  # 66 tokens with the other rank's part
    with torch.no_grad():
        alone = model_of("plain", "cpu").eval()(tokens_BS[:, :31]).logits_BSV
        with whole_sequences(model.eval()):
            own = model(tokens_BS[:, :31]).logits_BSV
    found["whole"] = str(torch.equal(own, alone))
    found["scopes"] = told(lambda: moe_graphs.graph(model, GraphConfig(scopes=["attn"])))
    return found


def test_misuse_is_told_on_every_rank():
    for found in run_distributed(misuse, 2):
        assert "3 ranks cannot share 4 heads" in found["heads"]
        assert "no attention that takes an exchange" in found["none"]
        assert "2 ranks cannot share sequences of 33 tokens" in found["tokens"]
        assert "2 ranks cannot share sequences of 31 tokens" in found["windows"]
        assert "sequence length 66 is above max_sequence_length (32)" in found["too long"]
        assert found["whole"] == "True"
        assert "FullIteration" in found["scopes"]
