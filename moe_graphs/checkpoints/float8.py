"""Weights in FP8 with a scale per block, as DeepSeek-V3 is published.

Shapes: N rows, K columns, n blocks of rows, k blocks of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_graphs.checkpoints.shards import Stored, some

FLOAT8, SCALE = "F8_E4M3", "_scale_inv"


def block_of(values: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block, read from ``quantization_config`` of config.json.

    Raises:
        ValueError: the weights are quantised in another way.
    """
    found = values.get("quantization_config")
    if not found:
        return (128, 128)
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method != "fp8" or not block:
        raise ValueError(
            f"config.json: quantization_config with quant_method={method!r} and "
            f"weight_block_size={block!r}: only fp8 in blocks is read, take an unquantised one"
        )
    return tuple(block)


def take_scales(stored: dict[str, Stored], block: tuple[int, int]) -> dict[str, Stored]:
    """Remove the scales from ``stored`` and return them by the names of their weights.

    Raises:
        ValueError: a weight in FP8 has no scales, or scales have no such weight or another shape;
            the message names them.
    """
    float8 = {name for name, each in stored.items() if each.dtype == FLOAT8}
    scales = {n.removesuffix(SCALE): stored.pop(n) for n in list(stored) if n.endswith(SCALE)}
    if scales.keys() != float8:
        raise ValueError(
            f"weights in {FLOAT8} and their {SCALE} do not fit together: "
            f"{some(scales.keys() ^ float8)} have only one of the two"
        )
    for name, scale in scales.items():
        wanted = tuple(-(-n // b) for n, b in zip(stored[name].shape, block, strict=False))
        if scale.shape != wanted or scale.dtype != "F32":
            raise ValueError(
                f"{scale.file}: {name}{SCALE} is {scale.dtype} {scale.shape}, but blocks of "
                f"{block} need F32 {wanted}"
            )
    return scales


def dequantised(weight_NK: Tensor, scale_nk: Tensor, block: tuple[int, int]) -> Tensor:
    """The weight in fp32: every number times the scale of its block."""
    scale_NK = scale_nk.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight_NK.float().mul_(scale_NK[: weight_NK.shape[0], : weight_NK.shape[1]])
