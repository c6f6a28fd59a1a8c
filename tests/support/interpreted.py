"""Lets Triton's interpreter run our plain Triton kernels on the CPU, for one test.

Triton decides at import, by an environment variable, and so for a whole process; here it is done
afterwards and undone again, so that these tests stand beside those that compile. Triton's patches
are put in place once, where it puts them around every launch and every call of a function, which
takes it half of its time. TMA and Gluon kernels are beyond the interpreter (Triton 3.6).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import re
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as tritons
from triton.runtime.jit import JITFunction

from moe_graphs import kernels

_interpreted = functools.cache(tritons.InterpretedFunction)
# Whatever Triton's patches may change.
OF_TRITON = (tl, tl.standard, tl.random)
PATCHED = (*OF_TRITON, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)

ROUNDINGS = (
    ("create_fp_to_fp", tl.float8e4nv, torch.float8_e4m3fn, torch.uint8),
    ("create_fp_trunc", tl.bfloat16, torch.bfloat16, torch.uint16),
)


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """Every kernel of ours that is launched in the block, and what it calls, is interpreted."""
    ours = _kernel_modules()
    with contextlib.ExitStack() as stack:
        for place in (*ours, *PATCHED):
            stack.callback(_put_back, place, dict(vars(place)))
        for module in (*ours, *OF_TRITON):
            for name, value in list(vars(module).items()):
                if type(value) is JITFunction:  # Gluon's are of a class of their own
                    setattr(module, name, _interpreted(value.fn))
        # A function that knows both names under which Triton's functions know the language.
        tritons._patch_lang(types.FunctionType(_nothing.__code__, {"tl": tl, "core": tl.core}))
        # Triton 3.6 calls int() on one-element arrays, which numpy 2.4 refuses.
        tl.tensor.__index__ = lambda self: int(self.handle.data.item())
        stack.enter_context(mock.patch.object(tritons, "_patch_lang", _nothing))
        # That of Triton 3.9 rounds once, as GPUs do and torch's operations do not.
        builder = tritons.InterpreterBuilder
        stack.enter_context(mock.patch.object(builder, "create_fma", _product_and_sum))
        for rounding in ROUNDINGS:
            stack.enter_context(_with_rounding(*rounding))
        stack.enter_context(mock.patch.object(builder, "create_inline_asm", _inline_ptx))
        # Triton 3.9 refuses the masks of integers that it makes of a comparison of scalars.
        for name in ("create_masked_load", "create_masked_store"):
            stack.enter_context(_with_masks_of_bools(name))
        yield


def _product_and_sum(_: Any, x: Any, y: Any, z: Any) -> Any:
    return tritons.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)


def _with_rounding(name: str, kind: tl.dtype, dtype: torch.dtype, bits: torch.dtype) -> Any:
    """Torch's rounding, which is that of GPUs.

    Triton's own loses the carry of a code of e4m3, and does not round to bf16.
    """
    builder = tritons.InterpreterBuilder
    convert = getattr(builder, name)

    def converted(self: Any, source: Any, to: Any, *rounding: Any) -> Any:
        if to.scalar != kind or source.data.dtype not in (np.float16, np.float32):
            return convert(self, source, to, *rounding)
        codes = torch.tensor(source.data).to(dtype).view(bits)
        return tritons.TensorHandle(codes.numpy(), to.scalar)

    return mock.patch.object(builder, name, converted)


def _inline_ptx(_: Any, asm: str, constraints: str, values: Any, of: Any, *_more: Any) -> Any:
    """The three pieces of PTX that kernels have."""
    if "prmt" in asm:
        made = _permuted(asm, constraints, [value.data for value in values])
    elif "cvt.rn.bf16x2" in asm:
        made = torch.tensor(values[0].data).to(torch.bfloat16).float().numpy()
    else:
        assert "ex2.approx" in asm
        assert "rcp.approx" in asm
        made = torch.tensor(values[0].data).sigmoid().numpy()
    found = tritons.TensorHandle(made, of[0].scalar)
    return types.SimpleNamespace(get_result=lambda _: found)


def _permuted(asm: str, constraints: str, values: list[np.ndarray]) -> np.ndarray:
    """Bytes of four arrays, permuted four elements of each at a time."""
    outputs = constraints.count("=")
    registers = {  # of four bytes each
        f"${outputs + i}": np.moveaxis(value.reshape(*value.shape[:-1], -1, 4), -1, 0)
        for i, value in enumerate(values)
    }
    for to, first, second, chosen in re.findall(r"prmt.b32 (\S+), (\S+), (\S+), 0x(\w+);", asm):
        both = np.concatenate((registers[first], registers[second]))
        registers[to] = np.stack([both[int(digit, 16)] for digit in reversed(chosen)])
    words = [np.moveaxis(registers[f"${i}"], 0, -1) for i in range(outputs)]
    words = [np.ascontiguousarray(word).view(np.uint32)[..., 0] for word in words]
    return np.stack(words, -1).reshape(values[0].shape)


def _with_masks_of_bools(name: str) -> Any:
    builder = tritons.InterpreterBuilder
    move = getattr(builder, name)

    def moved(self: Any, pointers: Any, *args: Any) -> Any:
        mask = args[name == "create_masked_store"]
        mask.data = mask.data.astype(bool)
        return move(self, pointers, *args)

    return mock.patch.object(builder, name, moved)


@functools.cache
def _kernel_modules() -> list[types.ModuleType]:
    found = pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    return [importlib.import_module(module.name) for module in found]


def _nothing(*_: Any) -> Any:
    return tritons._LangPatchScope()


def _put_back(place: Any, before: dict[str, Any]) -> None:
    for name, value in list(vars(place).items()):
        if name in before and value is not before[name]:
            setattr(place, name, before[name])
        # What the interpreter lends to the functions it has rewritten stays with them.
        elif name not in before and name not in vars(tritons):
            delattr(place, name)
