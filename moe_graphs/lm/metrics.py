"""Measurements of a run: speed, memory, and how far compressors get with the same bytes."""

from __future__ import annotations

import bz2
import lzma
import resource
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HOPPER_PEAK = 989e12  # dense bf16 FLOP/s of an H100 or H200 (SXM), by the data sheet


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s from the data sheet, or None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    is_sxm = ("H100" in name or "H200" in name) and "PCIe" not in name and "NVL" not in name
    return HOPPER_PEAK if is_sxm else None


@dataclass(frozen=True)
class Memory:
    """Memory in use.

    ``kind`` says what was measured; ``limit`` is the device's or the machine's memory.
    """

    bytes: int
    kind: str
    limit: int | None

    def __str__(self) -> str:
        share = f"({100 * self.bytes / self.limit:.0f}%)" if self.limit else ""
        return f"{self.bytes / 2**30:.2f}GiB{share}"


def memory_in_use(device: torch.device) -> Memory:
    """Memory in use: on CUDA the most that was reserved, on the CPU what is resident now."""
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).total_memory
        return Memory(torch.cuda.max_memory_reserved(device), "peak reserved on the device", limit)
    statm = Path("/proc/self/statm")
    if statm.exists():
        page = resource.getpagesize()
        return Memory(int(statm.read_text().split()[1]) * page, "resident set of the process", None)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Memory(peak, "peak resident set of the process", None)


def compressed_bits_per_byte(content: bytes) -> dict[str, float]:
    """Bits per byte of ``content`` as one stream, at each compressor's strongest setting."""
    compressed = {
        "zlib -9": zlib.compress(content, 9),
        "bz2 -9": bz2.compress(content, 9),
        "xz -9e": lzma.compress(content, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8 * len(data) / len(content) for name, data in compressed.items()}


class StepClock:
    """Times steps without synchronising: CUDA events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: list[tuple[Any, Any]] = []  # events, or seconds
        self.milliseconds: list[float] = []

    def start(self) -> None:
        self._open.append((self._now(), None))

    def stop(self) -> None:
        self._open[-1] = (self._open[-1][0], self._now())

    def read(self) -> list[float]:
        """The durations since the last read, in ms. On a GPU this waits for the last of them."""
        if self._cuda and self._open:
            self._open[-1][1].synchronize()
        if self._cuda:
            new = [begin.elapsed_time(end) for begin, end in self._open]
        else:
            new = [1e3 * (end - begin) for begin, end in self._open]
        self._open.clear()
        self.milliseconds.extend(new)
        return new

    def _now(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
