"""Copies between global and shared memory, under the names of any Gluon from Triton 3.6 to 3.9."""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# The older names are still there in Triton 3.9, and raise.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """`tma_store` that adds instead of overwriting (cp.reduce.async.bulk).

    Triton 3.6 has the operation but no Gluon name for it. Every element is added to once per
    launch, so the result does not depend on the order of tiles.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)
