"""Times by group from a trace's events, with numbers that are known by construction."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import moe_graphs
from moe_graphs.profiling.floors import Floor, Rates
from moe_graphs.profiling.kernel_groups import OTHER, group_of_kernel, group_of_operator
from moe_graphs.profiling.step_profile import shared_time, summarize
from moe_graphs.profiling.traced_work import Work, device_work, operator_work

RATES = Rates(flops_per_second=1e12, bytes_per_second=1e9, dtype="bfloat16")


def _event(category: str, name: str, start: float, end: float, **arguments: int) -> dict:
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": 7,
        "args": arguments,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("rows_gluon_kernel", "grouped GEMM"),
        ("weights_tma_kernel", "grouped GEMM"),
        ("expert_order_kernel", "grouped GEMM"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "dense GEMM"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "dense GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "dense GEMM"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob", "attention"),
        ("rms_norm_backward_kernel", "norms"),
        ("add_sums_kernel", "norms"),
        ("heads_forward_kernel", "rotary"),
        ("turn_heads_kernel", "rotary"),
        ("adamw_kernel", "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "optimizer"),
        ("choose_backward_kernel", "routing"),
        ("_count_kernel", "routing"),
        ("spread_kernel", "permute"),
        ("dot_kernel", "permute"),
        ("four_bits_kernel", "weights in few bits"),
        ("swiglu_backward_kernel", "swiglu"),
        ("cross_entropy_mean_kernel", "cross entropy"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("push_rows_kernel", "communication"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
         "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
         "memsets"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
         "elementwise"),
        ("void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float>", "elementwise"),
        ("what_is_this", "other"),
    ],
)  # fmt: skip
def test_group_of_a_kernel(name, group):
    assert group_of_kernel(name) == group


def test_every_kernel_of_ours_is_in_a_group():
    folder, names = Path(moe_graphs.__file__).parent, []
    for file in folder.rglob("*.py"):
        text = file.read_text()
        names += re.findall(r"^@(?:triton|gluon)\.jit.*\ndef (\w+_kernel)\(", text, re.MULTILINE)
    assert len(names) > 30
    assert {group_of_kernel(name) for name in names} & {OTHER, "elementwise", "dense GEMM"} == set()


def test_what_an_operator_calls_belongs_to_it():
    assert group_of_operator("aten::mm") == "dense GEMM"
    assert group_of_operator("aten::mm", "grouped GEMM") == "grouped GEMM"
    assert group_of_operator("aten::mul", "copies") == "elementwise"
    assert group_of_operator("_SwiGLUBackward", "other") == "swiglu"


# On two streams a product and communication overlap from 400 to 700.
EVENTS = [
    _event("kernel", "rows_tma_kernel", 0, 700, stream=7),
    _event("kernel", "ncclDevKernel_AllGather", 400, 1000, stream=20),
    _event("gpu_memcpy", "Memcpy DtoD", 1200, 1300, stream=7),
    _event("gpu_memset", "Memset (Device)", 1300, 1400, stream=7),
    _event("kernel", "mystery", 1900, 2000, stream=7),
    _event("cuda_runtime", "cudaLaunchKernel", 0, 5, correlation=1),
]


def test_times_of_a_step_with_two_streams():
    floors = {"grouped GEMM": Floor(flops=1.75e8), "copies": Floor(flops=1.0, bytes=5e4)}
    found = summarize(device_work(EVENTS), 2, floors, RATES)
    assert found.span_ms == pytest.approx(1.0)
    assert found.busy_ms == pytest.approx(1.3 / 2)
    assert found.gaps_ms == pytest.approx(0.7 / 2)
    assert (found.gaps, found.longest_gap_ms) == (1.0, pytest.approx(0.5))
    assert found.overlapped_ms == pytest.approx(0.3 / 2)
    assert found.communication_hidden_ms == pytest.approx(0.3 / 2)
    assert found.communication_exposed_ms == pytest.approx(0.3 / 2)
    groups = {group.name: group for group in found.groups}
    assert [g.name for g in found.groups][:2] == ["grouped GEMM", "communication"]
    product = groups["grouped GEMM"]
    assert (product.summed_ms, product.busy_ms) == pytest.approx((0.35, 0.35))
    assert product.share_ms == pytest.approx((0.7 - 0.15) / 2)
    assert product.reached == pytest.approx(0.5)
    assert groups["copies"].reached == pytest.approx(0.05 / 0.05)  # the floor of its bytes
    assert groups["memsets"].floor_ms is None
    assert groups["other"].longest == (("mystery", pytest.approx(0.05)),)
    assert groups["other"].calls == 0.5
    assert sum(g.share_ms for g in found.groups) == pytest.approx(found.busy_ms)


def test_sum_and_union_of_one_group_on_two_streams():
    work = [Work("a", "other", 0, 100), Work("b", "other", 50, 150, stream=1)]
    (group,) = summarize(work, 1, {}, RATES).groups
    assert (group.summed_ms, group.busy_ms, group.share_ms) == pytest.approx((0.2, 0.15, 0.15))
    assert group.calls == 2


def test_time_is_shared_by_what_runs_at_once():
    work = [Work("", "a", 0, 4), Work("", "b", 2, 6), Work("", "c", 6, 7), Work("", "c", 7, 7)]
    assert shared_time(work) == {"a": 3, "b": 3, "c": 1}


def test_operators_have_the_time_that_they_spend_themselves():
    events = [
        _event("user_annotation", "Optimizer.step#AdamW.step", 0, 100),
        _event("cpu_op", "aten::_fused_adamw_", 10, 60),
        _event("cpu_op", "aten::add_", 70, 80),
        _event("cpu_op", "moe_graphs::grouped_gemm_forward", 100, 200),
        _event("cpu_op", "aten::mm", 110, 150),
        _event("cpu_op", "aten::mul", 300, 330),
        _event("cpu_op", "aten::copy_", 310, 320),
        _event("user_annotation", "ProfilerStep#1", 0, 400),
    ]
    work = operator_work(events)
    found = summarize(work, 1, {}, RATES)
    busy = {group.name: (group.busy_ms * 1e3, group.calls) for group in found.groups}
    assert busy == {
        "grouped GEMM": (pytest.approx(100), 2),
        "optimizer": (pytest.approx(60), 2),  # its operators, without the Python around them
        "elementwise": (pytest.approx(20), 1),
        "copies": (pytest.approx(10), 1),
    }
    assert found.gaps_ms * 1e3 == pytest.approx(10 + 20 + 100)
    assert found.overlapped_ms == pytest.approx(0)


def test_refused():
    with pytest.raises(ValueError, match="no work"):
        summarize([], 1, {}, RATES)
    with pytest.raises(ValueError, match="norm"):
        summarize(device_work(EVENTS), 1, {"norm": Floor()}, RATES)
