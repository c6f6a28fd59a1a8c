"""Compile Triton kernels on a machine without a GPU, and read the messages of ptxas.

A kernel is compiled once: Triton caches its output on disk, by its inputs, and we store ptxas'
messages beside it. So processes of a test run share the cache, and the next run has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime.jit import JITFunction

from pretended_gpu import pretended_gpu

SHARED_LIMIT = 232448  # bytes a block may use on Hopper
# Bytes: three kernels that need all registers there are spill some with the ptxas of Triton 3.9.
SPILLS = 96 if hasattr(tma, "async_load") else 0


@dataclass(frozen=True)
class CompileOnlyDriver:
    """Enough of a driver to compile: the target, and a device number nothing else uses."""

    arch: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 1000 + self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True)
class Loop:
    """An `scf.for` of a kernel's TTGIR: its bounds, and the values it carries."""

    start: str
    stop: str
    carried: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: its IR and the register and warning lines of ptxas."""

    name: str
    ttgir: str
    ptx: str
    log: str
    shared: int
    early: bool  # may be launched before the kernel in front of it is done
    number: int  # the same for launches that share what was compiled

    @property
    def spills(self) -> int:
        return sum(map(int, re.findall(r"(\d+) bytes spill", self.log)))

    @property
    def serialised(self) -> list[str]:
        """Warnings C75xx: WGMMAs that ptxas could not keep in flight."""
        return re.findall(r".*(?:C75\d\d|serializ).*", self.log)

    @property
    def touches_memory_early(self) -> bool:
        """Whether the kernel touches memory before it waits for the kernel in front of it."""
        before, *behind = self.ptx.split("griddepcontrol.wait")
        memory = re.search(r"(?:ld|st|red|atom)\.(?!param)|cp\.async", before)
        return not behind or memory is not None

    @property
    def reused_barriers(self) -> set[str]:
        """Offsets in shared memory where a barrier is initialised and plain memory lies, too."""
        bases = re.findall(r"mov\.b32 \s*(%r\d+), global_smem;", self.ptx)
        sums = re.findall(r"add\.s32 \s*(%r\d+), (%r\d+), (\d+);", self.ptx)
        offsets = dict.fromkeys(bases, "0")
        offsets |= {register: offset for register, base, offset in sums if base in bases}
        barriers = re.findall(r"mbarrier\.init\S* \s*\[(%r\d+)\]", self.ptx)
        plain = re.findall(r"(?:ld|st)\.shared\S* [^\[;]*\[global_smem\+?(\d*)\]", self.ptx)
        return {offsets[barrier] for barrier in barriers} & {offset or "0" for offset in plain}

    @property
    def loops(self) -> list[Loop]:
        """Loops in the order of the text: default partition, then the others, outer loop first."""
        found = re.findall(
            r"scf\.for %\w+ = (\S+) to (\S+) step \S+(?: iter_args\((.*?)\))? ", self.ttgir
        )
        return [Loop(a, b, tuple(re.findall(r"(%\w+) = ", c))) for a, b, c in found]

    @property
    def carried(self) -> list[int]:
        return [len(loop.carried) for loop in self.loops]


def launch_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Compiled]]:
    """Function `compiled(function, arch)` that calls `function` and compiles its launches.

    Nothing is launched. The kernels take `arch` for the GPU's architecture, unless they are told
    another. The compiled kernels are returned.
    """
    kernels = []
    run = JITFunction.run

    def only_compile(self, *args, grid, warmup, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(_inspect(self.__name__, kernel, said.getvalue()))

    def compiled(function: Callable, arch: int = 90, told: int | None = None) -> list[Compiled]:
        kernels.clear()
        # Not set_active: its undoing looks for a GPU.
        monkeypatch.setattr(triton.runtime.driver, "_active", CompileOnlyDriver(arch))
        monkeypatch.setattr(knobs.nvidia, "dump_ptxas_log", True)  # to standard output
        with pretended_gpu(told or arch):
            function()
        return list(kernels)

    monkeypatch.setattr(JITFunction, "run", only_compile)
    return compiled


def check(kernel: Compiled, wgmma: bool) -> None:
    """Check properties of every kernel of ours."""
    assert kernel.spills <= SPILLS, kernel.log
    assert kernel.serialised == []
    assert kernel.shared <= SHARED_LIMIT
    assert not kernel.reused_barriers
    assert not (kernel.early and kernel.touches_memory_early)
    assert ("wgmma.mma_async" in kernel.ptx) == wgmma
    # 16-bit operands of either major go to WGMMA as they lie: no transposing copies.
    assert "ttg.local_alloc %" not in kernel.ttgir or not wgmma


def _inspect(name: str, kernel: Any, log: str) -> Compiled:
    """Read a kernel's IR and its `log`, which is empty if Triton had the kernel cached."""
    ptx = kernel.asm["ptx"]
    kept = Path(knobs.cache.dir) / "ptxas" / f"{hashlib.sha256(ptx.encode()).hexdigest()}.log"
    if not log:
        log = kept.read_text() if kept.exists() else _ptxas(ptx, kernel.metadata.target.arch)
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            file.write(log)
        Path(file.name).replace(kept)
    metadata = kernel.metadata
    found = kernel.asm["ttgir"], ptx, log, metadata.shared, metadata.launch_pdl
    return Compiled(name, *found, number=id(kernel))


def _ptxas(ptx: str, arch: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
        command = [knobs.nvidia.ptxas.path, "-v", target, str(source), "-o", f"{source}.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
