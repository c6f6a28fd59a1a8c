"""The experts' two grouped GEMMs with the SwiGLU between them.

Shapes: R routed rows, D model, F ffn, E experts.
"""

from __future__ import annotations

from torch import Tensor

from moe_graphs.kernels.gemm.op import grouped_gemm
from moe_graphs.kernels.swiglu import swiglu


def swiglu_gemms(rows_RD: Tensor, w1_ED2F: Tensor, w2_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """``grouped_gemm(swiglu(grouped_gemm(rows, w1, offsets)), w2, offsets)``; never syncs.

    Args:
        w1_ED2F: gate and up side by side. Both weights may be transposed views, as for
            ``grouped_gemm``, and are cast like its.
        offsets_E: int32 cumulative ends. Behind the last one anything may come out, in the rows and
            in their gradient.

    Raises:
        ValueError: shapes or dtypes do not fit, or the GPU path does not take them.
    """
    if w2_EFD.dim() != 3 or w1_ED2F.dim() != 3 or w1_ED2F.shape[2] != 2 * w2_EFD.shape[1]:
        raise ValueError(
            f"swiglu_gemms wants w1 [E, D, 2F] and w2 [E, F, D], got {tuple(w1_ED2F.shape)} and "
            f"{tuple(w2_EFD.shape)}"
        )
    gate_up_R2F = grouped_gemm(rows_RD, w1_ED2F, offsets_E, zero_tail=False)
    return grouped_gemm(swiglu(gate_up_R2F), w2_EFD, offsets_E, zero_tail=False)
