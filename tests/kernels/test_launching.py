"""Launches remember the compiled kernel of a kind, and checked descriptors.

They are tested against Triton itself, which compiles here and is only kept from running the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.ragged_tma import create_ragged_descriptor

from compiled import CompileOnlyDriver
from moe_graphs.kernels.gemm import portable_tma, sm90_common
from moe_graphs.kernels.launching import _kind, cdiv, launch, next_power_of_2


@triton.jit
def store_number(out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), n)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", CompileOnlyDriver(90))


def bound(*args, **constants) -> tuple:
    """Triton's own view of a launch: what it looks a kernel up by, and what it hands to it."""
    device = CompileOnlyDriver(90).get_current_device()
    *_, binder = store_number.device_caches[device]
    arguments, kind, options = binder(*args, **constants)
    return (kind, options), tuple(arguments.values())


@pytest.fixture
def launched(monkeypatch) -> list[tuple]:
    """(which launch, compiled kernel, grid, arguments): Triton's launches, then ours."""
    calls, run = [], JITFunction.run

    def only_compile(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        calls.append(("Triton's", kernel, grid, bound(*args, **kwargs)[1]))
        return kernel

    def only_note(kernel, grid):
        return lambda *args: calls.append(("ours", kernel, grid, args))

    monkeypatch.setattr(JITFunction, "run", only_compile)
    monkeypatch.setattr(CompiledKernel, "__getitem__", only_note)
    return calls


def test_a_second_launch_hands_the_compiled_kernel_what_triton_would(launched):
    out = torch.empty(64)
    constants = {"num_warps": 4, "BLOCK": 16}  # an option has no place among the arguments
    for n in (32, 48):
        launch(store_number, (3,), (out, n), **constants)
    (_, kernel, *first), (who, again, *second) = launched
    assert who == "ours"
    assert again is kernel
    assert first == [(3, 1, 1), (out, 32, 16)]
    assert second == [(3, 1, 1), bound(out, 48, **constants)[1]]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        (lambda out: (out[1:], 32), {"BLOCK": 16}),  # not aligned to 16 bytes
        (lambda out: (out.int(), 32), {"BLOCK": 16}),
        (lambda out: (out, 33), {"BLOCK": 16}),
        (lambda out: (out, 1), {"BLOCK": 16}),
        (lambda out: (out, 1 << 31), {"BLOCK": 16}),
        (lambda out: (out, 32), {"BLOCK": 32}),
        (lambda out: (out, 32), {"BLOCK": 16, "num_warps": 2}),
    ],
)
def test_whatever_triton_compiles_for_is_another_kernel(launched, args, constants):
    out = torch.empty(64)
    launch(store_number, (1,), (out, 32), BLOCK=16)
    launch(store_number, (1,), args(out), **constants)
    launch(store_number, (1,), (out, 32), BLOCK=16)
    assert launched[-1][0] == "ours"
    kernels = [kernel for _, kernel, *_ in launched]
    assert kernels[-1] is not kernels[-2]
    assert kernels[-2].hash != kernels[-1].hash


def near(*numbers: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n + d for n in numbers for d in (-16, -1, 0, 1, 16)])


NUMBERS = st.one_of(
    near(0, 1 << 30, 1 << 31, 1 << 32, -(1 << 31), 1 << 62), st.integers(-(1 << 40), 1 << 40)
)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(a=NUMBERS, b=NUMBERS)
def test_numbers_of_one_kind_are_one_to_triton(a, b):
    """The other way round it would only compile more often than it has to."""
    out = torch.empty(64)
    if _kind(a) == _kind(b):
        assert bound(out, a, BLOCK=16)[0] == bound(out, b, BLOCK=16)[0]


def test_floats_are_one_kind():
    out = torch.empty(64)
    kinds = {str(bound(out, x, BLOCK=16)[0]) for x in (0.0, 1.0, 16.0, 1e300, math.inf)}
    assert len(kinds) == len({_kind(x) for x in (0.0, 1.0, 16.0, 1e300, math.inf)}) == 1
    assert _kind(1.0) != _kind(1)


def tensors() -> list[torch.Tensor]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32, torch.int64)
    return [torch.empty(64, dtype=dtype)[offset:] for dtype in dtypes for offset in (0, 1, 2, 16)]


def descriptors() -> list[object]:
    found = []
    for dtype, made, width in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), (portable_tma, sm90_common), (64, 128)
    ):
        rows, box = torch.empty(40, 256, dtype=dtype), (16, width)
        found += [
            made.ragged_descriptor(rows, box),
            made.ragged_descriptor(rows[:7], box),
            made.matrix_descriptor(rows.view(5, 8, 256), (8, width)),
        ]
    return found


@pytest.mark.parametrize("made", [tensors, descriptors])
def test_memory_of_one_kind_is_one_to_triton(made: Callable[[], list]):
    for a, b in itertools.combinations(made(), 2):
        same = bound(a, 32, BLOCK=16)[0] == bound(b, 32, BLOCK=16)[0]
        assert same == (_kind(a) == _kind(b)), (a, b)


def test_a_descriptor_on_other_memory_is_the_one_made_for_it():
    for rows in (torch.empty(40, 64).bfloat16(), torch.empty(7, 64).bfloat16()):
        ours = portable_tma.ragged_descriptor(rows, (16, 64))
        want = create_ragged_descriptor(rows, (16, 64))
        assert ours.base is rows
        assert (ours.shape, ours.strides) == (want.shape, want.strides)
        assert ours.block_shape == want.block_shape
    for matrices in (torch.empty(3, 64, 128).half(), torch.empty(3, 64, 128).half()):
        ours = sm90_common.matrix_descriptor(matrices, (64, 64))
        want = TensorDescriptor.from_tensor(matrices, [1, 64, 64], ours.layout)
        assert ours.base is matrices
        assert (ours.shape, ours.strides) == (want.shape, want.strides)
        assert (ours.block_shape, ours.layout.rank) == (want.block_shape, 3)


def test_integers():
    assert [cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
