"""Formats of weights in few bits: what is stored, and plain torch that packs and unpacks it.

A format stores codes, and a scale for each block of codes. The product of a code's value and its
scale is computed in fp32 and rounded once. The kernels are held against this.

| format | codes | scales | the same in |
|---|---|---|---|
| ``nf4`` | two of 16 values per byte, the first one in the high half | fp32 for 64 | bitsandbytes |
| ``nf4_double`` | those of ``nf4`` | 8 bits for 64, two fp32 for 256 of them | bitsandbytes |
| ``mxfp4`` | two E2M1 per byte, the first one in the low half | a power of two for 32 | gpt-oss |
| ``fp8`` | E4M3 | fp32 for 128x128 | DeepSeek-V3, ``FP8Experts`` of transformers |

Shapes: E experts, M and N the two sides of a weight, X blocks of B codes, G blocks of a row or
groups of blocks, m and n blocks of each side.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1, *(-value for value in _E2M1))
_E4M3_LARGEST = 448.0
_TINY = 1e-38  # bitsandbytes divides by no less
_BIAS = 127
Stored = Sequence[Tensor]


def _dynamic_values() -> tuple[float, ...]:
    """The 256 numbers of bitsandbytes' dynamic map: 0, 1, and 127 others of both signs.

    Decade ``i`` of seven has ``2**i`` numbers, each the middle of an equal part of the decade.
    """
    found = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        middles = (bounds[:-1] + bounds[1:]) / 2 * 10 ** (i - 6)  # in fp32
        found += [*middles.tolist(), *(-middles).tolist()]
    return tuple(sorted(found))


DYNAMIC_VALUES = _dynamic_values()


class PackedFormat(ABC):
    """A format: the tensors that it stores, and how they are made and read.

    Attributes:
        name: the format's name in ``FORMATS``.
        suffixes: what is added to a weight's name for codes, scales, and what else is stored.
        dtypes: of the same tensors.
        along_inputs: whether a block runs along the inputs of a product, however the weight lies.
            Otherwise it runs along the weight's last dimension.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    along_inputs: ClassVar[bool] = False

    @abstractmethod
    def packed_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Shapes of what is stored of a weight ``[E, M, N]``; all begin with E.

        Raises:
            ValueError: a side of the weight does not divide by the block.
        """

    @abstractmethod
    def shape_of(self, codes: Tensor) -> tuple[int, int, int]:
        """The shape ``[E, M, N]`` of the weight that has these codes."""

    def quantize(self, weight_EMN: Tensor) -> tuple[Tensor, ...]:
        """Codes, scales and what else is stored of a weight of any float dtype."""
        shapes = self.packed_shapes(weight_EMN.shape)
        device, kinds = weight_EMN.device, zip(shapes, self.dtypes, strict=True)
        stored = tuple(torch.empty(each, dtype=kind, device=device) for each, kind in kinds)
        if not weight_EMN.is_meta:
            for weight_MN, *packed in zip(weight_EMN, *stored, strict=True):
                for to, found in zip(packed, self._packed(weight_MN.float()), strict=True):
                    to.copy_(found.view_as(to))
        return stored

    @abstractmethod
    def _packed(self, weight_MN: Tensor) -> tuple[Tensor, ...]:
        """Tensors that are stored of one expert's weight in fp32, in any shape."""

    @abstractmethod
    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """The weight ``[E, M, N]``, computed in fp32 and rounded to ``dtype``."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of all that is stored."""
        pairs = zip(self.packed_shapes(shape), self.dtypes, strict=True)
        return sum(math.prod(each) * dtype.itemsize for each, dtype in pairs)

    def check(self, stored: Stored) -> None:
        """Check what is stored.

        Raises:
            ValueError: codes and scales are none of this format, with their dtypes and shapes.
        """
        dtypes = tuple(each.dtype for each in stored)
        if dtypes != self.dtypes:
            wanted, found = (" and ".join(map(str, each)) for each in (self.dtypes, dtypes))
            raise ValueError(
                f"{self.name} has codes and scales of {wanted}, got {found}: model.to(dtype) casts "
                f"scales, so choose the dtype before quantize_experts"
            )
        codes, *scales = (tuple(each.shape) for each in stored)
        if (codes, *scales) != self.packed_shapes(self.shape_of(stored[0])):
            raise ValueError(
                f"{self.name}: scales {', '.join(map(str, scales))} do not fit codes {codes}"
            )

    def _refuse(self, shape: Sequence[int], block: str) -> None:
        raise ValueError(
            f"{self.name} packs blocks of {block}, and a weight {tuple(shape)} does not divide by "
            f"them: take another format, or leave these experts in bf16"
        )


