"""Interface of a dispatcher: three steps around the experts, and the records between the steps.

``preprocess`` sorts and permutes and can always be captured. ``dispatch`` brings rows to the rank
that holds their expert, ``combine`` brings the results back to their tokens. All values that one
step passes to the next are in the records; a dispatcher keeps nothing that belongs to a call.
The dispatchers ``all_gather`` and ``symmetric`` bring tokens to the ranks before they sort them: in
their records T is the tokens of all ranks and E the local experts.

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
    """Result of ``preprocess``: this rank's rows, sorted by expert, and their order.

    Attributes:
        rows_RD: the rows, in the order of ``order`` and in the dtype of the tokens; places in
            ``order`` without a token are rows of zeros.
        weights_TK: routing weights, fp32.
        order: maps rows to (token, expert) pairs and back, with the int32 ends of the experts'
            rows.
        dropped: 0-dim int64 on the device, number of (token, expert) pairs that no expert will see.
        rows_needed: 0-dim int64 on the device, number of rows that the routing needs on this rank;
            None if the dispatcher has no ``rows_factor``.
        handle: values that the same dispatcher needs in later steps, or None.
    """

    rows_RD: Tensor
    weights_TK: Tensor
    order: RowOrder
    dropped: Tensor
    rows_needed: Tensor | None = None
    handle: Any = None


@record
class Dispatched:
    """Rows for this rank's experts, sorted by expert.

    Attributes:
        rows_RD: the rows, in the dtype of the plan's rows. Here R is the number of rows that this
            rank's experts get.
        offsets_e: int32 cumulative ends of the experts' rows, on the device. The last one is the
            number of rows, or less if the dispatcher leaves a tail.
        handle: values that the same dispatcher's ``combine`` needs to send the rows back, or None.
    """

    rows_RD: Tensor
    offsets_e: Tensor
    handle: Any = None


class Dispatcher(abc.ABC):
    """Abstract base; implementations are final frozen dataclasses that hold configuration only.

    Attributes:
        name: the name that ``make_dispatcher`` takes.
        host_sync: whether ``dispatch`` reads sizes on the host, so that a capture must end there.
        leaves_tail: whether rows that belong to no expert may follow the experts' rows. These rows
            are zero, and their outputs are never read.
    """

    name: ClassVar[str]
    host_sync: ClassVar[bool]
    leaves_tail: ClassVar[bool] = False

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Ranks that have to make every call together; None if there is one rank."""
        return None

    @abc.abstractmethod
    def local_experts(self, num_experts: int) -> range:
        """Range of the experts whose weights this rank holds.

        Raises:
            ValueError: the ranks do not divide ``num_experts``.
        """

    @abc.abstractmethod
    def preprocess(
        self, hidden_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        """Sort and permute tokens, in static shapes and without waiting for the device.

        Args:
            hidden_TD: tokens of this rank, floating point.
            weights_TK: fp32 factors of the chosen experts' outputs.
            experts_TK: int64 numbers of the chosen experts, distinct within a token.
            num_experts: number of experts on all ranks.

        Raises:
            ValueError: the ranks have different numbers of tokens and this dispatcher cannot take
                them (``all_gather``, ``symmetric``).
        """

    @abc.abstractmethod
    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        """Bring the rows to their experts.

        If ``host_sync`` is set, this method waits for the device, and a capture ends here.
        """

    @abc.abstractmethod
    def combine(self, expert_rows: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        """Bring the experts' results back to their tokens.

        Args:
            expert_rows: ``[R, D]``, the experts' outputs for ``dispatched.rows_RD``.
            dispatched: what ``dispatch`` has returned.
            plan: what ``preprocess`` has returned.

        Returns:
            ``[T, D]`` in the dtype of ``expert_rows``: for each token of this rank the sum of its
            rows, weighted by ``weights_TK``. Dropped pairs add nothing.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """Return this dispatcher itself, because process groups cannot be copied."""
        return self
