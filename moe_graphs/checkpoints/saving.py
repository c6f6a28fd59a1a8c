"""Saving of a model as transformers writes it, with one shard in memory at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from moe_graphs.checkpoints.flushing import flush, rename_whole
from moe_graphs.checkpoints.hf_config import describes, hf_config
from moe_graphs.checkpoints.shards import CONFIG, INDEX, SINGLE
from moe_graphs.checkpoints.weight_names import Piece, pieces, tensors_of
from moe_graphs.layers.model_config import TransformerConfig

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save(
    model: nn.Module,
    config: TransformerConfig,
    source: Mapping[str, Any] | None,
    directory: Path,
    max_shard_bytes: int,
) -> None:
    """Write config.json and the weights; the body of ``LanguageModel.save_pretrained``.

    Args:
        model: a model with all experts, on any device but meta.
        config: its configuration.
        source: the config.json that the model came from; None writes a new one.
        directory: the files are put here; an older checkpoint in it is replaced.
        max_shard_bytes: bytes of a file; a larger tensor has a file of its own.

    Raises:
        ValueError: no config.json describes the model, or some weights are not here.
        OSError: the directory cannot be written.
    """
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    values = _values(config, source)
    tensors = tensors_of(model)
    wanted = pieces(config, values)
    _check_complete(tensors, config)
    shards = _split(wanted, tensors, max_shard_bytes)
    partial = directory / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        placed = _write_shards(partial, shards, tensors)
        if len(shards) > 1:
            sizes = {
                "total_parameters": sum(p.numel() for p in model.parameters()),
                "total_size": sum(piece.view(tensors[piece.ours]).nbytes for piece in wanted),
            }
            _write_json(partial / INDEX, {"metadata": sizes, "weight_map": placed})
        _write_json(partial / CONFIG, _with_dtype(values, tensors))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or f"is the disk full? {error}"
        raise OSError(f"{directory} could not be written: {reason}") from error
    _publish(partial, directory)


def _values(config: TransformerConfig, source: Mapping[str, Any] | None) -> dict[str, Any]:
    if source is None:
        return hf_config(config)
    if not describes(source, config):
        raise ValueError(
            "the model's config is no longer what its hf_values (the config.json it came from) "
            "say: set model.hf_values = None, and a new config.json is written"
        )
    # Quantised weights were multiplied out when they were read.
    return {name: value for name, value in source.items() if name != "quantization_config"}


def _with_dtype(values: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = "torch_dtype" if "torch_dtype" in values else "dtype"
    dtype = str(tensors["embedding.weight"].dtype).removeprefix("torch.")
    return dict(sorted({**values, name: dtype}.items()))


def _check_complete(tensors: dict[str, Tensor], config: TransformerConfig) -> None:
    moe = config.moe
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: there is nothing to save")
        if moe is not None and name.endswith("experts.w1") and len(tensor) != moe.num_experts:
            raise ValueError(
                f"{name} holds {len(tensor)} of {moe.num_experts} experts, the others "
                f"are on other ranks: saving under expert parallelism is not supported, load "
                f"the weights into a model with LocalDispatcher"
            )


def _split(
    wanted: list[Piece], tensors: dict[str, Tensor], max_shard_bytes: int
) -> list[list[Piece]]:
    """Divide the pieces into shards, in the model's order.

    A tensor that is larger than the limit has a shard of its own.
    """
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in wanted:
        added = piece.view(tensors[piece.ours]).nbytes
        if shards[-1] and size + added > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += added
    return shards


def _write_shards(
    folder: Path, shards: list[list[Piece]], tensors: dict[str, Tensor]
) -> dict[str, str]:
    """Write the shards, and return the name of the file of every tensor."""
    placed: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        theirs = {piece.theirs: _theirs(piece, tensors[piece.ours]) for piece in shard}
        save_file(theirs, folder / file, metadata={"format": "pt"})
        flush(folder / file)
        placed |= dict.fromkeys(theirs, file)
    return dict(sorted(placed.items()))


def _theirs(piece: Piece, ours: Tensor) -> Tensor:
    view = piece.view(ours.detach())
    if piece.rope is not None:
        view = view[piece.rope.order().argsort().to(view.device)]
    return view.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _publish(partial: Path, directory: Path) -> None:
    """Replace the files in ``directory`` by the new ones.

    The file without which a checkpoint is not whole (the index, or the only file) is removed first
    and put there last.
    """
    last = INDEX if (partial / INDEX).exists() else SINGLE
    for name in (INDEX, SINGLE):
        (directory / name).unlink(missing_ok=True)
    for old in directory.iterdir():
        if _SHARD.fullmatch(old.name):
            old.unlink()
    for file in partial.iterdir():
        if file.name != last:
            file.rename(directory / file.name)
    flush(directory)
    rename_whole(partial / last, directory / last)
    partial.rmdir()


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")
    flush(file)
