"""Weights of models that were sharded on the meta device are shards of one process's weights.

Nothing is sent, so this process plays every rank of a layout in a fake process group.
``tests/lm/test_several_ranks.py``, where ranks train as one process does, shows that the shards are
in their places.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fake_ranks import as_rank, lay_out
from moe_graphs.layers import Attention, LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.layers.model_config import LatentAttentionConfig
from moe_graphs.parallel import ParallelConfig
from moe_graphs.parallel.own_part import shares
from moe_graphs.parallel.sharded_init import init_weights_sharded
from moe_graphs.parallel.tensor_parallel import fused_rows, global_fqn
from own_parts import OwnAttention, gated_preset
from training_runs import DEVICES, tiny_model

LAYOUTS = {
    "shard": ParallelConfig(dp_shard=8),
    "replicated": ParallelConfig(dp_replicate=2, dp_shard=2),
    "experts": ParallelConfig(dp_replicate=2, dp_shard=2, ep=2),
    "experts, some ranks with none": ParallelConfig(dp_shard=8, ep=2),
    "sequences": ParallelConfig(dp_shard=2, cp=2, ep=4),
    "tensors": ParallelConfig(tp=2),
    "tensors, sharded": ParallelConfig(dp_shard=4, tp=2, ep=2),
    "stages": ParallelConfig(pp=2),
    "stages, sharded": ParallelConfig(pp=2, dp_shard=2, ep=2),
}
SEED, STD = 7, 0.05


def config_of(kind: str) -> TransformerConfig:
    if kind == "grouped":
        return tiny_model("meta").config
    latent = LatentAttentionConfig(
        query_rank=8, kv_rank=8, plain_head_dim=8, rope_head_dim=8, value_head_dim=8
    )
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, expert_bias=True)
    return TransformerConfig(
        hidden_size=32, num_layers=2, num_heads=4, ffn_hidden_size=48, vocab_size=64,
        max_sequence_length=32, latent=latent, moe=moe, moe_layers=(False, True),
    )  # fmt: skip


def of_one_process(config: TransformerConfig, device: str, dtype: Any = None) -> LanguageModel:
    model = LanguageModel(config, device=device, dtype=dtype)
    torch.manual_seed(SEED)
    model.init_weights(STD)
    return model


def on_rank(
    config: TransformerConfig, layout: ParallelConfig, device: str, dtype: Any = None
) -> LanguageModel:
    model = lay_out(LanguageModel(config, device="meta", dtype=dtype), layout, device)
    init_weights_sharded(model, device, seed=SEED, std=STD)
    return model


def check(model: LanguageModel, whole: LanguageModel) -> int:
    """Compare a rank's weights with the whole model's; return how many numbers the rank has."""
    state, parts, count = whole.state_dict(), fused_rows(model), 0
    buffers = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        if name in buffers:  # a dispatcher may add counters
            assert torch.equal(buffer, buffers[name]), name
        assert not buffer.is_meta
    for held_as, tensor in model.state_dict().items():
        name = global_fqn(held_as)
        for where, piece in shares(tensor, parts.get(name)):
            assert torch.equal(piece, state[name][where]), name
            count += piece.numel()
    return count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_its_part_of_the_numbers_of_one_process(layout, device):
    config, degrees = config_of("grouped"), LAYOUTS[layout]
    whole, counts = of_one_process(config, device), []
    for rank in range(degrees.world_size):
        with as_rank(rank, degrees.world_size):
            counts.append(check(on_rank(config, degrees, device), whole))
    everything = sum(value.numel() for value in whole.state_dict().values())
    assert sum(counts) >= everything
    assert max(counts) < everything


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention_and_other_dtypes(dtype):
    config, layout = config_of("latent"), ParallelConfig(dp_shard=4, ep=2)
    whole = of_one_process(config, "cpu", dtype)
    for rank in range(4):
        with as_rank(rank, 4):
            check(on_rank(config, layout, "cpu", dtype), whole)


def test_another_way_to_draw_is_refused_by_name():
    class Truncated(LanguageModel):
        def init_weights(self, std: float = 0.02) -> None:
            self.head.weight.mul_(std)

    layout = ParallelConfig(dp_shard=2)
    with as_rank(0, 2):
        model = lay_out(Truncated(config_of("grouped"), device="meta"), layout, "cpu")
    with pytest.raises(
        ValueError, match=r"head.weight: aten.mul_.Tensor in init_weights, of which"
    ):
        init_weights_sharded(model, "cpu", seed=0)


class LiveBytes(TorchDispatchMode):
    """Mode that counts the bytes of living storages made within it, without meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(getattr(leaf, "_local_tensor", leaf))
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.is_meta or storage._cdata in self._known:
            return
        gone = functools.partial(self._gone, storage._cdata, storage.nbytes())
        self._known[storage._cdata] = weakref.ref(storage, gone)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int, _: Any) -> None:
        del self._known[key]
        self.now -= size


def sizes(model: LanguageModel) -> tuple[int, int]:
    """Bytes of a rank, and of the largest whole tensor, where experts count one by one."""
    own = [getattr(value, "_local_tensor", value) for value in model.parameters()]
    own += list(model.buffers())
    largest = max(
        value.nbytes // (model.config.moe.num_experts if "experts" in name else 1)
        for name, value in LanguageModel(model.config, device="meta").named_parameters()
    )
    return sum(value.nbytes for value in own), largest


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_the_shards_there_is_one_tensor_at_a_time(layout):
    config, degrees = config_of("grouped"), LAYOUTS[layout]
    with as_rank(0, degrees.world_size), LiveBytes() as live:
        model = on_rank(config, degrees, "cpu")
        own, largest = sizes(model)
    everything = sum(value.nbytes for value in of_one_process(config, "cpu").parameters())
    assert own <= live.peak <= own + largest + (slack := 8192), (live.peak, own, largest)
    assert live.peak < everything + slack


@pytest.mark.gpu
def test_the_allocator_agrees():
    """The allocator's peak is smaller than the whole model."""
    config = TransformerConfig(
        hidden_size=1024, num_layers=8, num_heads=8, ffn_hidden_size=4096, vocab_size=4096,
        max_sequence_length=64, moe=None,
    )  # fmt: skip
    layout = ParallelConfig(dp_shard=8)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with as_rank(0, 8):
        own, largest = sizes_of_dense(on_rank(config, layout, "cuda"))
    peak = torch.cuda.max_memory_allocated() - before
    assert own <= peak <= own + largest + (8 << 20)


def sizes_of_dense(model: LanguageModel) -> tuple[int, int]:
    own = sum(p.to_local().nbytes for p in model.parameters())
    return own, max(p.numel() * p.itemsize for p in model.parameters())


def test_a_weight_that_is_not_drawn_is_named(monkeypatch):
    monkeypatch.setattr(OwnAttention, "init_weights", Attention.init_weights)
    with pytest.raises(ValueError, match=r"attention\.gate\.weight: init_weights draws no numbers"):
        init_weights_sharded(LanguageModel(gated_preset().model, device="meta"), "cpu", seed=1)
