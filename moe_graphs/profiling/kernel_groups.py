"""Table of groups: the name of a kernel or an operator determines its group."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

OTHER = "other"
COMMUNICATION = "communication"
COPIES, MEMSETS = "copies", "memsets"


@dataclass(frozen=True)
class Group:
    """Kernels and operators that do the same kind of work.

    Attributes:
        kernels: pattern that is found in the names of the group's kernels on a GPU.
        operators: pattern that is found in the names of the group's operators on the CPU. Operators
            that run inside of one belong to the group as well.
        generic: whether the group's operators inside another group's operator belong to that group.
    """

    name: str
    kernels: str
    operators: str
    generic: bool = False


# The first group that matches counts. Our kernels have their whole names here (a Triton kernel has
# the name of its function), other kernels the part that versions have in common.
GROUPS = (
    Group(
        COMMUNICATION,
        r"nccl|symm_mem|multimem|nvshmem|deep_ep|^_?(push|pull|exchange|signal|wait|barrier)_\w*kernel",
        r"^(c10d|nccl|gloo|_c10d_functional)::?|^_(AllToAll|AllGather|ReduceScatter)",
    ),
    Group(
        "grouped GEMM",
        r"^((fp8|lora|gathered)_)?(rows|weights)_(pointer|tma|gluon)_kernel"
        r"|^(zero_tail|row_tiles|add_tail|expert_order|add_partials)_kernel"
        r"|GroupProblemShape|grouped_?gemm|^_(sdd|dsd|dds)_kernel",
        r"(grouped|gather|lora)_gemm|_(Grouped|Gather)Gemm|_DownProjection|_ExpertsInFP8|_grouped_mm",
    ),
    Group(
        "attention",
        r"^document_|flash(_|::|Attn)|fmha|sdpa|fused_attn|compute_dot_do_o|convert_dq",
        r"_DocumentAttention|document_bounds|attend_(for|back)ward|scaled_dot_product|ScaledDotProduct|flash_attention|efficient_attention",
    ),
    Group(
        "cross entropy",
        r"cross_entropy|^scaled_kernel|nll_loss|[lL]og_?[sS]oft_?[mM]ax",
        r"cross_entropy|_CrossEntropy|nll_loss|NllLoss|log_softmax|LogSoftmax",
    ),
    Group(
        "optimizer",
        r"adamw|multi_tensor_apply|[lL]p_?[nN]orm|FusedAdam",
        r"^Optimizer\.step|_fused_\w*adam|^aten::_foreach_",
    ),
    Group(
        "norms",
        r"rms_?norm|RMSNorm|layer_?norm|LayerNorm|^add_sums_kernel",
        r"rms_?norm|RMSNorm|RmsNorm|layer_norm|LayerNorm",
    ),
    Group(
        "rotary",
        r"^turn_heads_kernel|^heads_\w*(forward|backward)_kernel|rotary|rope_|_rope",
        r"_Rotate|_ApplyRotary|_SplitHeads|turn_heads|heads_(forward|backward)",
    ),
    Group(
        "routing",
        r"^(choose|finish|choose_backward)_kernel|^_(count|sum|place)_kernel|[tT]op_?[kK]"
        r"|[sS]oft_?[mM]ax",
        r"_Route|choose_experts|sort_pairs|topk|softmax|Softmax|searchsorted|^aten::sort",
    ),
    Group(
        "permute",
        r"^(fp8_)?(spread|collect|dot)_kernel|permute",
        r"_Permute|_Unpermute|(spread|collect|dot)_rows|fp8_spread",
    ),
    Group("to FP8", r"^fp8_(quantize|weights|columns)_kernel", r"fp8_(quantize|weights|columns)$"),
    Group("weights in few bits", r"^(four_bits|float8)_kernel", r"packed_product"),
    Group("swiglu", r"swiglu|[sS]i_?[lL][uU]", r"swiglu|_SwiGLU|silu|Silu"),
    Group(
        "dense GEMM",
        r"nvjet|gemm|gemv|xmma|cutlass|cublas|split_?[kK]",
        r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|linear|matmul)$|^(Add|B)?mmBackward|^MmBackward",
    ),
    Group(
        "indexing",
        r"gather|scatter|index|[eE]mbedding|[sS]ort|[sS]can|krn_partial|compute_grad_weight",
        r"embedding|Embedding|index|Index|gather|Gather|scatter",
    ),
    Group(MEMSETS, r"[fF]ill|memset", r"^aten::(fill_|zero_)$", generic=True),
    Group(
        COPIES,
        r"copy|Cat[A-Z]|memcpy|^transpose_kernel",
        r"^aten::(copy_|cat|_to_copy|clone|contiguous)$|^moe_graphs::transpose$",
        generic=True,
    ),
    Group(
        "elementwise",
        r"elementwise|reduce|dropout|distribution|^triton_",
        r"^aten::(mul|add|sub|div|pow|rsqrt|sum|mean|neg|sigmoid|native_dropout|dropout|sqrt"
        r"|bernoulli|clamp|reciprocal|masked_fill)_?$",
        generic=True,
    ),
)  # fmt: skip
NAMES = (*(group.name for group in GROUPS), OTHER)
_GENERIC = {OTHER, *(group.name for group in GROUPS if group.generic)}


@functools.cache
def group_of_kernel(name: str) -> str:
    """Name of the group of a kernel on a GPU.

    Copies and memsets that are no kernels have categories of their own in a trace.
    """
    return next((group.name for group in GROUPS if re.search(group.kernels, name)), OTHER)


def group_of_operator(name: str, inside_of: str = OTHER) -> str:
    """Name of the group of an operator on the CPU.

    Args:
        inside_of: the group of the operator that called it.
    """
    return inside_of if inside_of not in _GENERIC else _group_of_operator(name)


@functools.cache
def _group_of_operator(name: str) -> str:
    return next((group.name for group in GROUPS if re.search(group.operators, name)), OTHER)
