"""MegaBlocks where it is installed, and what to install where it is not."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn import functional


def _dtype_flags(dtype: torch.dtype) -> dict[str, bool]:
    """How MegaBlocks' Arguments say a dtype: the default one is neither of the two."""
    halves = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16}
    if not any(halves.values()) and dtype != torch.get_default_dtype():
        raise ValueError(
            f"MegaBlocks makes bfloat16, float16 or the default dtype "
            f"({torch.get_default_dtype()}), not {dtype}: set torch.set_default_dtype"
        )
    return halves


def swiglu_arguments(wanted: str, *, dtype: torch.dtype, **fields: Any) -> Any:
    """``megablocks.layers.arguments.Arguments`` of SwiGLU experts without biases."""
    if not import_megablocks("grouped_gemm_util", wanted).grouped_gemm_is_available():
        raise ImportError(_advice(wanted, "grouped_gemm is not installed"))
    return import_megablocks("layers.arguments", wanted).Arguments(
        bias=False,
        return_bias=False,
        activation_fn=functional.silu,
        mlp_type="glu",
        mlp_impl="grouped",
        **_dtype_flags(dtype),
        **fields,
    )


def import_megablocks(module: str, wanted: str) -> Any:
    try:
        return importlib.import_module(f"megablocks.{module}")
    except ImportError as error:
        raise ImportError(_advice(wanted, str(error))) from error


def _advice(wanted: str, found: str) -> str:
    return (
        f'{wanted} needs MegaBlocks ({found}): pip install "moe_graphs[megablocks]"; where pip '
        f"finds that megablocks asks for an older torch: pip install --no-deps "
        f"--no-build-isolation megablocks stanford-stk grouped_gemm"
    )
