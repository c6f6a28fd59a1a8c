"""Memory for what MoE layers keep for their backward, as much as their rows really need.

A dispatcher with static shapes has room for more rows than there are (``rows_factor``), and every
layer would keep all of that room. With a stack, layers keep the rows that there are: memory is one
call's room, which all layers use in turn, and the rows of the layers whose backward is to come.

Bytes that a layer keeps per row in bf16 (D model, F ffn), without a stack for every row that there
is room for, with a stack for those that there are:

    what                        without         with
    rows that experts received  2 D             2 D, or 0 with ``recompute_dispatch``
    pre-activations             4 F             4 F
    activations                 2 F             0, computed again from the pre-activations
    rows that experts returned  2 D             2 D

``kernels/row_stack_triton.py`` says what it moves for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.kernels import row_stack
from moe_graphs.kernels.availability import has_triton


class ActivationStack(nn.Module):
    """Room for ``rows`` rows of MoE layers: of all layers and microbatches whose backwards are to
    come, at the same time. ``training.activation_memory`` gives it to the layers of a model.

    Layers push in their forward and pop in their backward, in any order; popped in reverse, or
    microbatch after microbatch, room is reused at once. Without gradients, under hooks on saved
    tensors (activation checkpointing, offloading) and within torch.compile nothing is pushed and
    tensors are kept as ever.
    Rows that there is no room for are counted in ``dropped_tokens`` of their layer: outputs are
    right, gradients are not, and the step has to be skipped and run again
    (``DeviceStep(...)(overflow=output.dropped_tokens)``).

    A backward that never comes (an exception, a loss that is dropped) leaves its rows; ``empty``
    gives them back. A second backward of one forward is refused.

    Args:
        dtype: of the activations: that of autocast, or of the weights.
        recompute_dispatch: rows that experts received are not kept. The backward has the tokens,
            which layers keep for their router anyway, and brings them to their experts once more:
            as much communication as in the forward, and no copies to the stack and back.

    Attributes:
        rows: how many there is room for.
        number: what kernels know its memory by.
        state: on the device, a buffer that is not saved (``kernels.row_stack``).

    Raises:
        ValueError: no row, or a GPU without Triton.
    """

    state: Tensor

    def __init__(
        self,
        rows: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        recompute_dispatch: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}: a stack has room for rows")
        widths = [2 * ffn_hidden_size, hidden_size]
        widths += [] if recompute_dispatch else [hidden_size]
        parts = tuple(torch.empty(rows, width, dtype=dtype, device=device) for width in widths)
        if parts[0].is_cuda and not has_triton():
            raise ValueError("an ActivationStack on a GPU needs Triton: pip install triton")
        self.rows, self.dtype, self.width = rows, parts[0].dtype, hidden_size
        self.ffn_hidden_size, self.recompute_dispatch = ffn_hidden_size, recompute_dispatch
        self.nbytes = sum(part.nbytes for part in parts)
        self.number = row_stack.number_of(parts, self)
        self.register_buffer("state", row_stack.new_state(parts[0].device), persistent=False)

    @torch.no_grad()
    def empty(self) -> None:
        """Gives all room back: between steps, when no backward is to come. Can be captured."""
        row_stack.empty_(self.state)

    @property
    def most_rows(self) -> Tensor:
        """0-dim int64 on the device: the most rows that were asked for at once."""
        return row_stack.most_rows(self.state)

    def occupation(self) -> tuple[int, int]:
        """For reports: ``most_rows`` and ``rows``. Waits for the device."""
        return int(self.most_rows), self.rows

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationStack:
        """A copy of a model uses the same stack: its memory is known by a number."""
        return self


def push_rows(
    stack: ActivationStack, rows_RD: Tensor, offsets_e: Tensor
) -> row_stack.KeptRows | None:
    """Room for as many rows as the last of ``offsets_e`` says; None where none are to be kept.

    Raises:
        ValueError: rows of another dtype or width.
    """
    if torch.compiler.is_compiling():
        return None
    if not (torch.is_grad_enabled() and rows_RD.requires_grad) or _under_hooks():
        return None
    if rows_RD.dtype != stack.dtype or rows_RD.shape[1] != stack.width:
        raise ValueError(
            f"activation stack: rows of {stack.width} {stack.dtype} fit, got "
            f"{tuple(rows_RD.shape)} of {rows_RD.dtype}: make it with the dtype that the "
            f"experts compute in (autocast's, if there is one)"
        )
    frame_5 = row_stack.push_frame(stack.state, offsets_e, stack.rows)
    return row_stack.KeptRows(stack.state, frame_5, stack.number)


def _under_hooks() -> bool:
    """Whether hooks take what autograd saves. The engine's look at it and leave it there."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not hooks[0].__module__.startswith("moe_graphs.")
