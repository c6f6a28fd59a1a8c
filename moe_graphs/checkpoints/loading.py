"""Loading of a model from a directory of Hugging Face, tensor by tensor."""

from __future__ import annotations

import functools
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_graphs.checkpoints.families import family_name
from moe_graphs.checkpoints.float8 import FLOAT8, SCALE, block_of, dequantised, take_scales
from moe_graphs.checkpoints.hf_config import transformer_config
from moe_graphs.checkpoints.shards import CONFIG, Stored, open_shard, read_headers, read_json, some
from moe_graphs.checkpoints.weight_names import Piece, pieces, tensors_of
from moe_graphs.layers.model_config import TransformerConfig
from moe_graphs.registry import FAMILIES

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


# A part of a tensor: a slice for every dimension, or ``...`` for all of it.
Region = tuple[Any, ...]
Parts = Callable[[str, Region], Iterable[tuple[Tensor, Region]]]
Reader = Callable[[Region], Tensor]


class Files(NamedTuple):
    """Contents of a directory, by its config.json and the headers of its files.

    The names of the tensors are those that ``config`` needs. No weight has been read.

    Attributes:
        values: config.json.
        config: our configuration of the model.
        stored: all tensors that are used, by name.
        scales: scales of the weights in FP8, by the weights' names.
        block: rows and columns of a weight that share one scale.
        pieces: all pieces of the model.
    """

    values: dict[str, Any]
    config: TransformerConfig
    stored: dict[str, Stored]
    scales: dict[str, Stored]
    block: tuple[int, int]
    pieces: list[Piece]


def read_files(directory: Path, max_sequence_length: int | None) -> Files:
    """Read config.json and all headers.

    Args:
        directory: the directory of the checkpoint.
        max_sequence_length: as in ``transformer_config``.

    Raises:
        ValueError: ``transformer_config`` refuses config.json, or files are missing, not whole, or
            hold other tensors than the model needs.
    """
    values = read_json(directory / CONFIG)
    config = transformer_config(values, max_sequence_length=max_sequence_length)
    stored, block = read_headers(directory), block_of(values)
    _leave_out(stored, values, config)
    scales = take_scales(stored, block)
    fused = any(name.endswith("mlp.experts.gate_up_proj") for name in stored)
    wanted = pieces(config, values, fused=fused)
    names = {piece.theirs for piece in wanted}
    if missing := names - stored.keys():
        raise ValueError(f"{directory} lacks {some(missing)}: a model of its {CONFIG} needs them")
    if extra := stored.keys() - names:
        raise ValueError(
            f"{directory} holds {some(extra)}, which a model of its {CONFIG} does not have"
        )
    for name, each in stored.items():
        if each.dtype not in (*_FLOATS, FLOAT8):
            raise ValueError(f"{each.file}: {name} is {each.dtype}: take an unquantised checkpoint")
    return Files(values, config, stored, scales, block, wanted)


def dtype_of(files: Files) -> torch.dtype:
    """Dtype of all matrices in the files, in which no number is rounded; FP8 becomes bf16.

    Raises:
        ValueError: the matrices have several dtypes.
    """
    found = {each.dtype for each in files.stored.values() if len(each.shape) > 1}
    # Beside weights in FP8, the other weights (router and embedding among them) are bf16 or fp32.
    if FLOAT8 in found:
        return torch.bfloat16
    if len(found) > 1:
        raise ValueError(
            f"the files hold tensors of {', '.join(sorted(found))}: give the dtype you want"
        )
    return _FLOATS[found.pop()]


def fill(
    model: nn.Module, files: Files, local_experts: Callable[[int], range], device: torch.device
) -> None:
    """Give a model on the meta device its memory, and copy the weights of ``files`` into it.

    One shard is open at a time, and one of its tensors is in memory.

    Args:
        model: our model on the meta device.
        files: what ``read_files`` has returned.
        local_experts: maps the number of experts to the range of experts that this rank holds.
        device: the device of the model afterwards.

    Raises:
        ValueError: a tensor has another shape; no weight has been read.
    """
    moe = files.config.moe
    local = range(1) if moe is None else local_experts(moe.num_experts)
    mine = [p for p in files.pieces if p.expert is None or p.expert in local]
    _check_shapes(tensors_of(model), files, mine, local.start)
    model.to_empty(device=device)
    ours = tensors_of(model)
    with torch.no_grad():
        for piece, read in _readers(files, mine):
            piece.view(ours[piece.ours], local.start).copy_(read((...,)))


