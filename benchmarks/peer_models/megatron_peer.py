"""Megatron-core's GPTModel of Transformer Engine's modules, on one GPU, without megatron.training.

Without apex: no fusion of gradient accumulation (`gradient_accumulation_fusion=False`, which
Megatron names as the way without), and torch's AdamW as for everyone.

Shapes: B sequences, S sequence length.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig as MegatronConfig
from torch import Tensor, nn
from torch.nn import functional

from moe_graphs.layers import TransformerConfig
from peer_models.cases import Case
from peer_models.peer import Peer, version_of
from peer_models.weights import LayerWeights, assign, assign_linear, assign_optional

SETTINGS: dict[str, Any] = dict(
    moe_grouped_gemm=True,
    moe_permute_fusion=True,
    moe_router_fusion=True,
    moe_router_dtype="fp32",
    moe_router_load_balancing_type="none",
    cross_entropy_loss_fusion=True,
    cross_entropy_fusion_impl="te",
    apply_rope_fusion=True,
    bias_activation_fusion=True,
    bias_dropout_fusion=True,
    gradient_accumulation_fusion=False,
)


class MegatronPeer(Peer):
    captures_first = True

    def __init__(self, model: nn.Module, settings: Mapping[str, Any], case: Case,
                 device: torch.device) -> None:  # fmt: skip
        super().__init__(model, settings)
        self.case = case
        self.captures = model.config.cuda_graph_impl != "none"
        length = case.config.max_sequence_length
        self.positions_BS = torch.arange(length, device=device).expand(case.batch_size, -1)

    def loss(self, model: Any, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        losses_BS = model(tokens_BS, self.positions_BS, None, labels=targets_BS)
        return losses_BS.float().mean()

    def capture(self, optimizer: torch.optim.Optimizer) -> None:
        """Capture before the first step, as megatron.training with `cuda_graph_warmup_steps=0`.

        After eager steps on the default stream Megatron's backward cannot be captured (torch 2.11).
        """
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        # The helper empties the gradient buffer of Megatron's DDP, which is not there.
        self.model.zero_grad_buffer = lambda: None
        length, batch = self.case.config.max_sequence_length, self.case.batch_size
        helper = TECudaGraphHelper([self.model], self.model.config, length, batch, [optimizer])
        helper.create_cudagraphs()
        optimizer.zero_grad(set_to_none=True)


def build(
    case: Case,
    state: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    dispatcher: str = "alltoall",
    graphs: str = "none",
    scope: str = "full",
) -> Peer:
    """``graphs`` is Megatron's `cuda_graph_impl`, ``scope`` its `cuda_graph_scope`."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    _initialize(case, graphs)
    config = case.config
    assert config.moe is not None
    made = MegatronConfig(
        **_sizes(config),
        **SETTINGS,
        moe_token_dispatcher_type=dispatcher,
        cuda_graph_impl=graphs,
        cuda_graph_scope=scope.split("+") if graphs != "none" else "full",
        use_te_rng_tracker=graphs != "none",
        bf16=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    normed = config.qk_norm == "head"
    model = GPTModel(
        made,
        _layer_spec(config.moe.num_experts, normed),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_sequence_length,
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
    ).to(device)
    _fill(model, state, config)
    settings = SETTINGS | {
        "megatron_core": version_of("megatron_core"),
        "transformer_engine": version_of("transformer_engine"), "dispatcher": dispatcher,
        "cuda_graph_impl": graphs, "cuda_graph_scope": scope if graphs != "none" else "none",
    }  # fmt: skip
    return MegatronPeer(model.train(), settings, case, device)


def _initialize(case: Case, graphs: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(0, te_rng_tracker=graphs != "none")
    init_num_microbatches_calculator(
        rank=0,
        rampup_batch_size=None,
        global_batch_size=case.batch_size,
        micro_batch_size=case.batch_size,
        data_parallel_size=1,
    )


def _sizes(config: TransformerConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return dict(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.kv_heads,
        kv_channels=config.head_size,
        ffn_hidden_size=moe.ffn_hidden_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        qk_layernorm=config.qk_norm == "head",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        num_moe_experts=moe.num_experts,
        moe_ffn_hidden_size=moe.ffn_hidden_size,
        moe_router_topk=moe.top_k,
        moe_aux_loss_coeff=0.0,
    )


def _layer_spec(num_experts: int, normed: bool) -> Any:
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=True, qk_layernorm=normed
    )


def _fill(model: nn.Module, state: Mapping[str, Tensor], config: TransformerConfig) -> None:
    assign_linear(model.embedding.word_embeddings, state["embedding.weight"])
    assign_linear(model.decoder.final_layernorm, state["norm.weight"])
    assign_linear(model.output_layer, state["head.weight"])
    for index, layer in enumerate(model.decoder.layers):
        weights = LayerWeights.of(state, index, config)
        attention, moe = layer.self_attention, layer.mlp
        assign(attention.linear_qkv.layer_norm_weight, weights.attention_norm)
        assign_linear(attention.linear_qkv, weights.interleaved_qkv(config))
        assign_linear(attention.linear_proj, weights.out)
        assign_linear(layer.pre_mlp_layernorm, weights.mlp_norm)
        assign_linear(moe.router, weights.router)
        if config.qk_norm == "head":
            assign_optional(attention.q_layernorm, weights.query_norm)
            assign_optional(attention.k_layernorm, weights.key_norm)
        for expert in range(moe.num_local_experts):
            both = torch.cat((weights.gate[expert], weights.up[expert]))
            assign(moe.experts.linear_fc1.get_parameter(f"weight{expert}"), both)
            assign(moe.experts.linear_fc2.get_parameter(f"weight{expert}"), weights.down[expert])
