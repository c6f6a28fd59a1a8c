"""The share of communication in a step."""

from __future__ import annotations

import pytest

from moe_graphs.profiling.communication_share import communication_of
from moe_graphs.profiling.kernel_groups import group_of_kernel
from moe_graphs.profiling.traced_work import Work


def kernel(name: str, start: float, end: float, stream: int = 0) -> Work:
    return Work(name, group_of_kernel(name), start, end, stream)


def test_what_hides_behind_other_work_is_not_exposed():
    step = [
        kernel("nvjet_tst_128x256", 0, 40),
        kernel("ncclDevKernel_AllGather_RING_LL(x)", 30, 60, stream=1),
        kernel("push_rows_kernel", 55, 70),
        kernel("adamw_kernel", 80, 100),
    ]
    found = communication_of(step)
    assert found.share == pytest.approx(0.40)  # from 30 to 70
    assert found.exposed == pytest.approx(0.30)  # from 40 to 70
    assert str(found) == "40.0% of a step, 30.0% with nothing else beside it"


def test_of_several_steps():
    """Gathers on two streams at once count once, and a kernel beside them hides both."""
    found = communication_of(
        [
            kernel("ncclDevKernel_AllGather_RING_LL(x)", 0, 3000, stream=1),
            kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 1000, 4000, stream=2),
            kernel("nvjet_tst_128x256", 1500, 2500),
            kernel("adamw_kernel", 5000, 8000),
        ],
        steps=2,
    )
    assert found.span_ms == pytest.approx(4.0)
    assert found.share == pytest.approx(4 / 8)
    assert found.exposed == pytest.approx(3 / 8)


def test_one_rank_alone():
    assert communication_of([kernel("adamw_kernel", 1, 2)]).share == 0.0
    assert communication_of([]).exposed == 0.0
