"""Tiny models of transformers' families with experts, by the names of their configurations."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moe_graphs

# Every configuration takes those that it has.
_SIZES: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    max_position_embeddings=64,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    moe_num_experts=8,
    num_experts_per_tok=2,
    moe_topk=2,
    moe_k=2,
    top_k_experts=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=0,
    num_dense_layers=0,
    mlp_only_layers=[],
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MLA = dict(head_dim=None, num_key_value_heads=4)  # heads are the sum of two parts
# Heads of 16 where attention is linear or a state space: as they come a step takes a second.
_LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4,
               linear_key_head_dim=16, linear_value_head_dim=16)  # fmt: skip
_STATES = dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "bailing_hybrid": dict(linear_num_heads=4, linear_head_dim=16),
    "cohere2_moe": {},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v4": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "glm4_moe_lite": _MLA,
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "mixtral": {},
    "nemotron_h": _STATES,
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe": _LINEAR,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR,
    "solar_open": {},
}
# Parts for images and sound, which no test calls; as they come they have 0.9 B parameters.
_PARTS: dict[str, dict[str, Any]] = {
    "phi4_multimodal": dict(
        audio_config=dict(
            hidden_size=32, intermediate_size=32, num_blocks=1, num_attention_heads=2,
            ext_pw_out_channel=32, nemo_conv_channels=8,
        ),
        vision_config=dict(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            crop_size=28, image_size=28, feature_layer=-1,
        ),
    ),
}  # fmt: skip


def skip_unknown(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")


def implementation_of(family: str) -> str | None:
    """Default implementation of a family's experts."""
    return "grouped_mm" if family in FAMILIES else None


def tokens(device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 128, (2, 16), generator=generator).to(device)


class Texts(torch.utils.data.Dataset):
    """Random tokens for Trainer, all of one length."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(3, 128, (count, 16), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tiny(family: str, implementation: str | None, **overrides: Any) -> nn.Module:
    """Causal language model of two layers, with the same weights for every ``implementation``.

    The implementation is None for a dense model.
    """
    kind = CONFIG_MAPPING[family]
    default = kind().get_text_config()
    known = default.to_dict()
    given = {**_SIZES, **FAMILIES.get(family, {}), **_PARTS.get(family, {}), **overrides}
    sizes = {
        n: v for n, v in given.items() if (n in known or hasattr(default, n)) and v is not None
    }
    if known.get("layer_types"):
        sizes["layer_types"] = [known["layer_types"][0], known["layer_types"][-1]]
    config = type(default)(**sizes)
    torch.manual_seed(0)
    chosen = {} if implementation is None else dict(experts_implementation=implementation)
    model = AutoModelForCausalLM.from_config(config, **chosen)
    return model.train()


def loss_and_gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss, logits and gradients of one step, by name; eager where a model has graphs."""
    model.zero_grad()
    with warnings.catch_warnings():
        # The step is outside of graphs.step() on purpose.
        warnings.filterwarnings("ignore", ".*outside_step", moe_graphs.GraphWarning)
        output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **found}


def counted(report: Any) -> dict[str, int]:
    """Eager calls by reason; older transformers call checkpointed layers in the backward, too."""
    return {name: n for name, n in report.eager_calls.items() if name != "recompute"}


def trained(
    model: nn.Module, step: Callable[[], contextlib.AbstractContextManager[None]]
) -> list[torch.Tensor]:
    """The losses of five steps, and the parameters after them. ``step``: around each."""
    optimizer = torch.optim.AdamW(model.parameters())
    losses, ids = [], tokens(str(model.device))
    for _ in range(5):
        with step():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]
