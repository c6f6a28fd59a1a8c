"""Plans against torch's own tracker of memory, for steps on the CPU.

``MemTracker`` sets hooks on every module. With hooks, an MLP keeps the input of its last projection
as well (``layers/mlp.py``), so these plans are made under hooks, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_pre_hook

from moe_graphs.layers import LanguageModel, LatentAttentionConfig, TransformerConfig
from moe_graphs.lm.optimizers import build_optimizer
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.plan_command import optimizer_costs
from moe_graphs.parallel import ParallelConfig
from moe_graphs.planning.layout_plan import RankPlan, plan_layout
from moe_graphs.planning.microbatch_memory import microbatch_memory
from moe_graphs.planning.planned_step import PlannedStep
from planned_layouts import MOE

STEP = PlannedStep(sequences=2, sequence_length=32, on_gpus=False)
LATENT = LatentAttentionConfig(
    query_rank=24, kv_rank=16, plain_head_dim=8, rope_head_dim=4, value_head_dim=8
)
MODELS = {
    "MoE": MOE,
    "dense": replace(MOE, moe=None, moe_layers="none", qk_norm="none"),
    "latent": replace(MOE, latent=LATENT, num_kv_heads=None, qk_norm="none"),
    "recomputed": replace(MOE, moe=replace(MOE.moe, recompute="experts")),
    "dropout": replace(MOE, hidden_dropout=0.1),
}
SCALARS = 64  # bytes: losses and statistics, which the caller holds and the backward does not read


def planned(config: TransformerConfig, step: PlannedStep = STEP) -> RankPlan:
    with under_hooks():
        return plan_layout(config, ParallelConfig(), step).most


@contextlib.contextmanager
def under_hooks() -> Iterator[None]:
    hook = register_module_forward_pre_hook(lambda *_: None)
    try:
        yield
    finally:
        hook.remove()


class Tracked:
    """A step of a model under ``MemTracker``: bytes by its words, after the parts of the step."""

    def __init__(self, model: LanguageModel, optimizer: torch.optim.Optimizer | None = None):
        tokens_BS = torch.randint(96, (2, 32))
        self._tracker = MemTracker()
        self._tracker.track_external(model, tokens_BS)
        with self._tracker:
            output = model(tokens_BS, tokens_BS)
            loss = output.loss + output.aux_loss
            self.after_forward = self._bytes("current")
            loss.backward()
            self.after_backward, self.peak = self._bytes("current"), self._bytes("peak")
            if optimizer is not None:
                optimizer.step()
            self.after_update = self._bytes("current")
        self._layers = {layer: self._tracker.memory_tracking[layer] for layer in model.layers}

    def kept_by(self, layer: torch.nn.Module) -> int:
        """Bytes that a layer's forward leaves."""
        snapshots = {state.value: each for state, each in self._layers[layer].snapshots.items()}
        before, after = snapshots["Pre-Forward"], snapshots["Post-Forward"]
        return self._by_word(after[0])["Activation"] - self._by_word(before[0])["Activation"]

    def _bytes(self, when: str) -> dict[str, int]:
        return self._by_word(self._tracker.get_tracker_snapshot(when))

    def _by_word(self, snapshot: Any) -> dict[str, int]:
        found = snapshot[torch.device("cpu")]
        return {getattr(word, "value", word): size for word, size in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_takes_the_memory_that_is_planned(name):
    config = MODELS[name]
    plan, model = planned(config), LanguageModel(config)
    step = Tracked(model)
    assert step.after_forward["Parameter"] == plan.exact["parameters"]
    assert step.after_forward["Buffer"] == plan.exact["buffers"]
    assert step.after_backward["Gradient"] == plan.exact["gradients"]
    beyond = step.after_forward["Activation"] - plan.estimated["activations"]
    assert 0 < beyond < SCALARS
    # A plan takes the gradients of a whole layer as there, where the layer has its first one.
    peak = plan.within_graph + plan.exact["parameters"] + plan.exact["buffers"]
    assert step.peak["Total"] <= peak < 1.08 * step.peak["Total"]
    # The input of a layer is planned as the layer's own, its output as that of the next one.
    kind = "MoE layer" if config.is_moe_layer(1) else "dense layer"
    beyond = step.kept_by(model.layers[1]) - plan.per_layer[kind]
    assert 0 <= beyond < SCALARS


def test_autocast_keeps_what_is_planned():
    model, tokens_BS = LanguageModel(MOE), torch.randint(96, (2, 32))
    with under_hooks():
        plan = microbatch_memory(model, tokens_BS, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        step = Tracked(model)
    assert plan.weight_copies > 0
    assert 0 < step.after_forward["Activation"] - plan.kept < SCALARS


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "torch_adamw"},
        {},
        {"optimizer_state": "8bit"},
        {"optimizer_state": "bfloat16", "ema_decay": 0.9},
        pytest.param({"optimizer": "muon"}, marks=pytest.mark.long),
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "adamw",
)
def test_an_optimizer_holds_what_is_planned(options):
    config = replace(MOE, hidden_size=128, ffn_hidden_size=128)  # wide enough for 8-bit states
    settings = TrainSettings(
        steps=1, batch_size=2, sequence_length=32, learning_rate=1e-3, **options
    )
    plan = planned(config, replace(STEP, optimizer=functools.partial(optimizer_costs, settings)))
    model = LanguageModel(config)
    step = Tracked(model, build_optimizer(model, settings))
    assert step.after_update["Optstate"] == plan.exact["optimizer"]
