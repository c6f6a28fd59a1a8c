"""What is remembered between launches: the compiled kernel of a kind, and checked descriptors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.ragged_tma import create_ragged_descriptor

from moe_graphs.kernels.launching import (
    cdiv,
    launch,
    matrix_descriptor,
    next_power_of_2,
    ragged_descriptor,
)


class Compiled:
    def __init__(self, calls: list):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("again", grid, args))


class Kernel:
    """Records its launches; `out` and `n` are arguments, BLOCK a constant, num_warps an option."""

    arg_names = ("out", "n", "BLOCK")

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.calls.append(("first", grid, args, constants))
            return Compiled(self.calls)

        return run


def test_a_second_launch_goes_to_the_compiled_kernel():
    kernel, out = Kernel(), torch.empty(64)
    for n in (32, 48):
        launch(kernel, (3,), (out, n), num_warps=4, BLOCK=128)
    assert kernel.calls == [
        ("first", (3, 1, 1), (out, 32), {"num_warps": 4, "BLOCK": 128}),
        ("again", (3, 1, 1), (out, 48, 128)),
    ]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        (lambda out: (out[1:], 32), {"BLOCK": 128}),  # not aligned to 16 bytes
        (lambda out: (out.int(), 32), {"BLOCK": 128}),
        (lambda out: (out, 33), {"BLOCK": 128}),
        (lambda out: (out, 1), {"BLOCK": 128}),
        (lambda out: (out, 1 << 31), {"BLOCK": 128}),
        (lambda out: (out, 32), {"BLOCK": 256}),
    ],
)
def test_whatever_triton_compiles_for_is_another_kind(args, constants):
    kernel, out = Kernel(), torch.empty(64)
    launch(kernel, (1,), (out, 32), BLOCK=128)
    launch(kernel, (1,), args(out), **constants)
    assert [call[0] for call in kernel.calls] == ["first", "first"]


def test_a_descriptor_on_other_memory_is_the_one_made_for_it():
    for rows in (torch.empty(40, 64).bfloat16(), torch.empty(7, 64).bfloat16()):
        ours = ragged_descriptor(rows, (16, 64), gluon=False)
        want = create_ragged_descriptor(rows, (16, 64))
        assert ours.base is rows
        assert (ours.shape, ours.strides) == (want.shape, want.strides)
        assert ours.block_shape == want.block_shape
    for matrices in (torch.empty(3, 64, 128).half(), torch.empty(3, 64, 128).half()):
        ours = matrix_descriptor(matrices, (64, 64), gluon=True)
        want = TensorDescriptor.from_tensor(matrices, [1, 64, 64], ours.layout)
        assert ours.base is matrices
        assert (ours.shape, ours.strides) == (want.shape, want.strides)
        assert (ours.block_shape, ours.layout.rank) == (want.block_shape, 3)


def test_integers():
    assert [cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
