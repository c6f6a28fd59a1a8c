"""Layers in FP8 with few rows, which would be faster in bf16: told once, and counted."""

from __future__ import annotations

import warnings

from moe_graphs import portable_launches, weight_codes

# Rows of an expert from which a layer's forward and backward in FP8 are faster than in bf16: to
# quantize the weights takes as long for few rows as for many. Measured on an H200 at 2b7c5f68
# (2026-11-28), speed in bf16 = 1: 0.99 with 512 rows, 1.13 with 1,024, 1.33 to 1.36 with 2,048;
# with codes of weights at hand 1.24, 1.22 and 1.41 to 1.46.
PAYS_FROM = 768
PAYS_WITH_CODES_FROM = 512
_NAME = "FP8 with few rows an expert, where bf16 is faster"


def tell_if_few(rows: int, experts: int) -> None:
    """Count the forward of a layer that is faster in bf16, and say so the first time."""
    each = rows // experts
    pays_from = PAYS_WITH_CODES_FROM if weight_codes.is_open() else PAYS_FROM
    if not rows or each >= pays_from:
        return
    if _NAME not in portable_launches.portable_launches():
        warnings.warn(
            f"moe_graphs: experts (or projections) in FP8 get {each} rows each on average. "
            f"Forward and backward of a layer are faster in bf16 with fewer than {pays_from}, "
            f"since quantizing the weights takes as long for few rows as for many: take "
            f"precision='weights', more tokens at once, or several microbatches within "
            f"unchanged_weights(). graphs.report().portable_launches counts such forwards",
            stacklevel=2,
        )
    portable_launches.count(_NAME)
