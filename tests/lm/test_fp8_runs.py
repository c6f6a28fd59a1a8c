"""The command ``moe-graphs train`` with products in FP8: what it builds, keeps and refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from lm_runs import advance, fresh_trainer, options
from moe_graphs.kernels import fp8
from moe_graphs.layers import LanguageModel
from moe_graphs.layers.experts import GroupedExperts
from moe_graphs.layers.linear import FP8Linear
from moe_graphs.layers.moe import moe_layers
from moe_graphs.lm.chosen_kernels import with_kernels
from moe_graphs.lm.options import ModelOptions
from moe_graphs.lm.run import RunOptions, with_graphs
from moe_graphs.registry import PRESETS

CPU = torch.device("cpu")


def in_precision(
    precision: str = "weights", dense_precision: str = "weights", **settings: int
) -> RunOptions:
    """A run whose sizes are whole blocks, with a layer between the first and the last one."""
    given = options(**settings)
    model = given.preset.model
    moe = replace(model.moe, ffn_hidden_size=128, shared_ffn_hidden_size=0)
    sizes = dict(hidden_size=128, num_heads=4, num_kv_heads=4, head_dim=None, ffn_hidden_size=128)
    model = replace(model, **sizes, num_layers=3, moe=moe, moe_layers="all")
    asked = ModelOptions(precision=precision, dense_precision=dense_precision)
    return replace(given, preset=with_kernels(replace(given.preset, model=model), asked, CPU))


def layers_in_fp8(model: LanguageModel) -> list[bool]:
    """Whether attention's projections are in FP8, layer by layer."""
    return [isinstance(layer.attention.qkv, FP8Linear) for layer in model.layers]


def trained(given: RunOptions, steps: int = 6) -> torch.Tensor:
    trainer = fresh_trainer(given)
    with with_graphs(trainer, given.graph_config):
        advance(trainer, steps)
    return trainer.history.loss[:steps].clone()


def test_a_run_in_fp8_is_near_one_without():
    plain, experts, dense = (
        trained(in_precision(*each)) for each in ((), ("fp8",), ("weights", "fp8"))
    )
    for ours in (experts, dense):
        assert not torch.equal(plain, ours)
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0)


def test_a_checkpoint_says_it_and_those_before_it_said_nothing():
    described = [
        fresh_trainer(in_precision(name)).surroundings["model"]["moe"].get("precision")
        for name in ("weights", "fp8")
    ]
    assert described == [None, "fp8"]
    dense = [
        fresh_trainer(in_precision(dense_precision=name)).surroundings["model"].get("precision")
        for name in ("weights", "fp8")
    ]
    assert dense == [None, "fp8"]


def test_pretrained_weights_go_on_in_fp8(tmp_path):
    config = replace(in_precision("fp8").preset.model, moe_layers="all", qk_norm="head")
    config = replace(config, hidden_dropout=0.0, moe=replace(config.moe, recompute="experts"))
    config = replace(config, moe=replace(config.moe, input_jitter=0.0, expert_bias=False))
    LanguageModel(config).save_pretrained(tmp_path)
    model = LanguageModel.from_pretrained(tmp_path, precision="fp8")
    assert [layer.experts.precision for layer in moe_layers(model)] == ["fp8"] * config.num_layers
    plain = LanguageModel.from_pretrained(tmp_path)
    assert plain.config.moe.precision == "weights"
    assert not any(layers_in_fp8(plain))
    dense = LanguageModel.from_pretrained(tmp_path, dense_precision="fp8")
    assert layers_in_fp8(dense) == [False, True, False]
    dense.save_pretrained(tmp_path / "again")
    assert torch.equal(
        LanguageModel.from_pretrained(tmp_path / "again").head.weight, plain.head.weight
    )


def test_refusals():
    asked, small, tiny = ModelOptions(precision="fp8"), PRESETS["small"](), PRESETS["tiny"]()
    assert with_kernels(small, asked, CPU).model.moe.precision == "fp8"
    with pytest.raises(ValueError, match="128 must divide hidden_size, got 192"):
        with_kernels(tiny, asked, CPU)
    with pytest.raises(
        ValueError, match="precision 'fp4' is unknown: choose weights, fp8, fp8_powers or"
    ):
        with_kernels(small, ModelOptions(precision="fp4"), CPU)
    dense = replace(small, model=replace(small.model, moe=None, moe_layers="none"))
    with pytest.raises(ValueError, match="precision: 'fp8', but the model has no experts: drop"):
        with_kernels(dense, asked, CPU)
    with pytest.raises(ValueError, match="precision 'fp4' is unknown"):
        with_kernels(dense, ModelOptions(dense_precision="fp4"), CPU)
    both = ModelOptions(dense_precision="fp8", linear="transformer_engine")
    with pytest.raises(ValueError, match="precision='fp8' needs linear='torch'"):
        with_kernels(dense, both, CPU)


def put_in_an_outlier(experts: GroupedExperts) -> None:
    """Let one number that experts read be 1e5, in the next batch alone."""

    def replaced(_, given):
        handle.remove()
        tokens_TD = given[0].clone()
        tokens_TD[3, 5] = 1e5
        return tokens_TD, *given[1:]

    handle = experts.register_forward_pre_hook(replaced)


def disturbed(precision: str, disturb: Callable[[GroupedExperts], object]) -> torch.Tensor:
    """Losses of a run of two layers, whose first experts are disturbed in the fourth step."""
    given = options()
    model = given.preset.model
    sizes = dict(hidden_size=128, num_heads=4, head_dim=None)
    model = replace(model, **sizes, moe=replace(model.moe, ffn_hidden_size=128))
    asked, preset = ModelOptions(precision=precision), replace(given.preset, model=model)
    trainer = fresh_trainer(replace(given, preset=with_kernels(preset, asked, CPU)))
    advance(trainer, 3)
    disturb(moe_layers(trainer.model)[0].experts)
    advance(trainer, 8)
    return trainer.history.loss[:8].clone()


@pytest.mark.parametrize("precision", ["fp8", "fp8_rows"])
def test_an_outlier_does_not_break_training(precision):
    plain, ours = (disturbed(name, put_in_an_outlier) for name in ("weights", precision))
    quiet = disturbed("weights", lambda experts: None)
    assert plain[3] > quiet[3] + 0.01
    torch.testing.assert_close(ours, plain, rtol=0.02, atol=0)


@pytest.mark.parametrize("precision", ["fp8", "fp8_rows"])
@pytest.mark.parametrize("expert", [1, 2])  # many tokens go to them
def test_an_overflow_does_not_break_training(expert, precision):
    """An expert's first weight is 10,000 times as large; rounding shows more in the steps after."""

    def enlarge(experts):
        with torch.no_grad():
            experts.w1[expert] *= 1e4

    plain, ours = (disturbed(name, enlarge) for name in ("weights", precision))
    assert plain[3] > plain[2] + 0.3
    torch.testing.assert_close(ours[:4], plain[:4], rtol=0.02, atol=0)
    torch.testing.assert_close(ours[4:], plain[4:], rtol=0.15, atol=0)
    assert ours[-1] < ours[3]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_codes_of_experts_weights_are_made_once_a_step(microbatches):
    trainer = fresh_trainer(in_precision("fp8", microbatches=microbatches))
    with mock.patch.object(fp8, "_both", side_effect=fp8._both) as made:
        advance(trainer, 3)
    assert made.call_count == 3 * 3 * 2  # steps, layers, weights
