"""The ops of a mixture-of-experts layer, which read sizes on the device.

Each op has a folder. Its ``__init__`` has the functions that are called, ``reference`` says in
plain torch what they compute (and runs where there are no kernels), ``triton_kernels`` has the
kernels. In ``gemm`` the kernels lie in files named by architecture: ``sm90_*`` for Hopper,
``portable_*`` for all.

The files beside the folders serve all ops: ``launching`` (quick launches), ``ops`` (torch ops that
cost little to call), ``availability`` (is there a kernel for a tensor?), ``gpu_architectures``
(limits and choices by GPU), ``precision`` and ``add_sums``.
"""

from moe_graphs.kernels.choose_experts import route
from moe_graphs.kernels.choose_experts.reference import RoutingRule
from moe_graphs.kernels.cross_entropy import cross_entropy
from moe_graphs.kernels.cross_entropy.linear import linear_cross_entropy
from moe_graphs.kernels.cross_entropy.loss_rule import LossRule
from moe_graphs.kernels.document_attention import document_attention
from moe_graphs.kernels.gemm import grouped_gemm
from moe_graphs.kernels.gemm.gather import gather_gemm
from moe_graphs.kernels.heads import split_heads, split_heads_by_rank
from moe_graphs.kernels.permute import permute, sum_rows, unpermute
from moe_graphs.kernels.rms_norm import add_rms_norm, rms_norm
from moe_graphs.kernels.rotary import apply_rotary
from moe_graphs.kernels.routed_experts import routed_experts
from moe_graphs.kernels.row_order import RowOrder, route_rows
from moe_graphs.kernels.swiglu import swiglu, swiglu_linear

__all__ = [
    "LossRule",
    "RoutingRule",
    "RowOrder",
    "add_rms_norm",
    "apply_rotary",
    "cross_entropy",
    "document_attention",
    "gather_gemm",
    "grouped_gemm",
    "linear_cross_entropy",
    "permute",
    "rms_norm",
    "route",
    "route_rows",
    "routed_experts",
    "split_heads",
    "split_heads_by_rank",
    "sum_rows",
    "swiglu",
    "swiglu_linear",
    "unpermute",
]
