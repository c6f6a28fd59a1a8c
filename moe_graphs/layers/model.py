"""A decoder-only language model, built of ``TransformerLayer``.

Shapes: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_graphs.dispatch import Dispatcher, LocalDispatcher
from moe_graphs.kernels.cross_entropy.loss_rule import PLAIN, LossRule
from moe_graphs.layers.head import Head
from moe_graphs.layers.model_config import Precision, TransformerConfig
from moe_graphs.layers.moe import moe_layers
from moe_graphs.layers.norm import RMSNorm
from moe_graphs.layers.rope import RotaryEmbedding
from moe_graphs.layers.transformer import TransformerLayer
from moe_graphs.staged import record


@record
class ModelOutput:
    """Output of a ``LanguageModel``.

    Attributes:
        aux_loss: 0-dim fp32, the sum over the layers; add it to the loss.
        dropped_tokens: 0-dim int64 on the device, the sum over the layers.
    """

    logits_BSV: Tensor
    aux_loss: Tensor
    dropped_tokens: Tensor


@record
class ModelLoss:
    """Output of a ``LanguageModel`` that was given targets.

    Attributes:
        loss: cross entropy in fp32 and in nats, 0-dim, or ``[B * S]`` without a reduction.
        aux_loss, dropped_tokens: as in ``ModelOutput``.
    """

    loss: Tensor
    aux_loss: Tensor
    dropped_tokens: Tensor


class LanguageModel(nn.Module):
    """Embedding, layers, norm, output projection (not tied to the embedding).

    All layers use one dispatcher (default: ``LocalDispatcher``) and one rotary table. The
    embedding's backward is deterministic on CUDA: torch sorts the tokens, without atomics.

    Attributes:
        hf_values: the config.json that ``from_pretrained`` read. ``save_pretrained`` writes it
            back, with the fields that we do not use. None for a model that was not loaded.
    """

    hf_values: dict[str, Any] | None = None

    def __init__(
        self,
        config: TransformerConfig,
        dispatcher: Dispatcher | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.rope = RotaryEmbedding.of(config, device)
        self.layers = nn.ModuleList(
            TransformerLayer(config, index, dispatcher, self.rope, **factory)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **factory)
        self.head = Head(config.hidden_size, config.vocab_size, **factory)
        if not self.embedding.weight.is_meta:
            self.init_weights()

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike[str],
        *,
        dispatcher: Dispatcher | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_sequence_length: int | None = None,
        linear: str = "torch",
        experts: str = "moe_graphs",
        precision: Precision = "weights",
        dense_precision: Precision | tuple[Precision, ...] = "weights",
    ) -> Self:
        """Load the model of a Hugging Face directory: config.json and safetensors, also sharded.

        Families: Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 (also in FP8; its layers that predict
        later tokens are left out with a warning) and Llama. Everything is checked by config.json
        and the files' headers before a weight is read. Peak memory is the model and one tensor.
        Experts that the dispatcher keeps on other ranks are not read.

        Args:
            device: "meta" builds a model without weights and reads no weight (for
                ``parallel.load_pretrained_sharded``).
            dtype: the parameters' dtype; None for the dtype of the files' matrices, bf16 for FP8.
            max_sequence_length: positions of the rotary tables (default: the model's).
            linear, experts: kernels, as in ``TransformerConfig`` and ``MoEConfig``. Experts with
                another library's kernels add the experts of one layer to the peak memory.
            precision: of the routed experts, as in ``MoEConfig``.
            dense_precision: of other layers, ``TransformerConfig.precision``.

        Raises:
            ValueError: an architecture that our layers do not compute, or files that are missing,
                truncated, or hold other tensors than config.json says; the message names what.
        """
        from moe_graphs.checkpoints.loading import dtype_of, fill, read_files

        files = read_files(Path(directory), max_sequence_length)
        dtype = dtype_of(files) if dtype is None else dtype
        config = replace(files.config, linear=linear, precision=dense_precision)
        if config.moe is not None:
            config = replace(config, moe=replace(config.moe, precision=precision))
        elif precision != "weights":
            raise ValueError(f"precision={precision!r} is of experts, and {directory} has none")
        model = cls(config, dispatcher, device="meta", dtype=dtype)
        local_experts = (LocalDispatcher() if dispatcher is None else dispatcher).local_experts
        place = torch.device(device or torch.get_default_device())
        if place.type != "meta":
            fill(model, files, local_experts, place)
            model.reset_buffers()
        if experts != "moe_graphs":
            model.use_experts(experts)
        model.hf_values = files.values
        return model

    def save_pretrained(
        self, directory: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9
    ) -> None:
        """Write config.json and safetensors with the names and shapes that transformers writes.

        All files are written under ``directory/model.partial`` first and stay there if the process
        dies before they are renamed. A model in ``directory`` is replaced, other files stay. At
        most one shard is in memory at once. Training options that config.json has no names for
        (``hf_config``) and the routers' counters are not saved. Under data parallelism call this
        method on one rank.

        Raises:
            ValueError: no family of transformers computes this model, or the model holds only some
                of the experts.
            OSError: the files could not be written. Earlier files in ``directory`` are untouched.
        """
        from moe_graphs.checkpoints.saving import save

        save(self, self.config, self.hf_values, Path(directory), max_shard_bytes)

    def use_experts(self, kind: str) -> None:
        """Call ``MoELayer.use_experts`` on every MoE layer, one after the other."""
        if self.config.moe is not None:
            moe = replace(self.config.moe, experts=kind)
            self.config = replace(self.config, moe=moe)
        for layer in moe_layers(self):
            layer.use_experts(kind)

    if TYPE_CHECKING:  # nn.Module's says Any

        @overload
        def __call__(
            self, tokens_BS: Tensor, *, document_ids_BS: Tensor | None = None
        ) -> ModelOutput: ...

        @overload
        def __call__(
            self,
            tokens_BS: Tensor,
            targets_BS: Tensor,
            *,
            document_ids_BS: Tensor | None = None,
            reduction: str = "mean",
            rule: LossRule = PLAIN,
        ) -> ModelLoss: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        *,
        document_ids_BS: Tensor | None = None,
        reduction: str = "mean",
        rule: LossRule = PLAIN,
    ) -> ModelOutput | ModelLoss:
        """Compute logits or, with targets, their cross entropy.

        With targets the logits are never whole: at 16k tokens and a vocabulary of 152k that spares
        10 GiB.

        Args:
            tokens_BS: int64.
            targets_BS: int64, the token that follows each one; targets of -100 do not count.
            document_ids_BS: integers that differ for different documents of a row. A token sees
                its own document only; positions go on through the row, which only their differences
                matter for. ``layers.documents`` computes them from positions or separators.
            reduction: "mean" over the targets that count, "sum" or "none".
            rule: z-loss, label smoothing, scale and soft cap of the logits, as the loss has them.

        Raises:
            ValueError: the documents' numbers have another shape than the tokens.
        """
        if document_ids_BS is not None and document_ids_BS.shape != tokens_BS.shape:
            raise ValueError(
                f"document_ids_BS {tuple(document_ids_BS.shape)} wants the shape of the tokens, "
                f"{tuple(tokens_BS.shape)}"
            )
        hidden_BSD = self.embedding(tokens_BS)
        aux_loss = torch.zeros((), dtype=torch.float32, device=hidden_BSD.device)
        dropped = torch.zeros((), dtype=torch.int64, device=hidden_BSD.device)
        for layer in self.layers:
            output = layer(hidden_BSD, document_ids_BS)
            hidden_BSD = output.hidden_BSD
            if layer.is_moe:
                aux_loss = aux_loss + output.aux_loss
                dropped = dropped + output.dropped_tokens
        hidden_BSD = self.norm(hidden_BSD)
        if targets_BS is None:
            return ModelOutput(self.head(hidden_BSD), aux_loss, dropped)
        return ModelLoss(self.head(hidden_BSD, targets_BS, reduction, rule), aux_loss, dropped)

    @torch.no_grad()
    def init_weights(self, std: float = 0.02) -> None:
        """Draw normal weights; projections into the residual get ``std / sqrt(2 L)`` (GPT-2).

        The rotary tables are computed and the routers' buffers are zeroed as well, so this call
        completes a model that was built on the meta device and moved with ``to_empty``.
        """
        out_std = std / math.sqrt(2 * self.config.num_layers)
        nn.init.normal_(self.embedding.weight, std=std)
        nn.init.normal_(self.head.weight, std=std)
        nn.init.ones_(self.norm.weight)
        self.reset_buffers()
        for layer in self.modules():
            if isinstance(layer, TransformerLayer):
                layer.init_weights(std, out_std)

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Compute the rotary tables and zero the counters of routers and rows."""
        self.rope.reset_tables()
        for layer in moe_layers(self):
            layer.router.tokens_per_expert.zero_()
            layer.zero_counters()

    def update_expert_bias(
        self, group: dist.ProcessGroup | None = None, *, skipped: Tensor | None = None
    ) -> None:
        """Call ``TopKRouter.update_expert_bias`` on every MoE layer, between steps."""
        for moe in moe_layers(self):
            moe.router.update_expert_bias(group, skipped=skipped)

    def num_parameters(self, *, active: bool = False) -> int:
        """Number of parameters of the whole model, experts on other ranks included.

        Args:
            active: count only those that a token uses: ``top_k`` of the routed experts.
        """
        total = sum(parameter.numel() for parameter in self.parameters())
        for moe in moe_layers(self):
            held = list(moe.experts.parameters())
            local = sum(parameter.numel() for parameter in held)
            # A DTensor has the shape of all experts, a plain weight that of this rank's.
            is_whole = any(hasattr(parameter, "to_local") for parameter in held)
            experts = moe.config.num_experts if is_whole else len(moe.experts.local_experts)
            count = moe.config.top_k if active else moe.config.num_experts
            total += local // experts * count - local
        return total

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of one token's forward and backward, for model FLOPs utilisation.

        ``6 N + 6 L H (Q + V) S`` (PaLM, arXiv 2204.02311, appendix B): N active parameters
        without the embedding table, Q and V the head dims of keys and values, attention counted
        as if it were not causal, as is customary.
        """
        config = self.config
        matmul = self.num_parameters(active=True) - self.embedding.weight.numel()
        head_sizes = config.head_size + config.value_head_size
        attention = config.num_layers * config.num_heads * head_sizes * sequence_length
        return 6 * (matmul + attention)
