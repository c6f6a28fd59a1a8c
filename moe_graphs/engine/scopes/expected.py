"""What the first replay of a forward has to leave, as an eager run has shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_graphs.engine import fp8
from moe_graphs.engine.proof import Difference, first_difference, is_noise
from moe_graphs.engine.scopes.trials import TriedForward
from moe_graphs.engine.signature import tensor_leaves
from moe_graphs.engine.snapshot import Snapshot


@dataclass(frozen=True)
class Expected:
    """What the first replay of a forward has to leave, and the state before it."""

    tried: TriedForward
    before: Snapshot

    def difference(
        self,
        outputs: Sequence[Any],
        written: Sequence[tuple[Tensor, Tensor]] | None = None,
        scales: Mapping[str, Tensor] | None = None,
    ) -> Difference | None:
        """``written``: tensors with the values found there, ``scales``: those of FP8; by
        default those of now."""
        found = tensor_leaves(outputs)
        names = [f"output {number}" for number in range(len(found))]
        expected = list(tensor_leaves(self.tried.outputs))
        for tensor, value in self.tried.written:
            names.append(f"buffer {tuple(tensor.shape)}")
            expected.append(value)
            found.append(tensor)
        if written is not None:
            found[len(found) - len(written) :] = [value for _, value in written]
        scales = fp8.named_tensors() if scales is None else scales
        for name, value in self.tried.scales.items():
            names.append(name)
            expected.append(value)
            found.append(scales[name])
        return first_difference(names, expected, found)

    def unexplained(self, again: Sequence[Any], outputs: Sequence[Any]) -> Difference | None:
        """An output that differs by more than what another eager run differs by."""
        three = map(tensor_leaves, (self.tried.outputs, again, outputs))
        for number, (eager, other, replayed) in enumerate(zip(*three, strict=True)):
            found = first_difference([f"output {number}"], [eager], [replayed])
            if found is not None and not is_noise(eager, other, replayed):
                return found
        return None
