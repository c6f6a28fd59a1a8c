"""The batch of a whole step: fixed memory that the graph reads it from, and what fits into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_graphs.engine.signature import Mismatch, Signature, TensorSpec, tensor_leaves
from moe_graphs.engine.static_memory import copy_all, dense_pair, static_copy
from moe_graphs.errors import CaptureError


@dataclass(frozen=True)
class StaticBatch:
    """``leaves``: static tensors where the batch had tensors, the captured constants elsewhere."""

    signature: Signature
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, batch: Any, device: torch.device) -> StaticBatch:
        """A copy of ``batch``.

        Raises:
            CaptureError: if a graph cannot read it.
        """
        signature = Signature.of(batch, input_name)
        unsupported = signature.unsupported()
        if unsupported is not None:
            raise CaptureError(unsupported)
        leaves: list[Any] = []
        for spec, first, leaf in zip(
            signature.leaves, signature.first, pytree.tree_leaves(batch), strict=True
        ):
            if isinstance(spec, TensorSpec):
                _check(spec, device)
                leaves.append(static_copy(leaf) if first == len(leaves) else leaves[first])
            else:
                leaves.append(leaf)
        return cls(signature, tuple(leaves))

    def tree(self) -> Any:
        """What the step is captured with."""
        return pytree.tree_unflatten(self.leaves, self.signature.structure)

    def tensors(self) -> list[Tensor]:
        return list({id(tensor): tensor for tensor in tensor_leaves(self.leaves)}.values())

    def named_tensors(self) -> dict[str, Tensor]:
        pairs = zip(self.signature.leaves, self.leaves, strict=True)
        return {spec.name: leaf for spec, leaf in pairs if isinstance(spec, TensorSpec)}

    def constants(self) -> dict[str, Any]:
        specs = zip(self.signature.leaves, self.leaves, strict=True)
        return {spec.name: leaf for spec, leaf in specs if not isinstance(spec, TensorSpec)}

    def mismatch(self, batch: Any, leaves: Sequence[Any], structure: Any) -> Mismatch | None:
        """The first difference between a call's batch, also given flat, and the captured one."""
        if structure != self.signature.structure:
            return structure_mismatch(self.signature, batch)
        return self.signature.mismatch(structure, leaves)

    def load(self, leaves: Sequence[Any]) -> None:
        """Copies a call's tensors into place, on the current stream. They must match."""
        targets, sources = [], []
        for number, (static, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            is_first = self.signature.first[number] == number
            if is_first and isinstance(static, Tensor) and leaf.data_ptr() != static.data_ptr():
                target, source = dense_pair(static, leaf)
                targets.append(target)
                sources.append(source)
        copy_all(targets, sources)


def input_name(path: Sequence[Any]) -> str:
    """How messages name a leaf: ``batch['tokens'][0]``."""
    return "batch" + pytree.keystr(tuple(path))


def structure_mismatch(signature: Signature, batch: Any) -> Mismatch:
    """Names the leaves that are missing or too many."""
    captured = [spec.name for spec in signature.leaves]
    now = [input_name(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    missing = [name for name in captured if name not in now]
    extra = [name for name in now if name not in captured]
    parts = [f"{', '.join(missing[:4])} missing"] if missing else []
    parts += [f"{', '.join(extra[:4])} not known"] if extra else []
    found = "; ".join(parts) or "other containers around the same leaves"
    message = (
        f"the inputs are built differently: {found} ({len(captured)} leaves before, {len(now)} "
        f"now): pass the same keys, and the same number of microbatches"
    )
    return Mismatch("structure", message)


def _check(spec: TensorSpec, device: torch.device) -> None:
    if spec.device != device:
        raise CaptureError(
            f"input {spec.name!r} is on {spec.device} and the model on {device}: a graph reads "
            f"device memory only: move it there, for instance with StaticLoader(loader, device)"
        )
    if spec.requires_grad:
        raise CaptureError(
            f"input {spec.name!r} requires grad, and a whole step returns no gradients of its "
            f"inputs: detach it"
        )
