"""Layouts over ranks: refusals, and sharded training that equals that of one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import checkpoint

from distributed import run_distributed
from fake_ranks import as_rank, lay_out
from full_iterations import batches
from moe_graphs.dispatch import AllGatherDispatcher, LocalDispatcher
from moe_graphs.layers import LanguageModel
from moe_graphs.layers.moe import moe_layers
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize
from moe_graphs.parallel.expert_shards import shard_experts
from moe_graphs.parallel.mesh import data_mesh
from moe_graphs.training.grad_norm import clip_grad_norm, total_norm
from parallel_runs import laid_out, told, without_noise
from training_runs import loss_of, tiny_model

STEPS = 4


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"dp_shard": 0}, "dp_shard: got 0, must be a whole number from 1 on"),
        ({"dp_replicate": 1.5}, "dp_replicate: got 1.5"),
        ({"dp_shard": 2, "layers_per_group": 0}, "layers_per_group: got 0, must be a whole"),
        ({"tp": 2, "layers_per_group": 2}, r"layers_per_group \(2\): of FSDP2, which shards noth"),
        ({"dp_shard": 4, "ep": 3}, r"ep \(3\) must divide dp_shard \(4\)"),
        ({"cp": 2, "ep": 4}, r"ep \(4\) must divide dp_shard \(1\) \* cp \(2\)"),
        ({"pp": 0}, "pp: got 0, must be a whole number from 1 on"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**degrees)


@pytest.mark.parametrize(
    ("degrees", "kept"),
    [
        ({"dp_shard": 2}, False),
        ({"dp_shard": 2, "ep": 2}, False),
        ({"dp_shard": 2, "reshard_after_forward": False}, True),
        ({"tp": 2}, True),
    ],
)
def test_codes_of_weights_that_fsdp_frees_are_not_kept(degrees, kept):
    """Unsharded codes would lie there until the backward."""
    with as_rank(0, 2):
        model = tiny_model("meta", "moe", precision="fp8")
        lay_out(model, ParallelConfig(**degrees), "cpu")
    assert [layer.experts.keeps_codes for layer in moe_layers(model)] == [kept] * 2


def test_the_world_does_not_count_ep():
    config = ParallelConfig(dp_replicate=2, dp_shard=8, ep=4)
    assert (config.world_size, config.data_parallel, config.with_tokens) == (16, 16, 16)
    shared = ParallelConfig(dp_replicate=2, dp_shard=2, cp=4, ep=8)
    assert (shared.world_size, shared.data_parallel, shared.with_tokens) == (16, 4, 16)
    together = ParallelConfig(dp_shard=2, tp=2, cp=2, pp=2, ep=4)
    found = (together.world_size, together.data_parallel, together.with_tokens)
    assert found == (16, 2, 4)
    with pytest.raises(ValueError, match="needs 16 ranks and there is no process group"):
        make_mesh(config, "cpu")


def test_a_layer_that_has_only_some_experts_is_not_sharded_again():
    layer = tiny_model("cpu", "moe", count=1).layers[0].moe
    before = [weight.clone() for weight in layer.experts.stacked_weights()]
    assert shard_experts(layer, LocalDispatcher()) is layer
    for old, new in zip(before, layer.experts.stacked_weights(), strict=True):
        assert torch.equal(old, new)
    layer.experts.local_experts = range(2)
    with pytest.raises(ValueError, match="build it with all of them"):
        shard_experts(layer, LocalDispatcher())


def train(
    rank: int, world_size: int, layout: dict | None, device: str = "cpu"
) -> tuple[list[float], dict]:
    """Train by SGD, in which a small difference stays small.

    Without a ``layout`` one process trains on the batches of all ranks; with one, each rank trains
    on its own.
    """
    if layout is None:
        model = tiny_model(device, "mixed", dropout=0.0, count=2, dtype=torch.float32)
        without_noise(model)
    else:
        options = {"dropout": 0.0, "count": 2, "layers": "mixed", "dtype": torch.float32}
        model, _ = laid_out(device, ParallelConfig(**layout), **options)
    ranks = range(world_size) if layout is None else [rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for every in zip(*(batches(device, STEPS, 2, seed=10 + each) for each in ranks), strict=True):
        for batch in every:
            for tokens in batch["tokens"]:
                with torch.autocast(device, enabled=device == "cuda", cache_enabled=False):
                    loss = loss_of(model, tokens)[0]
                (loss * batch["scale"] / len(ranks)).backward()
        norms.append(clip_grad_norm(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    named = model.named_parameters()
    return norms, {n: p.full_tensor() if layout else p.detach() for n, p in named}


def compare_with_one_process(
    rank: int, world_size: int, layouts: list[dict], device: str = "cpu"
) -> list[tuple]:
    expected_norms, expected = train(rank, world_size, None, device)
    found = []
    for layout in layouts:
        norms, parameters = train(rank, world_size, layout, device)
        assert parameters.keys() == expected.keys()
        furthest = max((parameters[n] - expected[n]).abs().max().item() for n in expected)
        differences = zip(norms, expected_norms, strict=True)
        found.append((max(abs(a - b) for a, b in differences), furthest))
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        [{"dp_shard": 2}, {"dp_replicate": 2}, {"dp_shard": 2, "ep": 2}],
        pytest.param(
            [{"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}],
            marks=pytest.mark.long,
        ),
    ],
    ids=["two ranks", "four ranks"],
)
def test_training_is_that_of_one_process_on_the_whole_batch(layouts):
    """Gradients, also those of experts, are those of the mean over all ranks.

    The aux loss is the mean of the ranks' own, like one process's mean over microbatches.
    """
    ranks = ParallelConfig(**layouts[0]).world_size
    for found in run_distributed(compare_with_one_process, ranks, arguments=(layouts,)):
        for norm, parameter in found:
            assert norm < 1e-5
            assert parameter < 1e-5


def misuse(rank: int, world_size: int) -> dict[str, str]:
    two = ParallelConfig(dp_shard=2)
    mesh = make_mesh(two, "cpu")
    model = tiny_model("cpu", "moe", count=1)
    whole_model = tiny_model("cpu", "moe", count=1)
    dense = tiny_model("cpu", "dense", count=1)
    of_experts = ParallelConfig(dp_shard=2, ep=2)
    found = {
        "ranks": told(lambda: make_mesh(ParallelConfig(dp_shard=4), "cpu")),
        "mesh": told(lambda: parallelize(model, ParallelConfig(dp_replicate=2), mesh)),
        "options": told(lambda: parallelize(model, two, mesh, capacity_factor=1.0)),
        "experts": told(lambda: parallelize(dense, of_experts, mesh)),
        "data": str((data_mesh(mesh).get_local_rank(), data_mesh(mesh).size())),
    }
    layer = shard_experts(model.layers[0].moe, AllGatherDispatcher())
    found["local"] = str((layer.experts.local_experts, layer.experts.w1.shape[0]))
    found["parameters"] = str(model.num_parameters() - whole_model.num_parameters())
    sharded, _ = laid_out("cpu", of_experts)
    found["sharded parameters"] = str(sharded.num_parameters() - model.num_parameters())
    loss_of(sharded, next(batches("cpu", 1))["tokens"][0])[0].backward()
    gradients = [p.grad for p in sharded.parameters()]
    whole = torch.cat([gradient.full_tensor().flatten() for gradient in gradients])
    found["norm"] = str(abs(total_norm(gradients) - whole.norm()).item() < 1e-6)
    return found


def test_misuse_is_told_on_every_rank():
    for rank, found in enumerate(run_distributed(misuse, 2)):
        assert "needs 4 ranks and there are 2 ranks" in found["ranks"]
        assert "use make_mesh" in found["mesh"]
        assert found["options"].startswith("capacity_factor: options of a dispatcher")
        assert "a model that has no experts" in found["experts"]
        assert found["data"] == f"({rank}, 2)"
        assert found["local"] == f"(range({2 * rank}, {2 * rank + 2}), 2)"
        assert (found["parameters"], found["sharded parameters"]) == ("0", "0")
        assert found["norm"] == "True"


def save_and_load(rank: int, world_size: int, folder: str) -> tuple[bool, bool, float]:
    """Save weights of one layout, and load them in another one built on the meta device."""
    split = ParallelConfig(dp_shard=2, ep=2)
    model, _ = laid_out("cpu", split, layers="mixed", count=2)
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_()
    model.layers[1].moe.router.expert_bias.fill_(3.0)
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    whole = ParallelConfig(dp_shard=2)
    other = LanguageModel(model.config, device="meta")
    same_keys = list(other.state_dict()) == list(model.state_dict())
    parallelize(other, whole, make_mesh(whole, "cpu")).to_empty(device="cpu")
    other.reset_buffers()
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    same = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
    return same_keys, same, other.layers[1].moe.router.expert_bias.mean().item()


def test_checkpoints_are_those_of_the_whole_model(tmp_path):
    found = run_distributed(save_and_load, 2, arguments=(str(tmp_path / "step"),))
    assert found == [(True, True, 3.0)] * 2
