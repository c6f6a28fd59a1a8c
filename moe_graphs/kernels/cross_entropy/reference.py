"""Cross entropy in plain torch: what the kernels are held against, and the path without them.

Shapes: N rows (tokens), V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from moe_graphs.kernels.precision import accumulation_dtype


def cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """torch's, of fp32 logits (fp64 stays fp64): keeps their log-softmax for the backward."""
    logits_NV = logits_NV.to(accumulation_dtype(logits_NV))
    return functional.cross_entropy(
        logits_NV, targets_N, ignore_index=ignore_index, reduction=reduction
    )
