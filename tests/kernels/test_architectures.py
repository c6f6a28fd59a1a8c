"""The table of GPUs' architectures: every kernel compiled for each, and what the table leads to.

Hopper alone has run. For the others the compiler says whether a kernel fits. The ahead-of-time
compiler is that of `compiled.launch_compiler`.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import warnings
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import architecture_table
from compiled import launch_compiler
from grids import by_turns, longer
from kernel_cases import kernel_cases
from moe_graphs.kernels.gemm import heuristics, portable_pointer, portable_tma
from moe_graphs.kernels.gemm import launch as gemm
from moe_graphs.kernels.gemm.heuristics import Variant, row_variant, weight_variant
from moe_graphs.kernels.gpu_architectures import (
    HOPPER,
    LEAST_SHARED,
    TABLE,
    architecture_of,
    stages_that_fit,
)
from moe_graphs.kernels.heads import triton_kernels as heads_triton
from moe_graphs.kernels.rms_norm import triton_kernels as rms_norm_triton
from moe_graphs.portable_launches import portable_launches
from pretended_gpu import pretended_gpu

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
# Bytes of a block's registers that may go to memory. `heads` kernels and weights of sm_120 do it.
SPILLS = 96
# Bytes of shared memory a block may use, in CUDA's programming guide.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
UNKNOWN = (87, 110, 121)
# Cases that some architecture has been too small for.
LARGEST = ("grouped GEMM, rows", "grouped GEMM, weights", "RMS norm of a sum, 8192")
CASES = kernel_cases()
OF_HOPPER = (
    "grouped GEMM, gathered rows", "FP8, quantisation", "FP8, columns", "FP8, products",
)  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    return launch_compiler(monkeypatch)


def cases_by_architecture() -> list:
    """All of them with `--long`; else the GEMMs and LARGEST for one architecture each, by turns.

    GEMMs have variants and tiles by architecture. `test_compiled_ops.py` has the other kernels.
    """
    chosen = [case for case in CASES if case in LARGEST or case.startswith("grouped GEMM")]
    turns = set(zip(chosen, itertools.cycle(TABLE), strict=False))
    places = itertools.product(CASES, TABLE)
    return [pytest.param(*p, marks=() if p in turns else pytest.mark.long) for p in places]


def check(found: list, number: int, shared: int) -> None:
    for kernel in found:
        assert kernel.shared <= shared, kernel.name
        assert kernel.spills <= SPILLS, (kernel.name, kernel.spills)
        assert not (kernel.early and kernel.touches_memory_early), kernel.name
        if number != 90:
            assert "wgmma" not in kernel.ptx, kernel.name


@pytest.mark.parametrize(("case", "number"), cases_by_architecture())
def test_every_kernel_is_compiled_for_every_architecture_and_fits(compiled, case, number):
    found = compiled(CASES[case], arch=number)
    assert found or case in OF_HOPPER
    check(found, number, TABLE[number].shared)


@pytest.mark.parametrize(
    ("number", "case"),
    [
        (UNKNOWN[0], LARGEST[0]),
        *longer(by_turns(UNKNOWN, LARGEST)),
        *(
            pytest.param(number, case, marks=pytest.mark.long)
            for number in UNKNOWN
            for case in CASES
            if case not in LARGEST
        ),
    ],
)
def test_an_unknown_architecture_gets_portable_kernels_that_are_counted(compiled, case, number):
    before = portable_launches()
    with pytest.warns(UserWarning, match=f"sm_{number}, which the table of kernels does not have"):
        # Compiled for a neighbour: Triton does not know all of these.
        found = compiled(CASES[case], arch=120 if number > 100 else 80, told=number)
    check(found, number, LEAST_SHARED)
    names = {kernel.name for kernel in found}
    assert not names & {"rows_tma_kernel", "weights_tma_kernel", "rows_gluon_kernel"}
    after = portable_launches()
    new = {name for name, count in after.items() if count > before.get(name, 0)}
    assert new == {f"{name} on sm_{number}" for name in names}


def test_a_gpu_older_than_the_kernels_is_refused_before_a_launch(compiled):
    with pytest.raises(ValueError, match="compute capability 7.5: they need 8.0 or later"):
        with pretended_gpu(75):
            CASES["grouped GEMM, rows"]()
    with pretended_gpu(75), pytest.raises(ValueError, match="compute capability 7.5"):
        CASES["SwiGLU"]()


def test_the_table_is_asked_with_the_capability_that_torch_tells(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    architecture_of.cache_clear()
    try:
        assert architecture_of(torch.device("cuda", 5)) is TABLE[120]
    finally:
        architecture_of.cache_clear()
    assert architecture_of(CPU) is HOPPER


def test_the_table_has_what_a_block_may_use():
    assert {number: row.shared for number, row in TABLE.items()} == {
        number: 1024 * kib for number, kib in SHARED.items()
    }
    for number, row in TABLE.items():
        assert row.name == f"sm_{number}"
        assert row.known


@pytest.mark.parametrize("number", [number for number in TABLE if number != 90])
def test_gluon_variants_are_refused_by_name_elsewhere_than_on_hopper(number):
    """Nothing is compiled: the compiler would end the process."""
    x, w, ends = torch.empty(64, 64, dtype=BF16), torch.empty(4, 64, 64, dtype=BF16), torch.zeros(4)
    ends = ends.int()
    message = f"does not run on cpu, which is sm_{number} .*accepted there are .*pointer"
    launches = [
        f"moe_graphs.kernels.{name}.launch" for name in ("launching", "gemm.tile_scheduler")
    ]
    with pretended_gpu(number), mock.patch(launches[0]) as first, mock.patch(launches[1]) as second:
        for name in ("cooperative", "pingpong"):
            with pytest.raises(ValueError, match=f"variant '{name}' {message}"):
                gemm.matmul_rows(x, w, ends, variant=row_variant(name, 64))
            with pytest.raises(ValueError, match=f"variant '{name}' {message}"):
                gemm.matmul_weights(x, x, ends, variant=weight_variant(name, 64, BF16))
        first.assert_not_called()
        second.assert_not_called()


def test_tma_is_refused_by_name_before_hopper():
    with pretended_gpu(89), pytest.raises(ValueError, match="accepted there are pointer"):
        heuristics.kernels_of(row_variant("tma", 256), CPU)


@pytest.mark.long
@pytest.mark.parametrize("number", [100, 120])
def test_a_gluon_variant_compiled_for_a_foreign_architecture_ends_its_process(number):
    """The reason for a refusal before a launch. The test needs a process of its own."""
    program = f"""
        import pytest, torch
        from compiled import launch_compiler
        from kernel_cases import kernel_cases
        from moe_graphs.kernels.gemm import launch, sm90_rows
        launch.kernels_of = lambda *_: sm90_rows
        launch.choose_rows = lambda *_: "cooperative"
        compiled = launch_compiler(pytest.MonkeyPatch())
        compiled(kernel_cases()["grouped GEMM, rows"], arch={number})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    run = subprocess.run(
        command,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert run.returncode < 0, run.stderr[-2000:]
    assert "Cannot select" in run.stderr


def tile(variant: Variant) -> tuple:
    return (
        variant.name, variant.block_m, variant.block_n, variant.block_k, variant.stages,
        variant.warps, variant.pieces, variant.buffers,
    )  # fmt: skip


ROWS = {  # rows per expert, columns -> the variant
    (512, 1024): ("cooperative", 128, 256, 64, 3, 4, 1, 1),
    (512, 384): ("cooperative", 128, 128, 64, 5, 4, 1, 1),
    (256, 1024): ("pingpong", 64, 256, 64, 4, 4, 1, 1),
    (256, 384): ("pingpong", 64, 128, 64, 6, 4, 1, 1),
}
WEIGHTS = {  # columns, dtype -> the variant
    (1024, BF16): ("cooperative", 128, 256, 32, 6, 4, 1, 1),
    (384, BF16): ("cooperative", 128, 128, 32, 8, 4, 1, 1),
    (1024, FP32): ("pingpong", 128, 128, 64, 5, 4, 4, 2),
    (384, FP32): ("pingpong", 128, 128, 64, 5, 4, 4, 2),
}


def test_hoppers_choices_are_those_that_were_measured():
    """The measured numbers are in docs/performance.md. A changed choice is measured again."""
    for (rows, columns), expected in ROWS.items():
        name = heuristics.choose_rows(HOPPER, BF16, 8 * rows, 8)
        assert tile(row_variant(name, columns, HOPPER)) == expected
    for (columns, dtype), expected in WEIGHTS.items():
        name = heuristics.choose_weights(HOPPER, BF16, dtype)
        assert tile(weight_variant(name, columns, dtype, HOPPER)) == expected
    assert tile(row_variant("tma", 1024)) == ("tma", 128, 256, 64, 3, 8, 1, 1)
    assert tile(row_variant("pointer", 1024)) == ("pointer", 64, 128, 32, 3, 4, 1, 1)
    largest = 3 * 8192 * 4  # bytes of a row of fp32, thrice
    assert stages_that_fit(CPU, largest, rms_norm_triton.STAGES) == rms_norm_triton.STAGES
    assert stages_that_fit(CPU, heads_triton.THREE_STAGES, 3) == 3
    assert stages_that_fit(CPU, heads_triton.TWO_STAGES, 2) == 2


@pytest.mark.parametrize("number", TABLE)
def test_the_preferred_variant_has_the_rows_tile(number):
    row = TABLE[number]
    if row.tile is None:
        return
    for found in (
        row_variant(row.gemms[0], 1024, row),
        weight_variant(row.gemms[0], 1024, BF16, row),
    ):
        assert (found.block_m, found.block_n, found.block_k) == (
            row.tile.block_m, row.tile.block_n, row.tile.block_k,
        )  # fmt: skip
        assert (found.stages, found.warps) == (row.tile.stages, row.tile.warps)


def test_the_page_of_architectures_is_that_of_its_lines_and_of_the_table():
    lines = architecture_table.read_lines()
    assert architecture_table.PAGE.read_text() == architecture_table.page(lines)
    assert {number for _, number in lines} == set(TABLE)
    for (_, number), cells in lines.items():
        assert all(shared <= TABLE[number].shared for _, shared, _ in cells.values())


def test_no_gemm_has_two_products_in_an_iteration():
    """Triton drops a half of two products into one accumulator on sm_103 (Liger-Kernel#1413)."""
    for kernel in (
        portable_pointer.rows_pointer_kernel, portable_pointer.weights_pointer_kernel,
        portable_tma.rows_tma_kernel, portable_tma.weights_tma_kernel,
    ):  # fmt: skip
        assert kernel.src.count("tl.dot(") == 1, kernel.__name__


def test_a_known_gpu_is_silent_and_counts_nothing(compiled):
    before = portable_launches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(CASES["SwiGLU"], arch=120)
    assert portable_launches() == before
