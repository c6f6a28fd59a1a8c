"""The choice of kernel and tile, from what the host knows: shapes, dtypes and the GPU.

The best variant per shape against these rules was worth 0.05 % (forward) and 0.5 % (weights) in the
mean of 13 shapes on an H200. That is noise, so nothing is tuned at run time.
"""

import functools
import importlib
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moe_graphs.kernels.gpu_architectures import HOPPER, Architecture, architecture_of
from moe_graphs.kernels.launching import cdiv, next_power_of_2

# From this K on, the last round of row tiles may be cut along it. To add up the parts takes about
# 10 us, and half a round of K = 4096 takes 25 us.
LONG_SUM = 4096
# Programs of a multiprocessor at once that gather tokens: their loads fill its memory's latency.
GATHERING_PROGRAMS = 3

Pair = tuple[torch.Tensor, torch.Tensor]  # operands of a product: rows [R, K], and matrices


@dataclass(frozen=True)
class Variant:
    """A kernel of the grouped GEMM with its tile, and what the launch has to know about it.

    Attributes:
        name: cooperative, pingpong or fp8 (Gluon, for Hopper alone), tma or pointer (plain
            Triton, portable), or fp32 (pointer with a tile for operands of 4 bytes).
        file: the file of this folder that has the kernel and its ``rows_launch`` (for FP8
            ``fp8_rows_launch``) or ``weights_launch`` (``fp8_weights_launch``).
        pieces: an output tile is stored in so many column pieces ...
        buffers: ... through so many buffers per consumer.
        pingpong: the two consumers take tiles by turns; otherwise they share a tile's rows. In FP8
            they share them either way, and begin their products by turns.
        partial_sums: the kernel can leave partial sums in fp32 for another kernel to add up: those
            of the last round's tiles, which are cut along K, or those of an expert with many rows.
        adds_beside: a rows kernel can add a second product within its own sum.
    """

    name: str
    file: str
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int = 4
    pieces: int = 1
    buffers: int = 1
    pingpong: bool = False
    partial_sums: bool = False
    adds_beside: bool = False

    def steps(self, product: Pair | None) -> int:
        """The steps of a product's sum; 0 without a product."""
        return 0 if product is None else cdiv(product[0].shape[1], self.block_k)

    def adds_lora(self, K: int, rank: int) -> bool:
        """Whether ``sm90_lora`` has a kernel for a product of this K with LoRA of this rank.

        Shared memory has room for 32 columns of a. Sums that are cut along K have no rounded low.
        """
        return self.name == "cooperative" and K < LONG_SUM and rank in (8, 16, 32)


@functools.cache
def row_variant(name: str, columns: int, gpu: Architecture = HOPPER) -> Variant:
    """The tile of a rows kernel: narrow where wide ones would waste a seventh of ``columns``."""
    wide = _wastes_little(columns)
    n = 256 if wide else 128
    cooperative = Variant("cooperative", "sm90_rows", 128, n, 64, 3 if wide else 5)
    pingpong = Variant("pingpong", "sm90_rows", 64, n, 64, 4 if wide else 6, pingpong=True)
    pointer = Variant("pointer", "portable_pointer", 64, 128, 32, 3, adds_beside=True)
    variants = (
        replace(cooperative, partial_sums=True, adds_beside=True),
        replace(pingpong, adds_beside=True),
        Variant("fp8", "sm90_fp8", 128, n, 128, 4 if wide else 5, pingpong=wide),
        Variant("tma", "portable_tma", 128, n, 64, 3, warps=8),
        pointer,
        replace(pointer, name="fp32", warps=8),
    )
    return _chosen(variants, name, gpu)


