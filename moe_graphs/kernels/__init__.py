"""The ops of a mixture-of-experts layer, sizes on the device; ``reference`` specifies them."""

from moe_graphs.kernels.cross_entropy import cross_entropy
from moe_graphs.kernels.gather_gemm import gather_gemm
from moe_graphs.kernels.grouped_gemm import grouped_gemm
from moe_graphs.kernels.heads import split_heads
from moe_graphs.kernels.permute import permute, unpermute
from moe_graphs.kernels.routing import RowOrder, route_rows
from moe_graphs.kernels.swiglu import swiglu

__all__ = [
    "RowOrder",
    "cross_entropy",
    "gather_gemm",
    "grouped_gemm",
    "permute",
    "route_rows",
    "split_heads",
    "swiglu",
    "unpermute",
]
