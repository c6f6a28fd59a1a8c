"""A model and how to train it; two presets that train in minutes, with and without a GPU.

A preset is a function that returns a ``Preset``. Names are in ``registry.PRESETS``.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_graphs.layers.model_config import MoEConfig, TransformerConfig
from moe_graphs.lm.options import TrainSettings


@dataclass(frozen=True)
class Preset:
    """A model and how to train it. The intervals are steps."""

    model: TransformerConfig
    training: TrainSettings
    log_every: int
    evaluate_every: int

    def __post_init__(self) -> None:
        asked, positions = self.training.sequence_length, self.model.max_sequence_length
        if asked > positions:
            raise ValueError(
                f"sequence_length: {asked} is more than the {positions} positions that the model "
                f"knows: lower it"
            )


def tiny() -> Preset:
    """The preset for two CPU cores: less than ten minutes."""
    moe = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=192, aux_loss_coef=0.01)
    model = TransformerConfig(
        hidden_size=192,
        num_layers=3,
        num_heads=3,
        ffn_hidden_size=384,
        vocab_size=256,
        max_sequence_length=256,
        qk_norm="head",
        moe=moe,
        moe_layers=(False, True, True),
    )
    training = TrainSettings(
        steps=1200,
        batch_size=8,
        sequence_length=256,
        learning_rate=3e-3,
        warmup_steps=50,
        beta2=0.97,
    )
    return Preset(model, training, log_every=20, evaluate_every=300)


def small() -> Preset:
    """The preset for one H200: a few minutes.

    It has dropout because it runs four epochs of 11 MB, and more epochs overfit.
    """
    moe = MoEConfig(num_experts=32, top_k=4, ffn_hidden_size=384, aux_loss_coef=0.01)
    model = TransformerConfig(
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        ffn_hidden_size=1536,
        vocab_size=256,
        max_sequence_length=1024,
        qk_norm="head",
        hidden_dropout=0.1,
        moe=moe,
        moe_layers=(False, *(True,) * 11),
    )
    training = TrainSettings(
        steps=600, batch_size=64, sequence_length=1024, learning_rate=1e-3, warmup_steps=60
    )
    return Preset(model, training, log_every=20, evaluate_every=100)
