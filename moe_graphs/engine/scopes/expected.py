"""What the first replay of a forward has to leave, as an eager run has shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_graphs.engine import fp8
from moe_graphs.engine.preserve import HiddenState, Values
from moe_graphs.engine.proof import Difference, first_difference, is_noise
from moe_graphs.engine.scopes.dry_run import DryForward
from moe_graphs.engine.signature import tensor_leaves


@dataclass(frozen=True)
class Expected:
    """What the first replay of a forward has to leave, and how to undo it."""

    dry: DryForward
    hidden: HiddenState
    values: Values

    def difference(
        self,
        outputs: Sequence[Any],
        written: Sequence[tuple[Tensor, Tensor]] | None = None,
        hidden: HiddenState | None = None,
    ) -> Difference | None:
        """``written``: tensors with the values found there, ``hidden``: the state beside them; by
        default those of now."""
        found = tensor_leaves(outputs)
        names = [f"output {number}" for number in range(len(found))]
        expected = list(tensor_leaves(self.dry.outputs))
        for tensor, value in self.dry.written:
            names.append(f"buffer {tuple(tensor.shape)}")
            expected.append(value)
            found.append(tensor)
        if written is not None:
            found[len(found) - len(written) :] = [value for _, value in written]
        scales = fp8.named_tensors() if hidden is None else hidden.scales()
        for name, value in self.dry.hidden.scales().items():
            names.append(name)
            expected.append(value)
            found.append(scales[name])
        return first_difference(names, expected, found)

    def unexplained(self, again: Sequence[Any], outputs: Sequence[Any]) -> Difference | None:
        """An output that differs by more than what another eager run differs by."""
        three = map(tensor_leaves, (self.dry.outputs, again, outputs))
        for number, (eager, other, replayed) in enumerate(zip(*three, strict=True)):
            found = first_difference([f"output {number}"], [eager], [replayed])
            if found is not None and not is_noise(eager, other, replayed):
                return found
        return None

    def undo(self) -> None:
        self.hidden.put_back()
        self.values.put_back()
