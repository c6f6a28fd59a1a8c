"""Whose kernels the routed experts run on: ours, Transformer Engine's or MegaBlocks'.

A backend is a module that is called with rows sorted by expert and the ends of the experts' rows.
Those of other libraries live in ``integrations`` and are imported when a config asks for them.

Shapes: D model, F ffn, e experts of this rank, R rows.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.layers.model_config import EXPERT_BACKENDS, MoEConfig


class ExpertsBackend(nn.Module):
    """What ``MoELayer`` asks of its experts.

    They are experts ``first_expert`` and following of ``num_experts`` (default: all of them).
    Subclasses make their weights in ``make_weights``; values are drawn afterwards.

    Attributes:
        host_sync: why their forward cannot be captured, or None.
        takes_tail: whether rows may follow that are no expert's, as some dispatchers leave them.
    """

    host_sync: str | None = None
    takes_tail: bool = False

    def __init__(
        self,
        num_local_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        first_expert: int = 0,
        num_experts: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.local_experts = range(first_expert, first_expert + num_local_experts)
        self.num_experts = num_local_experts if num_experts is None else num_experts
        self.make_weights(hidden_size, ffn_hidden_size, device, dtype)
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.init_weights()  # thousands of experts take their time

    def make_weights(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Sets the parameters, or modules that have them, of ``local_experts``; any values."""
        raise NotImplementedError

    def forward(self, rows_RD: Tensor, offsets_e: Tensor) -> Tensor:
        """``[R, D]`` to ``[R, D]``. ``offsets_e``: int32 ends of the experts' rows; the last is R,
        or less if they take a tail, where anything may come out."""
        raise NotImplementedError

    def stacked_weights(self) -> tuple[Tensor, Tensor]:
        """The weights in our layout, copied if theirs is another: ``w1 [e, D, 2F]``, gate and up
        side by side, and ``w2 [e, F, D]``. Without a gradient."""
        raise NotImplementedError

    def load_stacked_weights(self, w1_eD2F: Tensor, w2_eFD: Tensor) -> None:
        """Copies weights of our layout into theirs."""
        raise NotImplementedError

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, out_std: float = 0.02) -> None:
        """Normal weights: the same values from the same seed, whatever the backend."""
        w1_eD2F, w2_eFD = (torch.empty_like(weight) for weight in self.stacked_weights())
        self.draw_experts(w1_eD2F, std)
        self.draw_experts(w2_eFD, out_std)
        self.load_stacked_weights(w1_eD2F, w2_eFD)

    @torch.no_grad()
    def draw_experts(self, weight_eXY: Tensor, std: float) -> None:
        """Draws the weights of all experts in turn and keeps the local ones.

        So ranks that draw from one seed hold different experts, and together exactly those that
        a single rank would hold. Costs one expert's memory, if there are others.
        """
        elsewhere_XY: Tensor | None = None
        for expert in range(self.num_experts):
            if expert in self.local_experts:
                weight_eXY[expert - self.local_experts.start].normal_(std=std)
                continue
            if elsewhere_XY is None:
                elsewhere_XY = torch.empty_like(weight_eXY[0])
            elsewhere_XY.normal_(std=std)


def left_as_it_is(weight: Tensor) -> None:
    """In the place of another library's initialisation."""


_WHERE = {
    "moe_graphs": ("moe_graphs.layers.experts", "GroupedExperts"),
    "transformer_engine": ("moe_graphs.integrations.transformer_engine", "TEExperts"),
    "megablocks": ("moe_graphs.integrations.megablocks", "MegaBlocksExperts"),
}
assert tuple(_WHERE) == EXPERT_BACKENDS


def build_experts(
    config: MoEConfig,
    hidden_size: int,
    local_experts: range,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ExpertsBackend:
    """The experts ``local_experts`` of a layer.

    Raises:
        ImportError: ``config.experts`` needs a library that is not installed; says which.
    """
    module, name = _WHERE[config.experts]
    backend: Any = getattr(importlib.import_module(module), name)
    return backend(
        len(local_experts),
        hidden_size,
        config.ffn_hidden_size,
        first_expert=local_experts.start,
        num_experts=config.num_experts,
        device=device,
        dtype=dtype,
    )
