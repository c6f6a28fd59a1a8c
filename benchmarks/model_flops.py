"""Model FLOPs of training steps, for the tables: the least that a step has to compute.

A product of a token and a weight counts 2 FLOPs in the forward and 4 in the backward, or 2 where
the weight is frozen. A token meets the experts that it goes to, the router and the head, and no
table of embeddings. Attention counts the pairs that a causal mask leaves, which is half of what
PaLM's formula counts (``LanguageModel.flops_per_token``). Checkpointing's recomputation, norms and
the optimizer count nothing. ``fine_tuning.py`` writes the same count into its lines.
"""

from __future__ import annotations

from functools import cache

from contenders import settings as of_scopes
from full_iteration import settings as of_whole_steps
from huggingface import HuggingFaceSetting
from huggingface import settings as of_transformers
from moe_graphs.layers import LanguageModel, MoEConfig, TransformerConfig
from moe_graphs.lm.metrics import HOPPER_PEAK
from peer_models.cases import cases as of_peers
from result_lines import Line

HEADER = "model TFLOP/s, of peak"


def cell(flops_per_second: float) -> str:
    return f"{flops_per_second / 1e12:.0f}, {flops_per_second / HOPPER_PEAK:.0%}"


def cell_of(line: Line) -> str:
    """Model TFLOP/s and the share of the peak of a timed step; a dash if it is not of tokens."""
    found = _config_and_tokens(line["benchmark"], line["model"])
    if found is None:
        return "-"
    return cell(counted(found[0]) * 1e3 * found[1] / line["step_ms"]["median"])


@cache
def counted(config: TransformerConfig) -> float:
    """FLOPs of a token, with all weights trained, in a row of the longest length."""
    model = LanguageModel(config, device="meta")
    of_products = model.flops_per_token(0)
    return (of_products + model.flops_per_token(config.max_sequence_length)) / 2


def _config_and_tokens(benchmark: str, model: str) -> tuple[TransformerConfig, int] | None:
    """Configuration of a line's model, and the tokens of its step."""
    if benchmark == "peers":
        case = of_peers()[model]
        return case.config, case.tokens
    if benchmark == "huggingface":
        setting = of_transformers()[model]
        return _of_transformers(setting), setting.tokens
    found = (of_whole_steps() if benchmark == "full_iteration" else of_scopes())[model]
    config = getattr(found, "config", None)
    return None if config is None else (config, found.tokens)


def _of_transformers(setting: HuggingFaceSetting) -> TransformerConfig:
    return TransformerConfig(
        hidden_size=setting.hidden_size,
        num_layers=setting.num_layers,
        num_heads=setting.num_heads,
        num_kv_heads=setting.num_kv_heads,
        head_dim=setting.head_dim,
        vocab_size=setting.vocab_size,
        max_sequence_length=setting.sequence,
        qk_norm="head",
        moe=MoEConfig(
            num_experts=setting.num_experts,
            top_k=setting.top_k,
            ffn_hidden_size=setting.ffn_hidden_size,
        ),
    )
