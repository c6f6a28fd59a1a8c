"""MegaBlocks where it is installed, and what to install where it is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional


def import_megablocks(wanted: str) -> SimpleNamespace:
    """The functions and classes of MegaBlocks that we use, by their names there.

    ``wanted`` is what asks for them.

    Raises:
        ImportError: it is not installed; says how to.
    """
    try:
        from megablocks.grouped_gemm_util import grouped_gemm_is_available
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE
        from megablocks.layers.glu import GroupedGLU
    except ImportError as error:
        raise ImportError(_advice(wanted, str(error))) from error
    if not grouped_gemm_is_available():
        raise ImportError(_advice(wanted, "grouped_gemm is not installed"))
    return SimpleNamespace(Arguments=Arguments, dMoE=dMoE, GroupedGLU=GroupedGLU)


def swiglu_arguments(library: SimpleNamespace, *, dtype: torch.dtype, **fields: Any) -> Any:
    """MegaBlocks' ``Arguments`` of grouped SwiGLU experts without biases."""
    halves = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16}
    if not any(halves.values()) and dtype != torch.get_default_dtype():
        raise ValueError(
            f"MegaBlocks makes bfloat16, float16 or the default dtype "
            f"({torch.get_default_dtype()}), not {dtype}: set torch.set_default_dtype"
        )
    return library.Arguments(
        bias=False,
        return_bias=False,
        activation_fn=functional.silu,
        mlp_type="glu",
        mlp_impl="grouped",
        **halves,
        **fields,
    )


def _advice(wanted: str, found: str) -> str:
    return (
        f'{wanted} needs MegaBlocks ({found}): pip install "moe_graphs[megablocks]"; where pip '
        f"finds that megablocks asks for an older torch: pip install --no-deps "
        f"--no-build-isolation megablocks stanford-stk grouped_gemm"
    )
