"""What ``moe-graphs export`` does."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from moe_graphs.lm.checkpoint import MODEL, find_checkpoint, read_part
from moe_graphs.lm.sharded_checkpoint import is_sharded, read_model
from moe_graphs.terminal import errors_in_a_line, make_console


def export_model(run: Path, out: Path) -> None:
    """The options of the command line, under the names they have there."""
    with errors_in_a_line():
        if out.exists():
            raise ValueError(f"out: {out} exists: give another --out")
        path = find_checkpoint(run)
        tensors = read_model(path) if is_sharded(path) else read_part(path / MODEL, load_file)
        partial = out.with_name(f"{out.name}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.rename(out)
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        make_console(stderr=False).print(
            f"{out}: {len(tensors)} tensors, {size:.1f} MB, of {path}", markup=False
        )