@functools.cache
def weight_variant(
    name: str, columns: int, out_dtype: torch.dtype, gpu: Architecture = HOPPER
) -> Variant:
    """The tile of a weight-gradient kernel; fp32 output tiles are stored in pieces to fit.

    Gluon kernels take steps of 32 rows. An expert's last step is half empty on average, which with
    steps of 64 rows took 6 % at 256 rows per expert.
    """
    wide, fp32 = _wastes_little(columns), out_dtype == torch.float32
    n, halves = 256 if wide else 128, 2 if fp32 else 1
    pieces, buffers = (4, 2) if fp32 else (1, 1)
    variants = (
        Variant(
            "cooperative", "sm90_weights", 128, n, 32, 6 if wide else 8,
            pieces=pieces if wide else halves, buffers=buffers if wide else 1, partial_sums=True,
        ),
        Variant(
            "pingpong", "sm90_weights", 128, 128, 64, 5,
            pieces=pieces, buffers=buffers, pingpong=True, partial_sums=True,
        ),
        Variant("fp8", "sm90_fp8_weights", 128, n, 128, 4 if wide else 5, pingpong=wide),
        Variant("tma", "portable_tma", 128, n, 64, 3, warps=8, pieces=halves),
        Variant("pointer", "portable_pointer", 64, 128, 32, 3),
        Variant("fp32", "portable_pointer", 64, 128, 32, 3, warps=8),
    )  # fmt: skip
    return _chosen(variants, name, gpu)


@functools.cache
def gathered_weight_variant(columns: int) -> Variant:
    """The tile of the gathered weight gradient: all of a few columns."""
    return Variant("pointer", "portable_pointer", 128, next_power_of_2(columns), 64, 4)


def _wastes_little(columns: int) -> bool:
    return cdiv(columns, 256) * 256 <= 1.15 * columns


def _chosen(variants: tuple[Variant, ...], name: str, gpu: Architecture) -> Variant:
    """The variant of that name, with the tile that this GPU's row in the table has for it."""
    by_name = {variant.name: variant for variant in variants}
    if name not in by_name:
        raise ValueError(f"variant {name!r}: accepted are {', '.join(by_name)}")
    own = gpu.tile if name == gpu.gemms[0] else None
    return by_name[name] if own is None else replace(by_name[name], **asdict(own))


def choose_rows(gpu: Architecture, dtype: torch.dtype, rows: int, experts: int) -> str:
    """The variant for operands of a dtype and these static averages.

    Measured on H200, see ``sm90_rows``.
    """
    if dtype == torch.float32:
        return "fp32"
    if gpu is HOPPER:
        return "pingpong" if rows < 400 * experts else "cooperative"
    return gpu.gemms[0]


def choose_weights(gpu: Architecture, dtype: torch.dtype, out_dtype: torch.dtype) -> str:
    """The variant for operands and an output of these dtypes.

    Measured on H200, see ``sm90_weights``.
    """
    if dtype == torch.float32:
        return "fp32"
    if gpu is HOPPER:
        return "pingpong" if out_dtype == torch.float32 else "cooperative"
    return gpu.gemms[0]


def kernels_of(variant: Variant, device: torch.device) -> Any:
    """The module with the variant's kernels, which is imported when it is first used.

    Raises:
        ValueError: the GPU does not have what the variant is made of. This is said before a launch,
            since a Gluon variant that is compiled for a foreign architecture ends the process.
    """
    gpu = architecture_of(device)
    if variant.name not in gpu.gemms:
        raise ValueError(
            f"variant {variant.name!r} does not run on {device}, which is {gpu.name} ({gpu.gpus}): "
            f"accepted there are {', '.join(gpu.gemms)}"
        )
    return _module(variant.file)


@functools.cache
def _module(file: str) -> Any:
    return importlib.import_module(f"moe_graphs.kernels.gemm.{file}")


def accumulate_mode(rows: int, experts: int) -> str:
    """The way in which ``sm90_common.store_weights`` adds: "reduce" in L2, or "fetch" first.

    The L2 adds slowly, but beside long products that is hidden. Measured on H200 (2026-11-21),
    TFLOP/s reduce / fetch: 274 / 342 at 512 rows per expert, 541 / 470 at 1024.
    """
    return "reduce" if rows >= 800 * experts else "fetch"


@functools.cache
def sm_count(device: torch.device) -> int:
    """The GPU's number of multiprocessors, each of which takes one program of a GEMM."""
    return torch.cuda.get_device_properties(device).multi_processor_count
