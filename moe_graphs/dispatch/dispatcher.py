"""What a dispatcher is: three steps between the router and the experts, and the values they pass.

``preprocess`` sorts and permutes and can always be captured. ``dispatch`` brings rows to the rank
that holds their expert, ``combine`` brings the results back to their tokens. Whatever one step has
to tell the next is in the records; a dispatcher keeps nothing that belongs to a call.
``all_gather`` and ``symmetric`` bring tokens to the ranks before they sort them: their T are the
tokens of all ranks and their E the local experts, in all records.

Shapes: T tokens, D model, K top-k, E experts, e local experts, R rows of this rank's tokens.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from moe_graphs.kernels import RowOrder
from moe_graphs.staged import record


@record
class DispatchPlan:
    """What ``preprocess`` decided: this rank's rows, sorted by expert, and the way back.

    Attributes:
        rows_RD: the rows, in the order of ``order``.
        weights_TK: routing weights, fp32.
        dropped: 0-dim int64 on the device: (token, expert) pairs that no expert will see.
        rows_needed: 0-dim int64 on the device: rows that the routing asked for here, where the
            room for them is bounded by choice; else None.
        handle: what the same dispatcher needs later, if anything.
    """

    rows_RD: Tensor
    weights_TK: Tensor
    order: RowOrder
    dropped: Tensor
    rows_needed: Tensor | None = None
    handle: Any = None


@record
class Dispatched:
    """Rows for this rank's experts, sorted by expert. The last of ``offsets_e`` is the row count,
    or less of a dispatcher that leaves a tail.

    Attributes:
        offsets_e: int32 cumulative ends on the device.
        handle: what the same dispatcher's ``combine`` needs to send the rows back, if anything.
    """

    rows_RD: Tensor
    offsets_e: Tensor
    handle: Any = None


class Dispatcher(abc.ABC):
    """Abstract. Implementations are final frozen dataclasses that hold configuration only.

    Attributes:
        name: what ``make_dispatcher`` knows it by.
        host_sync: whether ``dispatch`` reads sizes on the host, so that capture must end there.
        leaves_tail: whether rows may follow that are no expert's: zero, and what experts make
            of them is never looked at.
    """

    name: ClassVar[str]
    host_sync: ClassVar[bool]
    leaves_tail: ClassVar[bool] = False

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that have to make every call together, None if it is one."""
        return None

    @abc.abstractmethod
    def local_experts(self, num_experts: int) -> range:
        """The experts whose weights this rank holds."""

    @abc.abstractmethod
    def preprocess(
        self, hidden_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        """Sorts and permutes tokens. Never waits for the device, static shapes."""

    @abc.abstractmethod
    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        """Brings the rows to their experts."""

    @abc.abstractmethod
    def combine(self, expert_rows: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        """Brings the experts' results back: ``hidden_TD``, each token's rows summed by weight."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """A copy of a model uses the same dispatcher: process groups cannot be copied."""
        return self