@torch.no_grad()
def fill_parts(whole: nn.Module, files: Files, parts: Parts) -> None:
    """Copy parts of the weights of ``files`` into the memory that ``parts`` names.

    One shard is open at a time, and one of its tensors is in memory. If the files have the tensor
    in our order, only the wanted part of it is.

    Args:
        whole: our model on the meta device, with all experts.
        files: what ``read_files`` has returned.
        parts: maps the name of a tensor and a region of it to pairs of memory and the part of the
            region that is to be copied there.

    Raises:
        ValueError: a tensor has another shape; no weight has been read.
    """
    ours = tensors_of(whole)
    _check_shapes(ours, files, files.pieces, 0)
    wanted = [(p, list(parts(p.ours, p.region(ours[p.ours])))) for p in files.pieces]
    mine = {id(piece): targets for piece, targets in wanted if targets}
    for piece, read in _readers(files, [piece for piece, targets in wanted if targets]):
        for target, region in mine[id(piece)]:
            if piece.expert is None:
                target.copy_(read(region))
            else:
                _, inputs, outputs = region
                target.copy_(read((outputs, inputs)).T)


def _readers(files: Files, pieces: list[Piece]) -> Iterator[tuple[Piece, Reader]]:
    """Yield each piece and a function that reads regions of its tensor in the open shard."""
    scales = _read_scales(files, {piece.theirs for piece in pieces})
    by_file = defaultdict(list)
    for piece in pieces:
        by_file[files.stored[piece.theirs].file].append(piece)
    for file, inside in by_file.items():
        with open_shard(file) as shard:
            for piece in inside:
                yield piece, functools.partial(_read, shard, piece, scales, files.block)


def _leave_out(
    stored: dict[str, Stored], values: dict[str, Any], config: TransformerConfig
) -> None:
    """Remove tensors that no model of ours has: rotary tables, layers that predict later tokens.

    A warning names the layers.
    """
    for name in [name for name in stored if _COMPUTED.search(name)]:
        del stored[name]  # tables that are computed from config.json
    if not FAMILIES[family_name(values)].later_tokens:
        return
    more = values.get("num_nextn_predict_layers") or values.get("num_mtp_layers") or 0
    layers = range(config.num_layers, config.num_layers + more)
    starts = tuple(f"model.layers.{index}." for index in layers)
    if left := [name for name in stored if name.startswith(starts)]:
        for name in left:
            del stored[name]
        warnings.warn(
            f"left out {len(left)} tensors of {', '.join(s.strip('.') for s in starts)}, which "
            f"predict the token after the next (num_nextn_predict_layers={more}): our model has "
            f"no such layers, and saving it writes none",
            stacklevel=4,
        )
        values["num_nextn_predict_layers"] = 0  # what is saved then has none


def _check_shapes(
    ours: dict[str, Tensor], files: Files, mine: list[Piece], first_expert: int
) -> None:
    """Check the shapes in the files, and that the pieces fill every tensor of ours once.

    Raises:
        ValueError: a tensor in the files has another shape.
    """
    filled: dict[str, int] = defaultdict(int)
    for piece in mine:
        stored, view = files.stored[piece.theirs], piece.view(ours[piece.ours], first_expert)
        wanted = tuple(view.shape)
        if piece.fused:
            assert files.config.moe is not None
            wanted = (files.config.moe.num_experts, *wanted)
        if stored.shape != wanted:
            raise ValueError(
                f"{stored.file}: {piece.theirs} has shape {list(stored.shape)}, but by {CONFIG} "
                f"it should be {list(wanted)}: one of the two is of another checkpoint"
            )
        filled[piece.ours] += view.numel()
    known = {n: t.numel() for n, t in ours.items() if not n.startswith("rope.")}
    counters = (".tokens_per_expert", ".most_rows", ".rows_room")
    known = {n: size for n, size in known.items() if not n.endswith(counters)}
    assert filled == known, filled.items() ^ known.items()


def _read_scales(files: Files, wanted: set[str]) -> dict[str, Tensor]:
    """Read the scales of the wanted weights, before any weight is read.

    A weight's scales may be in another shard than the weight. They are small.
    """
    by_file = defaultdict(list)
    for name in files.scales.keys() & wanted:
        by_file[files.scales[name].file].append(name)
    found: dict[str, Tensor] = {}
    for file, names in by_file.items():
        with open_shard(file) as shard:
            found |= {name: shard.get_tensor(name + SCALE) for name in names}
    return found


def _read(
    shard: Any,
    piece: Piece,
    scales: dict[str, Tensor],
    block: tuple[int, int],
    region: Region,
) -> Tensor:
    stored = shard.get_slice(piece.theirs)
    if piece.fused:
        return stored[(piece.expert, *region)]
    if piece.theirs not in scales and piece.rope is None:
        return stored[region]
    value = stored[...]
    if piece.theirs in scales:
        value = dequantised(value, scales[piece.theirs], block)
    return (value if piece.rope is None else value[piece.rope.order()])[region]
