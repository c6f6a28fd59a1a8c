"""Which kernel and which tile: from what the host knows, shapes, dtypes and the GPU.

The best variant per shape against these rules was worth 0.05 % (forward) and 0.5 % (weights) in the
mean of 13 shapes on an H200: noise, so nothing is tuned at run time.
"""

import functools
from dataclasses import asdict, dataclass, replace

import torch

from moe_graphs.kernels.gpu_architectures import HOPPER, Architecture, architecture_of
from moe_graphs.kernels.launching import cdiv

GLUON = ("split", "pingpong", "gather")

# From this K on, the last round of row tiles may be cut along it: adding up the parts takes about
# 10 us, and half a round of 4096 is 25.
LONG_SUM = 4096


@dataclass(frozen=True)
class Variant:
    """A kernel and its tile: `name` split or pingpong (Gluon), tma (plain Triton), pointer.

    `pieces` column pieces of an output tile go through `buffers` buffers per consumer.
    """

    name: str
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int = 4
    pieces: int = 1
    buffers: int = 1


@functools.cache
def row_variant(name: str, columns: int, gpu: Architecture = HOPPER) -> Variant:
    """The tile of a rows kernel: narrow where wide ones would waste a seventh of `columns`."""
    wide = cdiv(columns, 256) * 256 <= 1.15 * columns
    variants = {
        "split": Variant("split", 128, 256, 64, 3) if wide else Variant("split", 128, 128, 64, 5),
        "pingpong": Variant("pingpong", 64, 256 if wide else 128, 64, 4 if wide else 6),
        "gather": Variant("gather", 128, 256, 64, 4, pieces=2)
        if wide
        else Variant("gather", 128, 128, 64, 5),
        "tma": Variant("tma", 128, 256 if wide else 128, 64, 3, warps=8),
        "pointer": Variant("pointer", 64, 128, 32, 3, warps=4),
    }
    return _on(gpu, _named(variants, name))


@functools.cache
def weight_variant(
    name: str, columns: int, out_dtype: torch.dtype, gpu: Architecture = HOPPER
) -> Variant:
    """The tile of a weight-gradient kernel; fp32 output tiles are stored in pieces to fit.

    Steps of 32 rows: an expert's last step is half empty on average, which with 64 rows took 6 %
    at 256 rows per expert.
    """
    wide = cdiv(columns, 256) * 256 <= 1.15 * columns
    long = out_dtype == torch.float32
    variants = {
        "split": Variant("split", 128, 256, 32, 6),
        "pingpong": Variant("pingpong", 128, 128, 64, 5),
        "tma": Variant("tma", 128, 256, 64, 3, warps=8, pieces=2 if long else 1),
        "pointer": Variant("pointer", 64, 128, 32, 3, warps=4),
    }
    if long:
        variants["split"] = Variant("split", 128, 256, 32, 6, pieces=4, buffers=2)
        variants["pingpong"] = Variant("pingpong", 128, 128, 64, 5, pieces=4, buffers=2)
    if not wide:
        variants["split"] = Variant("split", 128, 128, 32, 8, pieces=2 if long else 1)
        variants["tma"] = replace(variants["tma"], block_n=128)
    return _on(gpu, _named(variants, name))


def _named(variants: dict[str, Variant], name: str) -> Variant:
    if name not in variants:
        raise ValueError(f"variant {name!r}: accepted are {', '.join(variants)}")
    return variants[name]


def _on(gpu: Architecture, variant: Variant) -> Variant:
    """The variant with the tile that this GPU's row has for it."""
    own = gpu.tile if variant.name == gpu.gemms[0] else None
    return variant if own is None else replace(variant, **asdict(own))


def choose_rows(gpu: Architecture, rows: int, experts: int) -> str:
    """The variant for these static averages. Measured on H200, see gluon_rows."""
    if gpu is HOPPER:
        return "pingpong" if rows < 400 * experts else "split"
    return gpu.gemms[0]


def choose_weights(gpu: Architecture, out_dtype: torch.dtype) -> str:
    """The variant for this output. Measured on H200, see gluon_weights."""
    if gpu is HOPPER:
        return "pingpong" if out_dtype == torch.float32 else "split"
    return gpu.gemms[0]


def check_variant(variant: Variant, device: torch.device) -> None:
    """Raises where the GPU does not have what the variant is made of: before a launch, since a
    Gluon variant that is compiled for a foreign architecture ends the process."""
    gpu = architecture_of(device)
    if variant.name not in gpu.gemms:
        raise ValueError(
            f"variant {variant.name!r} does not run on {device}, which is {gpu.name} ({gpu.gpus}): "
            f"accepted there are {', '.join(gpu.gemms)}"
        )


def way_to_add(rows: int, experts: int) -> str:
    """See gluon_parts.store_weights. The L2 adds slowly, but beside long products that is hidden.

    Measured on H200 (2026-11-21), TFLOP/s reduce / fetch: 274 / 342 at 512 rows per expert,
    541 / 470 at 1024.
    """
    return "reduce" if rows >= 800 * experts else "fetch"


@functools.cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
