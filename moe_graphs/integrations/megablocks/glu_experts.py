"""MegaBlocks' expert networks as backends of ``MoELayer``: grouped, and block-sparse.

Weights lie as MegaBlocks keeps them, under its names: ``mlp.w1`` (gate), ``mlp.v1`` (up) and
``mlp.w2``, each ``[e * F, D]``.

Shapes: D model, F ffn, e experts of this rank, R rows, P padded rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_graphs.integrations.megablocks.block_layout import (
    BLOCK,
    block_layout,
    num_blocks,
    topology,
)
from moe_graphs.integrations.megablocks.glu_weights import load_stacked, stacked
from moe_graphs.integrations.megablocks.library import import_megablocks, swiglu_arguments
from moe_graphs.kernels import permute
from moe_graphs.layers.expert_backends import ExpertsBackend, left_as_it_is
from moe_graphs.staged import end_capture_here


class _MegaBlocksGLU(ExpertsBackend):
    """One of MegaBlocks' GLUs as ``mlp``, on weights that are drawn as those of any backend."""

    mlp: Any

    def make_weights(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        experts = len(self.local_experts)
        self._check(experts, hidden_size, ffn_hidden_size, dtype)
        self.mlp = self._build(
            moe_num_experts=experts,
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            device=torch.get_default_device() if device is None else torch.device(device),
            dtype=dtype,
            init_method=left_as_it_is,
            output_layer_init_method=left_as_it_is,
        )

    def _check(self, experts: int, hidden_size: int, ffn_hidden_size: int, dtype: Any) -> None:
        raise NotImplementedError

    def _build(self, **arguments: Any) -> Any:
        raise NotImplementedError

    def stacked_weights(self) -> tuple[Tensor, Tensor]:
        return stacked(self.mlp, len(self.local_experts))

    @torch.no_grad()
    def load_stacked_weights(self, w1_eD2F: Tensor, w2_eFD: Tensor) -> None:
        load_stacked(self.mlp, len(self.local_experts), w1_eD2F, w2_eFD)

    def _no_rows(self, rows_RD: Tensor) -> Tensor:
        """Nothing in, nothing out: no kernel is launched, and the weights' gradients are zero."""
        weights = (self.mlp.w1, self.mlp.v1, self.mlp.w2)
        return rows_RD + torch.stack([weight.sum() for weight in weights]).sum().to(rows_RD.dtype)


class MegaBlocksExperts(_MegaBlocksGLU):
    """``megablocks.layers.glu.GroupedGLU``: in bfloat16 only, for that is all it multiplies.

    It reads the experts' numbers of rows on the host, once in a forward. Raises ``ValueError`` for
    another dtype, and ``ImportError`` without megablocks and grouped_gemm.
    """

    host_sync = "experts='megablocks' read their numbers of rows on the host"

    def _check(self, experts: int, hidden_size: int, ffn_hidden_size: int, dtype: Any) -> None:
        if dtype != torch.bfloat16:
            raise ValueError(
                f"experts='megablocks' multiply bfloat16 only, got {dtype}: build the model with "
                f"dtype=torch.bfloat16, or choose other experts"
            )

    def _build(self, **arguments: Any) -> Any:
        library = import_megablocks("experts='megablocks'")
        return library.GroupedGLU(swiglu_arguments(library, **arguments))

    def forward(self, rows_RD: Tensor, offsets_e: Tensor) -> Tensor:
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


class MegaBlocksSparseExperts(_MegaBlocksGLU):
    """``megablocks.layers.glu.SparseGLU``: experts' rows padded to blocks of 128, then block-sparse
    products. Widths in multiples of 128; bfloat16 or float16, or float32 weights under autocast.

    Nothing is read on the host, which MegaBlocks' own layer does: there is room for as many blocks
    as any routing of so many rows can need, and those left over are zero. So it can be captured.

    MegaBlocks refuses its sparse layers with Triton 3.2 and later, where products of stk's 16-bit
    block indices overflow. The indices made here have 32 bits. Raises ``ValueError`` where these
    would not do, either.
    """

    def _check(self, experts: int, hidden_size: int, ffn_hidden_size: int, dtype: Any) -> None:
        for name, size in (("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size)):
            if size % BLOCK:
                raise ValueError(
                    f"experts='megablocks_sparse' take multiples of {BLOCK}, got {name}={size}: "
                    f"choose experts='megablocks' or 'moe_graphs'"
                )
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"experts='megablocks_sparse' take bfloat16, float16 or, under autocast, float32, "
                f"got {dtype}"
            )
        _check_index("the weights of this rank's experts", experts * ffn_hidden_size * hidden_size)

    def _build(self, **arguments: Any) -> Any:
        library = import_megablocks("experts='megablocks_sparse'")
        made = swiglu_arguments(library, **arguments)
        made.mlp_impl = "sparse"  # which its constructor refuses, see above
        return library.SparseGLU(made)

    def forward(self, rows_RD: Tensor, offsets_e: Tensor) -> Tensor:
        self._check_rows(rows_RD)
        if not rows_RD.shape[0]:
            return self._no_rows(rows_RD)
        layout = block_layout(offsets_e, rows_RD.shape[0])
        width = self.mlp.w1.shape[0] // len(self.local_experts)
        padded_PD = permute(rows_RD, layout.padded)
        padded_PD = self.mlp(padded_PD, topology(layout, width, rows_RD.dtype))
        return permute(padded_PD, layout.back)

    def _check_rows(self, rows_RD: Tensor) -> None:
        weight, device = self.mlp.w1, rows_RD.device.type
        same = weight.dtype == rows_RD.dtype or torch.is_autocast_enabled(device)
        if rows_RD.dtype not in (torch.bfloat16, torch.float16) or not same:
            raise ValueError(
                f"experts='megablocks_sparse' multiply bfloat16 or float16 (float32 would be "
                f"rounded to TF32), got rows of {rows_RD.dtype} and weights of {weight.dtype}: "
                f"build the model with dtype=torch.bfloat16, or use autocast"
            )
        rows = BLOCK * num_blocks(rows_RD.shape[0], len(self.local_experts))
        width = weight.shape[0] // len(self.local_experts)
        _check_index("the padded rows", rows * max(width, weight.shape[1]))


def _check_index(what: str, elements: int) -> None:
    if elements >= 2**31:
        raise ValueError(
            f"experts='megablocks_sparse' count elements in 32 bits, and {what} are {elements}: "
            f"choose experts='megablocks' or 'moe_graphs'"
        )
