"""Launching Triton kernels with little work on the host.

Triton binds and inspects every argument of every launch to find out which of its compiled kernels
fits, and a TMA descriptor checks itself when it is made: 100 us of Python for a GEMM with three of
them. A graph hides that; a small layer that runs eagerly waits for it. Here a compiled kernel and a
descriptor are looked up by what they depend on.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from moe_graphs import portable_launches
from moe_graphs.kernels.gpu_architectures import architecture_of


class _Compiled:
    """A compiled kernel that the first launch of a kind has left.

    Beside it are its constants in order, and the name under which its launches are counted, or
    None.
    """

    kernel: Any = None
    constants: tuple[Any, ...] = ()
    counted: str | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments, ready to run on the current stream."""

    kernel: Any
    grid: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        launch(self.kernel, (self.grid,), self.args, **self.options)


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the current stream.

    The compiler decides which sums and products become one operation. Where two kernels have to
    give the same bits, they say so by `tl.fma`.

    Args:
        args: positional arguments. The base of a descriptor is aligned to 16 bytes (`on_memory`). A
            tuple is of integers of 64 bits, for which the kernel is not specialized.
        constants: constants and options by their names.

    Raises:
        ValueError: the GPU is older than the kernels; nothing is launched.
    """
    known = _compiled(kernel, *constants.values(), *map(_kind, args))
    grid = (*grid, 1, 1)[:3]
    if known.kernel is None:  # the first time, and always under Triton's interpreter
        known.counted = _counted(kernel, args)
        # Fused products and sums have to be asked for from Triton 3.10 on.
        known.kernel = kernel[grid](*args, **constants, enable_fp_fusion=True)
        known.constants = tuple(constants[n] for n in kernel.arg_names if n in constants)
    else:
        known.kernel[grid](*args, *known.constants)
    if known.counted is not None:
        portable_launches.count(known.counted)


def _counted(kernel: Any, args: tuple[Any, ...]) -> str | None:
    """The name under which launches are counted on a GPU that the table does not have."""
    gpu = architecture_of(next(arg.device for arg in args if isinstance(arg, torch.Tensor)))
    return None if gpu.known else f"{kernel.__name__} on {gpu.name}"


@functools.cache
def _compiled(*key: Any) -> _Compiled:
    return _Compiled()


def _kind(arg: Any) -> Any:
    """The properties of an argument that Triton compiles for: type, divisible by 16, equal to 1."""
    if isinstance(arg, int):  # up to 64 bits, with a sign
        return arg == 1, arg % 16 == 0, -(1 << 31) <= arg < 1 << 31
    if isinstance(arg, float):  # fp32 for the kernel, whatever its value
        return float
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.get_device(), arg.data_ptr() % 16 == 0
    if isinstance(arg, tuple):
        return len(arg)
    return type(arg), arg.base.dtype, *arg.block_shape


def on_memory(base: torch.Tensor, template: Any) -> Any:
    """A TMA descriptor like the template, which has passed its checks, on other memory."""
    made = object.__new__(type(template))
    made.__dict__.update(template.__dict__, base=base)
    return made


# `triton.cdiv` and `triton.next_power_of_2` are made for kernels, and take 7 us each on the host.


def cdiv(a: int, b: int) -> int:
    """The quotient a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()
