"""Tensor parallelism: training is that of one process, and graphs are eager to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional

from distributed import run_distributed
from kept_bytes import kept_bytes
from moe_graphs.layers import Attention, LanguageModel, LatentAttentionConfig
from moe_graphs.parallel import ParallelConfig, make_mesh, parallelize, vocabulary_cross_entropy
from moe_graphs.parallel.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from moe_graphs.parallel.vocabulary import whole_vocabulary
from moe_graphs.planning.laid_out import as_rank
from parallel_runs import compare, told
from tensor_parallel_runs import compare_scopes, differences
from training_runs import tiny_model

BOUND = 2e-6  # in fp32; two ranks sum in another order
SCOPES = ["attn,mlp,moe_router,moe_preprocess", "attn", "attn,mlp,moe"]
TWO = ParallelConfig(tp=2)


def of_two(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"differences": differences("cpu", TWO)}
    found["kept"] = kept_by_network()
    found["norms"] = compare(rank, world_size, "cpu", [{"tp": 2}], 8)
    compare_scopes("cpu", TWO, SCOPES, 5)
    mesh = make_mesh(TWO, "cpu")
    found["losses"] = losses(mesh["tp"].get_group())
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    small = tiny_model("cpu", "dense", count=1)
    found["mixed"] = told(lambda: parallelize(small, TWO, mesh, mixed_precision=mixed))
    odd = LanguageModel(replace(small.config, num_kv_heads=1), device="meta")
    found["heads"] = told(lambda: parallelize(odd, TWO, mesh))
    return found


def kept_by_network() -> tuple[int, int]:
    """Bytes that a rank's feed-forward network keeps, and those of its input and first product."""
    model = tiny_model("cpu", "dense", count=1, dtype=torch.float32)
    apply_tensor_parallel(model, make_mesh(TWO, "cpu")["tp"])
    network, x = model.layers[0].mlp, torch.randn(4, model.config.hidden_size, requires_grad=True)
    weights = [parameter.to_local() for parameter in network.parameters()]
    columns = model.config.ffn_hidden_size  # gate and up of half of them
    expected = x.nbytes // x.shape[1] * (x.shape[1] + columns)
    return kept_bytes(lambda: network(x), weights), expected


def losses(group: dist.ProcessGroup, device: str = "cpu") -> dict[str, float]:
    """Largest relative differences of loss and gradient from torch's, for each reduction."""
    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(12, 50, generator=generator)
    targets = torch.randint(50, (12,), generator=generator)
    targets[::4] = 7  # the ignored token
    logits, targets = logits.to(device), targets.to(device)
    mine = slice(25 * dist.get_rank(group), 25 * dist.get_rank(group) + 25)
    found = {"whole": float(not torch.equal(whole_vocabulary(logits[:, mine], group), logits))}
    for reduction in ("mean", "sum", "none"):
        options = {"ignore_index": 7, "reduction": reduction}
        ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
        expected = functional.cross_entropy(theirs, targets, **options)
        loss = vocabulary_cross_entropy(ours[:, mine], targets, group, **options)
        weight = torch.linspace(1, 2, loss.numel(), device=device).view_as(loss)
        (expected * weight).sum().backward()
        (loss * weight).sum().backward()
        dist.all_reduce(ours.grad, group=group)
        pairs = ((loss, expected), (ours.grad, theirs.grad))
        found[reduction] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    logits.requires_grad_()
    targets[1] = 50
    loss = vocabulary_cross_entropy(logits[:, mine], targets, group, reduction="none")
    loss[:2].sum().backward()
    seen = [loss[1].isnan(), logits.grad[1, mine].isnan().all(), logits.grad[0].isfinite().all()]
    found["outside"] = float(not all(seen))
    return found


@pytest.mark.long
def test_two_ranks():
    first, second = run_distributed(of_two, 2)
    for found in (first, second):
        assert max(found["differences"].values()) < BOUND, found["differences"]
        assert len(found["differences"]) > 40
        assert found["kept"][0] == found["kept"][1]
        assert found["losses"].pop("whole") == found["losses"].pop("outside") == 0
        assert max(found["losses"].values()) < 1e-6
        assert found["mixed"].startswith("mixed_precision: of FSDP2")
        assert found["heads"].startswith("tp: 2 ranks cannot share num_kv_heads 1")
    assert first["norms"] == second["norms"]


def test_an_attention_of_ones_own_is_refused_and_not_replaced():
    class GatedAttention(Attention):
        """Another attention, which would become a plain one."""

    model = tiny_model("meta")
    for layer in model.layers:
        layer.attention.__class__ = GatedAttention
    with as_rank(ParallelConfig(tp=2), 0) as mesh:
        with pytest.raises(ValueError, match="tp: GatedAttention is not built for several ranks"):
            apply_tensor_parallel(model, mesh["tp"])


def of_four(rank: int, world_size: int) -> tuple[list[dict[str, float]], list]:
    layouts = [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "ep": 2, "tp": 2}]
    found = [differences("cpu", ParallelConfig(**layout)) for layout in layouts]
    layouts[0] |= {"reshard_after_forward": False}
    return found, compare(rank, world_size, "cpu", layouts, 5)


@pytest.mark.long
def test_four_ranks_with_fsdp():
    first, *others = run_distributed(of_four, 4)
    for found, norms in (first, *others):
        assert norms == first[1]
        for layout in found:
            assert max(layout.values()) < BOUND, layout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}, "share num_heads 6"),
        ({"num_kv_heads": 2}, "share num_kv_heads 2"),
        ({"vocab_size": 70}, "share vocab_size 70"),
        ({"ffn_hidden_size": 30}, "share ffn_hidden_size 30"),
        ({"moe": {"shared_ffn_hidden_size": 18}}, "share shared_ffn_hidden_size 18"),
        ({"qk_norm": "full"}, "qk_norm='full', a norm over all heads together, is not built"),
        ({"linear": "transformer_engine"}, "linear='transformer_engine' is not built"),
        ({"precision": ("fp8", "weights")}, "of projections is not built"),
        (
            {
                "num_kv_heads": None,
                "qk_norm": "none",
                "latent": LatentAttentionConfig(
                    query_rank=None, kv_rank=8, plain_head_dim=8, rope_head_dim=8, value_head_dim=8
                ),
            },
            "latent attention is not built",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_models_that_cannot_be_shared_are_refused_by_name(changes, words):
    config = replace(tiny_model("meta").config, num_kv_heads=4)
    check_tensor_parallel(config, 4)
    if "moe" in changes:
        changes = {"moe": replace(config.moe, **changes["moe"])}
    config = replace(config, **changes)
    check_tensor_parallel(config, 1)
    with pytest.raises(ValueError, match=f"tp: .*{words}"):
        check_tensor_parallel(config, 4)
