"""Fixed memory that a graph reads its inputs from, and what fits into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe_graphs.engine.scopes.recording import dense
from moe_graphs.engine.signature import Mismatch, Signature, TensorSpec, tensor_leaves
from moe_graphs.errors import CaptureError


@dataclass(frozen=True)
class StaticInputs:
    """``leaves``: static tensors where the inputs had tensors, the captured constants elsewhere."""

    signature: Signature
    leaves: tuple[Any, ...]
    device: torch.device

    @classmethod
    def of(cls, inputs: Any, device: torch.device) -> StaticInputs:
        """Copies of ``inputs``.

        Raises:
            CaptureError: a graph cannot read them, or would keep a stale cast of a weight.
        """
        signature = Signature.of(inputs, device.type, input_name)
        if signature.autocast.enabled and signature.autocast.cached:
            raise CaptureError(
                "called under autocast, whose cache of weights would go stale: enter autocast "
                "inside the step, or use torch.autocast(..., cache_enabled=False)"
            )
        for spec in signature.leaves:
            if isinstance(spec, TensorSpec):
                _check_input(spec, device)
        leaves = (
            dense(leaf.detach()).clone().expand(leaf.shape)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in pytree.tree_leaves(inputs)
        )
        return cls(signature, tuple(leaves), device)

    def tree(self) -> Any:
        """The inputs that the step is captured with."""
        return pytree.tree_unflatten(self.leaves, self.signature.structure)

    def tensors(self) -> list[torch.Tensor]:
        return tensor_leaves(self.leaves)

    def mismatch(self, inputs: Any, leaves: Sequence[Any], structure: Any) -> Mismatch | None:
        """The first difference between a call's inputs, also given flat, and the captured ones."""
        if structure != self.signature.structure:
            return structure_mismatch(self.signature, inputs)
        return self.signature.mismatch(structure, leaves, self.device.type)

    def load(self, leaves: Sequence[Any]) -> None:
        """Copies a call's tensors into place, on the current stream. They must match."""
        targets, sources = [], []
        for static, leaf in zip(self.leaves, leaves, strict=True):
            if isinstance(static, torch.Tensor) and leaf.data_ptr() != static.data_ptr():
                targets.append(dense(static))
                sources.append(dense(leaf.detach()))
        copy_all(targets, sources)


def input_name(path: Sequence[Any]) -> str:
    """How messages name a leaf: ``batch['tokens'][0]``."""
    return "batch" + pytree.keystr(tuple(path))


def structure_mismatch(signature: Signature, inputs: Any) -> Mismatch:
    """Names the leaves that are missing or too many."""
    captured = [spec.name for spec in signature.leaves]
    now = [input_name(path) for path, _ in pytree.tree_flatten_with_path(inputs)[0]]
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


@torch.no_grad()
def owned(tree: Any) -> Any:
    """The tree with detached copies of its tensors."""
    leaves, structure = pytree.tree_flatten(tree)
    copies = owned_leaves(leaves)
    return pytree.tree_unflatten(copies, structure)


def owned_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among the leaves, in few launches."""
    copies = [
        torch.empty_like(leaf, requires_grad=False) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    copy_all(tensor_leaves(copies), [t.detach() for t in tensor_leaves(leaves)])
    return copies


@torch.no_grad()
def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _check_input(spec: TensorSpec, device: torch.device) -> None:
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
