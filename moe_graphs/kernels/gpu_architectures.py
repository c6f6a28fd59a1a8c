"""A table of GPU architectures: the limits of each, and what kernels choose by them.

Only Hopper (sm_90) has run. For every other row all kernels are compiled and fit: a test holds it
(`tests/kernels/test_architectures.py`), and `docs/development/architectures.md` has the numbers.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch

SMALL = 1024  # bytes of shared memory for sums and barriers, beside those that a loop loads ahead


@dataclass(frozen=True)
class Tile:
    """A tile of a grouped GEMM's output, the step of its sums, and the steps in flight at once."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


@dataclass(frozen=True, eq=False)  # compared by identity, since it is looked up at every launch
class Architecture:
    """A row of the table.

    Attributes:
        number: ten times the compute capability.
        gpus: products that have it.
        shared: bytes of shared memory that one block may use.
        gemms: variants of the grouped GEMM that run there (`gemm.heuristics`), the preferred first.
        tile: the preferred variant's, where it differs from the one in `gemm.heuristics`.
        known: False for an architecture without a row, which gets the portable kernels.
        ran: whether kernels have run there. Elsewhere they are compiled, and fit.
    """

    number: int
    gpus: str
    shared: int
    gemms: tuple[str, ...]
    tile: Tile | None = None
    known: bool = True
    ran: bool = False

    @property
    def name(self) -> str:
        return f"sm_{self.number}"


_POINTER, _TMA = ("pointer", "fp32"), ("tma", "pointer", "fp32")
# Gluon variants need WGMMA, which only Hopper has.
_GLUON = ("cooperative", "pingpong", "fp8", *_TMA)

TABLE = {
    row.number: row
    for row in (
        Architecture(80, "A100, A30", 166_912, _POINTER, Tile(128, 128, 64, 3, 8)),
        Architecture(86, "A40, RTX 3090", 101_376, _POINTER, Tile(128, 128, 32, 3, 8)),
        Architecture(89, "L40S, RTX 4090", 101_376, _POINTER, Tile(128, 128, 32, 3, 8)),
        Architecture(90, "H100, H200", 232_448, _GLUON, ran=True),
        Architecture(100, "B200", 232_448, _TMA),
        Architecture(103, "B300", 232_448, _TMA),
        Architecture(120, "RTX 5090, RTX PRO 6000", 101_376, _TMA, Tile(128, 128, 64, 3, 8)),
    )
}
OLDEST, HOPPER = min(TABLE), TABLE[90]
# No architecture since the oldest one lets a block use less.
LEAST_SHARED = min(row.shared for row in TABLE.values())


@functools.cache
def architecture_of(device: torch.device) -> Architecture:
    """The row of a GPU, or the portable one, with a warning.

    Raises:
        ValueError: the GPU is older than the kernels.
    """
    major, minor = capability_of(device)
    number = 10 * major + minor
    if number in TABLE:
        return TABLE[number]
    rows = ", ".join(row.name for row in TABLE.values())
    if number < OLDEST:
        raise ValueError(
            f"moe_graphs has no kernels for {device}, a GPU of compute capability {major}.{minor}: "
            f"they need 8.0 or later ({rows}). Take another GPU, or keep the tensors on the CPU"
        )
    warnings.warn(
        f"moe_graphs: {device} is of the architecture sm_{number}, which the table of kernels does "
        f"not have ({rows}). It runs the portable kernels, which are slower; graphs.report() "
        f"counts their launches",
        stacklevel=2,
    )
    return portable(number)


def capability_of(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; for the CPU, where kernels are only compiled, Hopper's."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def portable(number: int) -> Architecture:
    """The row of an architecture that the table does not have."""
    return Architecture(number, "not in the table", LEAST_SHARED, _POINTER, known=False)


def stages_that_fit(device: torch.device, bytes_ahead: int, wanted: int) -> int:
    """The number of stages that a loop may have, at most `wanted`.

    An iteration loads `bytes_ahead` into shared memory, and all stages but one hold as much.
    """
    shared = architecture_of(device).shared
    fitting = (n for n in range(wanted, 1, -1) if (n - 1) * bytes_ahead + SMALL <= shared)
    return next(fitting, 1)
