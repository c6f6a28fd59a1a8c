"""Files whose linear layers are packed, read without a detour over bf16.

With NF4 by bitsandbytes a matrix is six tensors (four without double quantisation): codes, scales,
the tables that both index, the scales of scales, and a record as JSON. In FP8, as DeepSeek-V3 is
published, it is codes and a scale for each block of 128x128. Those of a layer's experts become one
packed weight, code for code. Other matrices, such as those of attention, are dequantised.

Source: ``bitsandbytes.functional.QuantState``, and ``Linear4bit``'s names in state dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from moe_graphs.checkpoints.float8 import SCALE, dequantised
from moe_graphs.integrations.transformers.packing import WEIGHTS
from moe_graphs.kernels.packed_weights import FORMATS, PackedFormat
from moe_graphs.kernels.packed_weights.reference import DYNAMIC_VALUES, FP8, NF4_VALUES, DoubleNF4

_STATE = ".quant_state.bitsandbytes__nf4"
# What the names of a matrix' tensors end with. Longest first: transformers takes the first that a
# name begins with.
_ENDS_OF_NF4 = (_STATE, ".nested_quant_map", ".nested_absmax", ".quant_map", ".absmax", "")
_ENDS = {"nf4": _ENDS_OF_NF4, "nf4_double": _ENDS_OF_NF4, "fp8": (SCALE, "")}
_BLOCK = FP8.block
_JOINING = {"MergeModulelist", "Concatenate"}
Place = Callable[[str, tuple[Tensor, ...]], None]


def converters(
    conversions: Sequence[Any], format: str, place: Place, quantizer: Any
) -> list[WeightConverter]:
    """The conversions of a model, with experts and all other weights as packed files have them.

    Args:
        conversions: transformers' own.
        place: takes the full name of an experts' weight and what is stored of it.
        quantizer: the one that transformers loads with, which says that ops take tensors as are.

    Raises:
        ValueError: the model joins its experts in a way that packed ones are not joined in.
    """
    found, ends, loads = [], _ENDS[format], _JoinExperts(format, place, quantizer)
    for each in conversions:
        if isinstance(each, WeightConverter) and each.target_patterns[0].endswith(WEIGHTS):
            kinds = {type(op).__name__ for op in each.operations}
            if kinds - _JOINING:
                joined = ", ".join(sorted(kinds - _JOINING))
                raise ValueError(f"ExpertsInFewBits: experts that are joined by {joined}")
            names = [source + end for end in ends for source in each.source_patterns]
            each = WeightConverter(names, each.target_patterns, [loads])
        found.append(each)
    names = ["weight" + end for end in ends]
    return [*found, WeightConverter(names, "weight", [_Dequantize(quantizer)])]


def stored_of(matrix: Mapping[str, Tensor], kind: PackedFormat) -> tuple[Tensor, ...]:
    """Tensors of ``kind`` of one matrix ``[1, M, N]``, from those of its files by their ends.

    Raises:
        ValueError: the files have another format, or other tables.
    """
    if _STATE not in matrix:
        codes, scales = _blocks_of(matrix, kind)
        kind.packed_shapes((1, *codes.shape))  # which refuses blocks that are cut off
        return codes[None], scales[None]
    state = json.loads(bytes(matrix[_STATE].to(torch.uint8).tolist()))
    shape = (1, *state["shape"])
    is_double = ".nested_absmax" in matrix
    sizes = state["quant_type"], state["blocksize"], state.get("nested_blocksize", 256)
    if isinstance(kind, DoubleNF4) != is_double or sizes != ("nf4", 64, 256):
        blocks = ", ".join(f"{name} {value}" for name, value in state.items() if name != "shape")
        raise ValueError(f"ExpertsInFewBits: the files have no {kind.name}, but {blocks}")
    tables = {".quant_map": NF4_VALUES, ".nested_quant_map": DYNAMIC_VALUES}
    for end, values in tables.items():
        if end in matrix and matrix[end].tolist() != list(values):
            raise ValueError(f"ExpertsInFewBits: the files have another {end.removeprefix('.')}")
    found = [matrix[""].to(torch.uint8), matrix[".absmax"]]
    if is_double:
        largest = matrix[".nested_absmax"]
        found += [largest, torch.full_like(largest, state["nested_offset"])]
    shapes, dtypes = kind.packed_shapes(shape), kind.dtypes
    given = zip(found, shapes, dtypes, strict=True)
    return tuple(each.to(dtype).reshape(each_shape) for each, each_shape, dtype in given)


def _blocks_of(matrix: Mapping[str, Tensor], kind: PackedFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix in FP8, whose blocks at the edges may be cut off."""
    codes, scales = matrix[""], matrix.get(SCALE)
    if kind.name == "fp8" and scales is not None:
        blocks = tuple(-(-side // _BLOCK) for side in codes.shape)
        if (codes.dtype, scales.dtype) == kind.dtypes and tuple(scales.shape) == blocks:
            return codes, scales
    tensors = ", ".join(
        f"{end or 'weight'} {x.dtype} {tuple(x.shape)}" for end, x in matrix.items()
    )
    raise ValueError(f"ExpertsInFewBits: the files have no {kind.name}, but {tensors}")


class _JoinExperts(ConversionOps):  # type: ignore[misc]
    """Joins the matrices of a layer's experts, and leaves nothing to place."""

    def __init__(self, format: str, place: Place, hf_quantizer: Any) -> None:
        self.kind, self.place, self.hf_quantizer = FORMATS[format], place, hf_quantizer

    def __deepcopy__(self, memo: Any) -> _JoinExperts:
        return self  # transformers copies converters for each weight

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, list[Tensor]],
        *,
        source_patterns: list[str],
        full_layer_name: str,
        missing_keys: set[str],
        **options: Any,
    ) -> dict[str, Tensor]:
        sources = [each for each in source_patterns if each.endswith("weight")]
        joined = [
            self._joined([self._stored(input_dict, source, number) for source in sources])
            for number in range(len(input_dict[sources[0]]))
        ]
        self.place(full_layer_name, tuple(map(torch.cat, zip(*joined, strict=True))))
        missing_keys.discard(full_layer_name)
        return {}

    def _stored(
        self, given: Mapping[str, list[Tensor]], source: str, number: int
    ) -> tuple[Tensor, ...]:
        ends = [end for end in _ENDS[self.kind.name] if source + end in given]
        return stored_of({end: given[source + end][number] for end in ends}, self.kind)

    def _joined(self, parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Matrices of one expert, one below the other."""
        kind = self.kind
        if len(parts) > 1 and isinstance(kind, DoubleNF4) and parts[0][1].numel() % kind.group:
            raise ValueError(
                f"ExpertsInFewBits: {parts[0][1].numel()} scales of a matrix are no whole groups "
                f"of {kind.group}, so matrices cannot be joined: load bf16 files"
            )
        return tuple(torch.cat(each, 1) for each in zip(*parts, strict=True))


class _Dequantize(ConversionOps):  # type: ignore[misc]
    """Dequantises a matrix that the files have packed; other weights pass."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: Any) -> _Dequantize:
        return self

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **options: Any
    ) -> dict[str, Tensor]:
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        given = {n: each[0] if isinstance(each, list) else each for n, each in input_dict.items()}
        matrix = {name.removeprefix("weight"): each for name, each in given.items()}
        if SCALE in matrix or matrix[""].dtype == FP8.dtypes[0]:
            value = dequantised(*_blocks_of(matrix, FORMATS["fp8"]), (_BLOCK, _BLOCK))
            return {full_layer_name: value.to(dtype)}
        if _STATE not in matrix:
            return {full_layer_name: matrix[""].to(dtype)}
        kind = FORMATS["nf4_double" if ".nested_absmax" in matrix else "nf4"]
        return {full_layer_name: kind.dequantize(stored_of(matrix, kind), dtype)[0]}
