"""MegaBlocks' expert network as a backend of ``MoELayer``.

Weights lie as MegaBlocks keeps them, under its names: ``mlp.w1`` (gate), ``mlp.v1`` (up) and
``mlp.w2``, each ``[e * F, D]``.

Shapes: D model, F ffn, e experts of this rank, R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_graphs.integrations.megablocks.glu_weights import load_stacked, stacked
from moe_graphs.integrations.megablocks.library import import_megablocks, swiglu_arguments
from moe_graphs.layers.expert_backends import ExpertsBackend, left_as_it_is
from moe_graphs.staged import end_capture_here


class MegaBlocksExperts(ExpertsBackend):
    """``megablocks.layers.glu.GroupedGLU`` as ``mlp``, which multiplies bfloat16 only.

    It reads the experts' numbers of rows on the host, once in a forward.

    Raises:
        ValueError: another dtype than bfloat16.
        ImportError: megablocks or grouped_gemm is not installed.
    """

    host_sync = "experts='megablocks' read their numbers of rows on the host"
    mlp: Any

    def make_weights(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype != torch.bfloat16:
            raise ValueError(
                f"experts='megablocks' multiply bfloat16 only, got {dtype}: build the model with "
                f"dtype=torch.bfloat16, or choose other experts"
            )
        library = import_megablocks("experts='megablocks'")
        arguments = swiglu_arguments(
            library,
            moe_num_experts=len(self.local_experts),
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            device=torch.get_default_device() if device is None else torch.device(device),
            dtype=dtype,
            init_method=left_as_it_is,
            output_layer_init_method=left_as_it_is,
        )
        self.mlp = library.GroupedGLU(arguments)

    def stacked_weights(self) -> tuple[Tensor, Tensor]:
        return stacked(self.mlp, len(self.local_experts))

    @torch.no_grad()
    def load_stacked_weights(self, w1_eD2F: Tensor, w2_eFD: Tensor) -> None:
        load_stacked(self.mlp, len(self.local_experts), w1_eD2F, w2_eFD)

    def run_rows(self, rows_RD: Tensor, offsets_e: Tensor) -> Tensor:
        dtypes = {rows_RD.dtype, self.mlp.w1.dtype, self.mlp.v1.dtype, self.mlp.w2.dtype}
        if dtypes != {torch.bfloat16}:
            raise ValueError(
                f"experts='megablocks' multiply bfloat16 only, got rows of {rows_RD.dtype} and "
                f"weights of {self.mlp.w1.dtype}: keep both in bfloat16"
            )
        end_capture_here(self.host_sync)
        if not rows_RD.shape[0]:
            return self._no_rows(rows_RD)
        rows_e = torch.diff(offsets_e, prepend=offsets_e.new_zeros(1))
        return self.mlp(rows_RD, rows_e)

    def _no_rows(self, rows_RD: Tensor) -> Tensor:
        """Nothing in, nothing out: no kernel is launched, and the weights' gradients are zero."""
        weights = (self.mlp.w1, self.mlp.v1, self.mlp.w2)
        return rows_RD + torch.stack([weight.sum() for weight in weights]).sum().to(rows_RD.dtype)
