"""Kernels of the routed experts: ours, Transformer Engine's or MegaBlocks'.

A backend is a module that is called with the fields of ``Dispatched``: tokens, the order of their
rows, and routing weights. Backends of other libraries live in ``integrations``. ``EXPERTS`` in
``registry.py`` has their names, and imports them when a config asks for them.

Shapes: D model, F ffn, e experts of this rank, X tokens or sorted rows, K top-k, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_graphs.kernels import RowOrder, permute, unpermute
from moe_graphs.kernels.fp8 import check_sizes
from moe_graphs.layers.model_config import MoEConfig
from moe_graphs.registry import EXPERTS


class ExpertsBackend(nn.Module):
    """Base class of the routed experts of a ``MoELayer``.

    A backend holds ``local_experts`` consecutive experts, from ``first_expert`` on, out of
    ``num_experts`` (default: all of them). Subclasses make their weights in ``make_weights``;
    values are drawn afterwards.

    Attributes:
        recompute: whether the backward computes all activations again, where a backend can.
        host_sync: why the forward cannot be captured, or None.
        takes_tail: whether rows that belong to no expert may follow the experts' rows, as some
            dispatchers leave them (``Dispatcher.leaves_tail``).
        recomputes: whether ``recompute`` makes a difference.
        precision: that of ``MoEConfig``.
        computes_fp8: whether a backend computes in FP8.
        keeps_codes: whether codes of weights in FP8 are kept from the forward to the backward.
            ``parallelize`` says no where FSDP2 frees weights in between.
    """

    host_sync: str | None = None
    takes_tail: bool = False
    recomputes: bool = False
    computes_fp8: bool = False
    keeps_codes: bool = True

    def __init__(
        self,
        num_local_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        first_expert: int = 0,
        num_experts: int | None = None,
        recompute: bool = False,
        precision: str = "weights",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.local_experts = range(first_expert, first_expert + num_local_experts)
        self.num_experts = num_local_experts if num_experts is None else num_experts
        self.recompute, self.precision = recompute, precision
        if precision != "weights":
            check_sizes(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
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
        """Create the parameters of ``local_experts``, or modules with them; any values."""
        raise NotImplementedError

    def forward(
        self, tokens_XD: Tensor, order: RowOrder, weights_XK: Tensor, is_sorted: bool = False
    ) -> Tensor:
        """Compute each token's sum of its experts' outputs, times the routing weights.

        Args:
            tokens_XD: tokens, or with ``is_sorted`` their rows in the order of ``order``.
            order: the rows of this rank's experts. The last end is their number, or less if this
                backend takes a tail.
            weights_XK: routing weights of the pairs, fp32.
        """
        rows_RD = tokens_XD if is_sorted else permute(tokens_XD, order)
        return unpermute(self.run_rows(rows_RD, order.offsets_E), order, weights_XK)

    def run_rows(self, rows_RD: Tensor, offsets_e: Tensor) -> Tensor:
        """Compute the experts' outputs ``[R, D]`` from their rows ``[R, D]``.

        Backends implement this method, or ``forward`` if they gather and add up rows themselves.

        Args:
            rows_RD: rows sorted by expert.
            offsets_e: int32 ends of the experts' rows. The last one is R, or less if this backend
                takes a tail; the outputs of the tail may be anything.
        """
        raise NotImplementedError

    def stacked_weights(self) -> tuple[Tensor, Tensor]:
        """Weights in our layout, without a gradient.

        Returns:
            ``w1 [e, D, 2F]``, gate and up side by side, and ``w2 [e, F, D]``: copies if the
            backend has another layout.
        """
        raise NotImplementedError

    def matrices(self) -> dict[nn.Parameter, tuple[int, ...]] | None:
        """Stacks ``[e, in, out]`` of matrices, with the sizes of those side by side along ``out``.

        None if the weights have another layout; Muon refuses them then.
        """
        return None

    def load_stacked_weights(self, w1_eD2F: Tensor, w2_eFD: Tensor) -> None:
        """Copy weights of our layout into the backend's parameters."""
        raise NotImplementedError

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, out_std: float = 0.02) -> None:
        """Draw normal weights: the same values from the same seed for every backend."""
        w1_eD2F, w2_eFD = (torch.empty_like(weight) for weight in self.stacked_weights())
        self.draw_experts(w1_eD2F, std)
        self.draw_experts(w2_eFD, out_std)
        self.load_stacked_weights(w1_eD2F, w2_eFD)

    @torch.no_grad()
    def draw_experts(self, weight_eXY: Tensor, std: float) -> None:
        """Draw the weights of all experts in turn and keep the local ones.

        Ranks that draw from one seed then hold different experts, and all ranks together hold the
        experts that a single rank would hold. Drawing takes the memory of one expert if some
        experts are on other ranks.
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
    """Do nothing, in place of another library's initialisation."""


def build_experts(
    config: MoEConfig,
    hidden_size: int,
    local_experts: range,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ExpertsBackend:
    """Build the backend ``config.experts`` with the experts ``local_experts`` of a layer.

    Raises:
        ValueError: ``config.experts`` is the place of a class that cannot be imported, or the
            sizes are none for ``config.precision``.
        ImportError: ``config.experts`` needs a library that is not installed; the message says
            which.
    """
    return EXPERTS[config.experts](
        len(local_experts),
        hidden_size,
        config.ffn_hidden_size,
        first_expert=local_experts.start,
        num_experts=config.num_experts,
        recompute=config.recompute == "experts",
        precision=config.precision,
        device=device,
        dtype=dtype,
    )
