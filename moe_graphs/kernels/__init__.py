"""The ops of a mixture-of-experts layer, sizes on the device.

An op's files stand side by side: ``swiglu`` is what is called, ``swiglu_reference`` says in plain
torch what it computes (and is the path without kernels), ``swiglu_triton`` has the kernels. The
GEMMs fill a folder. ``launching``, ``ops``, ``availability`` and ``precision`` are for all.
"""

from moe_graphs.kernels.choose_experts import route
from moe_graphs.kernels.choose_experts.reference import RoutingRule
from moe_graphs.kernels.cross_entropy import cross_entropy
from moe_graphs.kernels.gemm import grouped_gemm, swiglu_gemms
from moe_graphs.kernels.gemm.gather import gather_gemm
from moe_graphs.kernels.heads import split_heads, split_heads_by_rank
from moe_graphs.kernels.permute import permute, unpermute
from moe_graphs.kernels.rms_norm import add_rms_norm, rms_norm
from moe_graphs.kernels.rotary import apply_rotary
from moe_graphs.kernels.row_order import RowOrder, route_rows
from moe_graphs.kernels.swiglu import swiglu

__all__ = [
    "RoutingRule",
    "RowOrder",
    "add_rms_norm",
    "apply_rotary",
    "cross_entropy",
    "gather_gemm",
    "grouped_gemm",
    "permute",
    "rms_norm",
    "route",
    "route_rows",
    "split_heads",
    "split_heads_by_rank",
    "swiglu",
    "swiglu_gemms",
    "unpermute",
]
