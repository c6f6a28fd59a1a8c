"""Layers in FP8 with few rows, which may be faster in bf16: told once, and counted."""

from __future__ import annotations

import warnings

from moe_graphs import portable_launches

# Rows of an expert from which a layer's forward and backward in FP8 are faster than in bf16: to
# quantize the weights takes as long for few rows as for many. Measured on H200s from a7a3aba3 to
# 148a8abf (2026-11-29), speed in bf16 = 1: 0.85 with 128 rows, 1.2 with 512, 1.3 with 1,024, 1.5
# with 2,048; with codes of weights at hand 1.3, 1.41, 1.44 and 1.61. Nothing is measured between
# 128 and 512 rows.
PAYS_FROM = 512
_NAME = "FP8 with few rows an expert, where bf16 may be faster"


def tell_if_few(rows: int, experts: int) -> None:
    """Count the forward of a layer that may be faster in bf16, and say so the first time."""
    each = rows // experts
    if not rows or each >= PAYS_FROM:
        return
    if _NAME not in portable_launches.portable_launches():
        warnings.warn(
            f"moe_graphs: experts (or projections) in FP8 get {each} rows each on average. "
            f"Forward and backward of a layer may be faster in bf16 with fewer than {PAYS_FROM}, "
            f"since quantizing the weights takes as long for few rows as for many: take "
            f"precision='weights', more tokens at once, or several microbatches within "
            f"unchanged_weights(). graphs.report().portable_launches counts such forwards",
            stacklevel=2,
        )
    portable_launches.count(_NAME)