class _FourBits(PackedFormat):
    """Two codes per byte, and one scale for ``block`` of them along the last dimension."""

    block: ClassVar[int]
    values: ClassVar[tuple[float, ...]]
    high_first: ClassVar[bool]

    def packed_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        *rows, columns = shape
        if columns % self.block:
            self._refuse(shape, f"{self.block} along the last dimension")
        return (*rows, columns // 2), (*rows, columns // self.block)

    def shape_of(self, codes: Tensor) -> tuple[int, int, int]:
        experts, rows, half = codes.shape
        return experts, rows, 2 * half

    def _packed(self, weight_MN: Tensor) -> tuple[Tensor, ...]:
        found_XB, scales_X = self._blocks(weight_MN.reshape(-1, self.block))
        first_XB, second_XB = found_XB[:, ::2], found_XB[:, 1::2]
        high, low = (first_XB, second_XB) if self.high_first else (second_XB, first_XB)
        return (high << 4) | low, scales_X

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        codes, *scales = stored
        halves = codes >> 4, codes & 15
        both = torch.stack(halves if self.high_first else halves[::-1], -1)
        values = torch.tensor(self.values, dtype=torch.float32, device=codes.device)
        numbers_XB = values[both.view(-1, self.block).int()]
        numbers_XB *= self._factors(*scales).view(-1, 1)
        return numbers_XB.to(dtype).view(self.shape_of(codes))

    @abstractmethod
    def _blocks(self, weight_XB: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (uint8) and scales of blocks in fp32."""

    @abstractmethod
    def _factors(self, scales: Tensor, *others: Tensor) -> Tensor:
        """Scales in fp32."""


def _coded(numbers_XB: Tensor, values: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The nearest of these values for each number over its block's largest one, and the latter."""
    largest_X = numbers_XB.abs().amax(1)
    unit_XB = numbers_XB * (1.0 / largest_X.clamp(min=_TINY)).unsqueeze(1)
    table = torch.tensor(values, dtype=torch.float32, device=numbers_XB.device)
    bounds = (table[1:] + table[:-1]) / 2
    return torch.bucketize(unit_XB, bounds, out_int32=True).to(torch.uint8), largest_X


class NF4(_FourBits):
    """Quantiles of a normal distribution times the largest number of a block.

    bitsandbytes packs a weight as it lies in memory (``quantize_4bit`` with blocks of 64, and
    ``compress_statistics=False``). Codes and scales here are those, in the shape of the weight.
    """

    name = "nf4"
    suffixes: ClassVar[tuple[str, ...]] = ("_codes", "_absmax")
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.float32)
    block, values, high_first = 64, NF4_VALUES, True

    def _blocks(self, weight_XB: Tensor) -> tuple[Tensor, Tensor]:
        return _coded(weight_XB, NF4_VALUES)

    def _factors(self, scales: Tensor, *others: Tensor) -> Tensor:
        return scales


class DoubleNF4(NF4):
    """NF4 whose scales are in 8 bits, too: bitsandbytes' double (nested) quantisation.

    A scale is ``value * largest + offset``. Values are those of the dynamic map, ``largest`` is the
    largest number of a group of 256 scales less the offset, and the offset is the mean of a matrix'
    scales. bitsandbytes (``compress_statistics=True``) has one offset for a tensor. Here there is
    one for each group, so that tensors that were packed apart can be joined.
    """

    name = "nf4_double"
    suffixes = ("_codes", "_absmax", "_nested_absmax", "_nested_offset")
    dtypes = (torch.uint8, torch.uint8, torch.float32, torch.float32)
    group = 256

    def packed_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        codes, (experts, rows, blocks) = super().packed_shapes(shape)
        groups = experts, -(-rows * blocks // self.group)
        return codes, (experts, rows, blocks), groups, groups

    def _packed(self, weight_MN: Tensor) -> tuple[Tensor, ...]:
        codes, scales_X = super()._packed(weight_MN)
        offset = scales_X.mean()
        count = len(scales_X)
        rest_X = nn.functional.pad(scales_X - offset, (0, -count % self.group))
        short_GX, largest_G = _coded(rest_X.view(-1, self.group), DYNAMIC_VALUES)
        return codes, short_GX.view(-1)[:count], largest_G, offset.expand_as(largest_G)

    def _factors(self, scales: Tensor, *others: Tensor) -> Tensor:
        values = torch.tensor(DYNAMIC_VALUES, dtype=torch.float32, device=scales.device)
        units_EX = values[scales.flatten(1).int()]
        largest_EX, offset_EX = (
            each_EG.repeat_interleave(self.group, 1)[:, : units_EX.shape[1]] for each_EG in others
        )
        return units_EX * largest_EX + offset_EX


class MXFP4(_FourBits):
    """E2M1 with a shared power of two, as gpt-oss is published.

    ``gate_up_proj_blocks [E, 2F, G, 16]`` and ``gate_up_proj_scales [E, 2F, G]`` of its files are
    codes ``[E, 2F, 16 G]`` and scales here. The scale is the least one that keeps the largest
    number of a block in range, so values that came from MXFP4 are kept.
    """

    name = "mxfp4"
    suffixes = ("_blocks", "_scales")
    dtypes = (torch.uint8, torch.uint8)
    block, values, high_first = 32, E2M1_VALUES, False
    along_inputs = True

    def _blocks(self, weight_XB: Tensor) -> tuple[Tensor, Tensor]:
        mantissa_X, exponent_X = torch.frexp(weight_XB.abs().amax(1))
        # mantissa * 2**exponent <= 6 * 2**scale, where 6 is 0.75 * 2**3
        exponent_X = exponent_X - 3 + (mantissa_X > 0.75).int()
        exponent_X = exponent_X.clamp(-_BIAS, _BIAS)
        size_XB = torch.ldexp(weight_XB.double(), -exponent_X.unsqueeze(1)).abs()
        values = torch.tensor(_E2M1, dtype=torch.float64, device=weight_XB.device)
        bounds = (values[1:] + values[:-1]) / 2
        below_XB = torch.bucketize(size_XB, bounds, out_int32=True)
        above_XB = torch.bucketize(size_XB, bounds, out_int32=True, right=True)
        codes_XB = torch.where(above_XB % 2 == 0, above_XB, below_XB)  # ties go to the even code
        codes_XB += 8 * weight_XB.signbit()
        return codes_XB.to(torch.uint8), (exponent_X + _BIAS).to(torch.uint8)

    def _factors(self, scales: Tensor, *others: Tensor) -> Tensor:
        exponents = scales.int()  # biased as those of fp32 are; zero stands for 2**-127
        return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)


class FP8(PackedFormat):
    """E4M3 with one scale for each block of 128 rows and 128 columns."""

    name = "fp8"
    suffixes = ("", "_scale_inv")
    dtypes = (torch.float8_e4m3fn, torch.float32)
    block = 128

    def packed_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        experts, rows, columns = shape
        if rows % self.block or columns % self.block:
            self._refuse(shape, f"{self.block}x{self.block}")
        return (experts, rows, columns), (experts, rows // self.block, columns // self.block)

    def shape_of(self, codes: Tensor) -> tuple[int, int, int]:
        experts, rows, columns = codes.shape
        return experts, rows, columns

    def _packed(self, weight_MN: Tensor) -> tuple[Tensor, ...]:
        blocks = self._blocks(weight_MN)
        largest = blocks.abs().amax((1, 3))
        factor = _E4M3_LARGEST / torch.where(largest > 0, largest, _E4M3_LARGEST)
        blocks = blocks * factor[:, None, :, None]
        blocks = blocks.clamp(-_E4M3_LARGEST, _E4M3_LARGEST)
        return blocks.to(self.dtypes[0]), 1.0 / factor

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        codes, scales = stored
        blocks = self._blocks(codes.float().flatten(0, 1))
        blocks *= scales.flatten(0, 1)[:, None, :, None]
        return blocks.to(dtype).view(codes.shape)

    def _blocks(self, weight_MN: Tensor) -> Tensor:
        rows, columns = weight_MN.shape
        return weight_MN.view(rows // self.block, self.block, columns // self.block, self.block)


FORMATS: dict[str, PackedFormat] = {
    kind.name: kind for kind in (NF4(), DoubleNF4(), MXFP4(), FP8())
}


def format_named(name: str) -> PackedFormat:
    """Find a format.

    Raises:
        ValueError: there is none of that name; the message has those that there are.
    """
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"no format {name!r} of weights in few bits: known are {known}")
    return FORMATS[name]
