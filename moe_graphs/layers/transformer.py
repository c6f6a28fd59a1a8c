"""One decoder layer, dense or MoE, in the stages at which it can be cut.

Dense: ``attn``, ``mlp``. MoE: ``attn``, ``moe_router``, ``moe_preprocess``, ``moe_experts``.
Norms belong to the stage they feed; the residual travels in the records.

Shapes: B batch, S sequence, D model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_graphs.dispatch import Dispatcher
from moe_graphs.kernels import add_rms_norm
from moe_graphs.layers.linear import IN_FP8
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.layers.model_config import TransformerConfig
from moe_graphs.layers.moe import MoELayer, Prepared, Routed
from moe_graphs.layers.norm import RMSNorm
from moe_graphs.layers.rope import RotaryEmbedding
from moe_graphs.registry import ATTENTIONS
from moe_graphs.staged import Stage, Staged, record


@record
class LayerInput:
    """Hidden states, and the numbers of the documents where a row has several, else None."""

    hidden_BSD: Tensor
    document_ids_BS: Tensor | None = None


@record
class Attended:
    """The residual stream before attention, and attention's output.

    Their sum is computed by the kernel of ``mlp_norm``.
    """

    residual_BSD: Tensor
    update_BSD: Tensor


@record
class LayerRouted:
    residual_BSD: Tensor
    routed: Routed


@record
class LayerPrepared:
    residual_BSD: Tensor
    prepared: Prepared


@record
class LayerOutput:
    """Output of a layer; ``aux_loss`` and ``dropped_tokens`` are 0-dim, None for a dense layer."""

    hidden_BSD: Tensor
    aux_loss: Tensor | None
    dropped_tokens: Tensor | None


class TransformerLayer(Staged):
    """Pre-norm decoder layer. ``rope`` is shared by the layers of a model.

    ``mlp_norm`` holds weights and is not called: its hooks do not fire.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_index: int,
        dispatcher: Dispatcher | None = None,
        rope: RotaryEmbedding | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config, self.layer_index = config, layer_index
        if rope is None:
            rope = RotaryEmbedding.of(config, device)
        precision = config.precision_of(layer_index)
        if precision != "weights":
            config = replace(config, linear=IN_FP8[precision], precision="weights")
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, **factory)
        self.attention = ATTENTIONS[config.attention_kind](config, rope, **factory)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, **factory)
        self.moe: MoELayer | None = None
        self.mlp: SwiGLU | None = None
        if config.moe is not None and config.is_moe_layer(layer_index):
            self.moe = MoELayer(
                config.moe, config.hidden_size, dispatcher, linear=config.linear, **factory
            )
        else:
            assert config.ffn_hidden_size is not None
            self.mlp = SwiGLU(
                config.hidden_size, config.ffn_hidden_size, linear=config.linear, **factory
            )

    @property
    def is_moe(self) -> bool:
        return self.moe is not None

    def stages(self) -> tuple[Stage, ...]:
        if self.moe is None:
            return Stage("attn", self.attend), Stage("mlp", self.run_mlp)
        return (
            Stage("attn", self.attend),
            Stage("moe_router", self.route),
            Stage("moe_preprocess", self.preprocess),
            Stage("moe_experts", self.run_experts, self.moe.dynamic),
        )

    if TYPE_CHECKING:  # nn.Module's says Any

        def __call__(
            self, hidden_BSD: Tensor, document_ids_BS: Tensor | None = None
        ) -> LayerOutput: ...

    def forward(self, hidden_BSD: Tensor, document_ids_BS: Tensor | None = None) -> LayerOutput:
        return self.run_stages(LayerInput(hidden_BSD, document_ids_BS))

    def attend(self, entered: LayerInput) -> Attended:
        normed_BSD = self.attention_norm(entered.hidden_BSD)
        update_BSD = self.attention(normed_BSD, entered.document_ids_BS)
        return Attended(entered.hidden_BSD, self._dropout(update_BSD))

    def run_mlp(self, attended: Attended) -> LayerOutput:
        assert self.mlp is not None
        residual_BSD, normed_BSD = self._add_norm(attended)
        update_BSD = self.mlp(normed_BSD)
        return LayerOutput(residual_BSD + self._dropout(update_BSD), None, None)

    def route(self, attended: Attended) -> LayerRouted:
        assert self.moe is not None
        residual_BSD, normed_BSD = self._add_norm(attended)
        return LayerRouted(residual_BSD, self.moe.route(normed_BSD))

    def preprocess(self, entered: LayerRouted) -> LayerPrepared:
        assert self.moe is not None
        return LayerPrepared(entered.residual_BSD, self.moe.preprocess(entered.routed))

    def run_experts(self, entered: LayerPrepared) -> LayerOutput:
        assert self.moe is not None
        output = self.moe.run_experts(entered.prepared)
        hidden_BSD = entered.residual_BSD + self._dropout(output.hidden)
        return LayerOutput(hidden_BSD, output.aux_loss, output.dropped_tokens)

    def init_weights(self, std: float, out_std: float) -> None:
        """Draw normal weights, norms of one; ``out_std`` is for projections into the residual."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        self.attention.init_weights(std, out_std)
        if self.moe is not None:
            self.moe.init_weights(std, out_std)
        if self.mlp is not None:
            nn.init.normal_(self.mlp.w1.weight, std=std)
            nn.init.normal_(self.mlp.w2.weight, std=out_std)

    def _add_norm(self, attended: Attended) -> tuple[Tensor, Tensor]:
        norm = self.mlp_norm
        return add_rms_norm(attended.residual_BSD, attended.update_BSD, norm.weight, norm.eps)

    def _dropout(self, update_BSD: Tensor) -> Tensor:
        return functional.dropout(update_BSD, self.config.hidden_dropout, self.training)
