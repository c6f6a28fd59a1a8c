"""The second half of a weight's gradient: the programs of a backward have left a row of sums each.

Deterministic: a number is added up in an order that depends only on the number of programs.
"""

import torch
import triton
import triton.language as tl

from moe_graphs.kernels.launching import cdiv, launch

# Three programs of the largest backward fit on each of an H200's 132 multiprocessors at once.
# Measured there on heads (2026-11-21, 16384 tokens of 32 + 2 * 4 heads of 128): 132 us, with 512
# programs 167, 1024 145.
PROGRAMS = 384
TILE = {"ROWS": 256, "COLS": 8}  # programs whose sums are added at once, columns of a program


@triton.jit(do_not_specialize=["programs"])
def add_sums_kernel(
    sums_ptr, first_ptr, second_ptr, programs, first_size, second_size,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    width = first_size + second_size
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for base in range(0, programs, ROWS):
        row = base + tl.arange(0, ROWS)[:, None]
        live = (row < programs) & (column < width)[None, :]
        total += tl.load(sums_ptr + row * width + column[None, :], mask=live, other=0.0)
    dw = tl.sum(total, 0)
    of_first = column < first_size
    tl.store(first_ptr + column, dw.to(first_ptr.dtype.element_ty), mask=of_first)
    second_ptr += column - first_size
    tl.store(second_ptr, dw.to(second_ptr.dtype.element_ty), mask=(column < width) & ~of_first)


def add_sums(sums: torch.Tensor, gradient: torch.Tensor, *second: torch.Tensor) -> None:
    """Adds up `[programs, width]`, fp32, into one gradient, or two side by side, in their dtypes.

    Without programs they are zero.
    """
    programs, width = sums.shape
    gradients = (gradient, *second) if second else (gradient, gradient)
    args = (sums, *gradients, programs, gradient.numel(), width - gradient.numel())
    launch(add_sums_kernel, (cdiv(width, TILE["COLS"]),), args, **TILE)
