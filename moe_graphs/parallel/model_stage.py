"""A stage of a pipeline: some layers of a language model, with its embedding or head.

Shapes: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.kernels.cross_entropy.loss_rule import PLAIN, LossRule
from moe_graphs.layers import LanguageModel


class ModelStage(nn.Module):
    """Consecutive layers of a model, under the names that they have in the model.

    The stage shares its modules with the model. The first stage has the embedding, the last one
    norm and head; in other stages these are None.

    Attributes:
        hidden_dtype: dtype of the hidden states that go from stage to stage.
        returns_logits: whether a last stage that has targets returns its logits in spite of them.
        rule: what the mean loss is besides cross entropy.
    """

    embedding: nn.Module | None
    norm: nn.Module | None
    head: nn.Module | None
    returns_logits = False
    rule: LossRule = PLAIN

    def __init__(
        self,
        model: LanguageModel,
        numbers: range,
        *,
        hidden_dtype: torch.dtype,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.config, self.hidden_dtype = model.config, hidden_dtype
        self._autocast = autocast
        self._dropped: list[Tensor] = []
        first, last = numbers.start == 0, numbers.stop == len(model.layers)
        self.embedding = model.embedding if first else None
        self.layers = numbered_layers({number: model.layers[number] for number in numbers})
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(
        self,
        entered: Tensor,
        aux_weight_1: Tensor,
        targets_BS: Tensor | None = None,
        summed_BS: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states or logits from tokens ``[B, S]`` or hidden states ``[B, S, D]``.

        Args:
            aux_weight_1: gradient of this stage's aux losses, one number.
            targets_BS: with them the last stage computes their mean cross entropy by chunks; its
                logits are never whole.
            summed_BS: with these targets it computes the sum instead.

        Raises:
            ValueError: the hidden states have another dtype than the next stage expects.
        """
        with self._autocast():
            hidden_BSD = entered if self.embedding is None else self.embedding(entered)
            aux_losses, dropped = [], []
            for layer in self.layers:
                output = layer(hidden_BSD)
                hidden_BSD = output.hidden_BSD
                if output.aux_loss is not None:
                    aux_losses.append(output.aux_loss)
                    dropped.append(output.dropped_tokens)
            if aux_losses:
                aux_loss = torch.stack(aux_losses).sum()
                hidden_BSD = _WithAuxLoss.apply(hidden_BSD, aux_loss, aux_weight_1)
                self._dropped += dropped
            if self.norm is not None and self.head is not None:
                if self.returns_logits:
                    return self.head(self.norm(hidden_BSD))
                if summed_BS is not None:
                    return self.head(self.norm(hidden_BSD), summed_BS, "sum")
                return self.head(self.norm(hidden_BSD), targets_BS, rule=self.rule)
        if hidden_BSD.dtype != self.hidden_dtype:
            raise ValueError(
                f"hidden_dtype: the next stage expects {self.hidden_dtype} and the hidden states "
                f"are {hidden_BSD.dtype}: pass pipeline_stages(hidden_dtype={hidden_BSD.dtype})"
            )
        return hidden_BSD

    def logits_dtype(self, device: torch.device) -> torch.dtype:
        """Dtype of the last stage's logits."""
        with self._autocast():
            if torch.is_autocast_enabled(device.type):
                return torch.get_autocast_dtype(device.type)
        return self.hidden_dtype

    def take_dropped_tokens(self) -> Tensor | int:
        """Return the dropped tokens of all forwards since the last call: 0-dim int64, or 0."""
        taken, self._dropped[:] = list(self._dropped), []
        return torch.stack(taken).sum() if taken else 0


def numbered_layers(layers: Mapping[int, nn.Module]) -> nn.ModuleList:
    """Module list of layers under their numbers, which need not begin with 0.

    The list can be iterated over; it cannot be indexed by number.
    """
    found = nn.ModuleList()
    for number, layer in layers.items():
        found.add_module(str(number), layer)
    return found


class _WithAuxLoss(torch.autograd.Function):
    """Identity of hidden states that gives the aux losses their gradient in its backward.

    Stages pass only hidden states on, so an aux loss has no other way into the backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden_BSD: Tensor, aux_loss: Tensor, weight_1: Tensor) -> Tensor:
        ctx.save_for_backward(weight_1)
        # An alias without autograd's view: FSDP2 warns about views, and a copy would cost memory.
        return hidden_BSD.detach()

    @staticmethod
    def backward(ctx: Any, gradient_BSD: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight_1,) = ctx.saved_tensors
        return gradient_BSD, weight_1.reshape(()), None
