"""The language model: configuration, published sizes, training, and refusals."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional

from moe_graphs.dispatch import PaddedDispatcher
from moe_graphs.layers import (
    LanguageModel,
    MoEConfig,
    MoELayer,
    TransformerConfig,
    deepseek_v3,
    deepseek_v3_moe,
    llama3_8b,
    mixtral_8x7b,
    olmoe_1b_7b,
    qwen3_30b_a3b,
)

MOE = MoEConfig(
    num_experts=6, top_k=2, ffn_hidden_size=10, aux_loss_coef=0.01, shared_ffn_hidden_size=4
)
CONFIG = TransformerConfig(
    hidden_size=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=20,
    vocab_size=19,
    max_sequence_length=16,
    qk_norm="head",
    moe=MOE,
    moe_layers=(False, True, True),
)


def _loss(model: LanguageModel, tokens_BS: torch.Tensor) -> torch.Tensor:
    output = model(tokens_BS)
    logits, targets = output.logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten()
    return functional.cross_entropy(logits, targets) + output.aux_loss


def _model(config: TransformerConfig = CONFIG, **options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(config, **options)


class TestLanguageModel:
    def test_learns_a_sequence(self):
        model = _model(replace(CONFIG, moe=replace(MOE, expert_bias=True)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(19, (2, 16))
        losses = []
        for _ in range(40):
            loss = _loss(model, tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.update_expert_bias()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(torch.tensor(19.0).log().item(), abs=0.2)
        assert losses[-1] < 0.3
        assert model.layers[1].moe.router.expert_bias.ne(0).any()

    def test_every_parameter_gets_a_gradient(self):
        model = _model()
        _loss(model, torch.randint(19, (4, 16))).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []

    def test_two_runs_are_the_same_bits(self):
        results = []
        for _ in range(2):
            model = _model(replace(CONFIG, hidden_dropout=0.1, attention_dropout=0.1))
            loss = _loss(model, torch.randint(19, (2, 16)))
            loss.backward()
            results.append([loss, *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *results))

    def test_later_tokens_do_not_reach_earlier_logits(self):
        model = _model()
        tokens = torch.randint(19, (1, 12))
        changed = tokens.clone()
        changed[0, 7:] = (changed[0, 7:] + 1) % 19
        torch.testing.assert_close(
            model(tokens).logits_BSV[:, :7], model(changed).logits_BSV[:, :7]
        )

    def test_sums_losses_and_drops_over_the_layers(self):
        model = _model(dispatcher=PaddedDispatcher(0.5))
        hidden = model.embedding(tokens := torch.randint(19, (2, 16)))
        losses, drops = [], []
        for layer in model.layers:
            output = layer(hidden)
            hidden = output.hidden_BSD
            if layer.is_moe:
                losses.append(output.aux_loss)
                drops.append(output.dropped_tokens)
        output = model(tokens)
        assert torch.equal(output.aux_loss, sum(losses))
        assert output.dropped_tokens == sum(drops) > 0
        assert [layer.is_moe for layer in model.layers] == [False, True, True]

    def test_a_dense_model_has_no_losses_and_drops(self):
        output = _model(replace(CONFIG, moe=None, moe_layers="all"))(torch.randint(19, (2, 4)))
        assert output.aux_loss.item() == 0
        assert output.dropped_tokens.item() == 0

    def test_initial_scales(self):
        wide = replace(CONFIG, hidden_size=256, moe=replace(MOE, ffn_hidden_size=128))
        model = _model(wide)
        out_std = 0.02 / 6**0.5
        for name, parameter in model.named_parameters():
            residual = name.endswith(("attention.out.weight", "w2", "w2.weight"))
            want = 0 if "norm" in name else out_std if residual else 0.02
            assert parameter.std().item() == pytest.approx(want, rel=0.1), name

    def test_meta_device_then_init_weights_is_the_same_model(self):
        torch.manual_seed(0)
        model = LanguageModel(CONFIG, device="meta").to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(7)
        model.init_weights()
        torch.manual_seed(0)
        want = LanguageModel(CONFIG)
        torch.manual_seed(0)
        want.init_weights()
        tokens = torch.randint(19, (2, 16))
        assert torch.equal(model(tokens).logits_BSV, want(tokens).logits_BSV)
        state = zip(model.state_dict().values(), want.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in state)

    def test_dtype_is_that_of_the_parameters_only(self):
        config = replace(CONFIG, moe=replace(MOE, expert_bias=True))
        model = _model(config, dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.rope.cos_SQ.dtype == torch.float32
        assert model.layers[1].moe.router.expert_bias.dtype == torch.float32
        output = model(torch.randint(19, (2, 16)))
        assert output.logits_BSV.dtype == torch.bfloat16
        assert output.aux_loss.dtype == torch.float32

    def test_autocast_is_close_to_fp32_and_keeps_fp32_gradients(self):
        model = _model()
        tokens = torch.randint(19, (2, 16))
        want = _loss(model, tokens)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            got = _loss(model, tokens)
        got.backward()
        assert abs(got - want) < 0.02
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


class TestPresets:
    @pytest.mark.parametrize(
        ("preset", "total", "active"),
        [
            # Billions of parameters, as published with the models.
            (mixtral_8x7b, 46.7, 12.9),
            (qwen3_30b_a3b, 30.5, 3.3),
            (olmoe_1b_7b, 6.9, 1.3),
            (llama3_8b, 8.0, 8.0),
            (deepseek_v3, 671.0, 37.6),
        ],
    )
    def test_parameters_are_as_many_as_published(self, preset, total, active):
        model = LanguageModel(preset(), device="meta")
        assert model.num_parameters() / 1e9 == pytest.approx(total, abs=0.06)
        assert model.num_parameters(active=True) / 1e9 == pytest.approx(active, abs=0.06)

    def test_deepseek_v3_moe(self):
        """The routed experts of 58 such layers hold 653.9 B of the model's 671 B parameters."""
        layer = MoELayer(deepseek_v3_moe(), 7168, device="meta")
        routed = layer.experts.w1.numel() + layer.experts.w2.numel()
        assert 58 * routed == 58 * 256 * 3 * 7168 * 2048
        assert layer.router.expert_bias.shape == (256,)

    @pytest.mark.parametrize("preset", [mixtral_8x7b, qwen3_30b_a3b, olmoe_1b_7b, llama3_8b])
    def test_a_small_cut_of_each_trains(self, preset):
        small = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "head_dim": 8}
        small |= {"vocab_size": 64, "max_sequence_length": 32}
        config = preset()
        if config.num_kv_heads is not None:
            small["num_kv_heads"] = 2
        if config.moe is not None:
            small["moe"] = replace(config.moe, ffn_hidden_size=16)
        else:
            small["ffn_hidden_size"] = 48
        model = LanguageModel(preset(**small))
        _loss(model, torch.randint(64, (2, 8))).backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_flops_of_a_dense_model_by_hand(self):
        model = _model(replace(CONFIG, moe=None, moe_layers="all", qk_norm="none"))
        attention = 16 * (16 + 8 + 8) + 16 * 16
        mlp = 3 * 16 * 20
        norms = 16 * 7
        matmuls = 3 * (attention + mlp) + 16 * 19 + norms
        assert model.flops_per_token(10) == 6 * matmuls + 12 * 3 * 4 * 4 * 10

    def test_flops_count_the_chosen_experts_only(self):
        more = replace(CONFIG, moe=replace(MOE, num_experts=12))
        one, two = _model(), _model(more)
        routers = 6 * 2 * 6 * 16
        assert two.flops_per_token(8) - one.flops_per_token(8) == routers
        assert two.num_parameters() - one.num_parameters() == 2 * 6 * (16 + 3 * 16 * 10)


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": 0}, "hidden_size must be positive, got 0"),
            ({"num_heads": 3, "num_kv_heads": 3}, "must be divisible by num_heads"),
            ({"num_kv_heads": 3}, r"num_kv_heads \(3\) must divide num_heads \(4\)"),
            ({"head_dim": 3}, "positive and even"),
            ({"qk_norm": "layer"}, "choose none, head or full"),
            ({"hidden_dropout": 1.0}, r"hidden_dropout must be in \[0, 1\)"),
            ({"moe_layers": (True,)}, r"one True or False per layer \(3\)"),
            ({"moe_layers": 0}, "'all', 'none', one flag per layer, or an interval"),
            ({"moe_layers": True}, "or an interval, got True"),
            ({"moe_layers": "some"}, "or an interval, got 'some'"),
            ({"moe": None}, "but moe is None"),
            ({"ffn_hidden_size": None}, r"ffn_hidden_size must be .*layers \[0\] are dense"),
        ],
    )
    def test_models_that_cannot_be_are_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            replace(CONFIG, **changes)

    @pytest.mark.parametrize(
        ("given", "want"),
        [
            ("all", [True, True, True, True]),
            ("none", [False, False, False, False]),
            (2, [False, True, False, True]),
            ((True, False, False, True), [True, False, False, True]),
        ],
    )
    def test_which_layers_are_moe(self, given, want):
        config = replace(CONFIG, num_layers=4, moe_layers=given)
        assert [config.is_moe_layer(index) for index in range(4)] == want

    def test_stay_small(self):
        assert len(fields(MoEConfig)) <= 18
        assert len(fields(TransformerConfig)) <= 20
