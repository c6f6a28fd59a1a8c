"""Interface of a dispatcher: three steps around the experts, and the records between the steps.

``preprocess`` sorts the (token, expert) pairs and can always be captured. ``dispatch`` brings
tokens to the rank that holds their experts, ``combine`` brings the experts' sums back. The experts
gather their rows from the tokens and add them up themselves (``kernels.routed_experts``), so that
no rows are kept for the backward. All values that one step passes to the next are in the records;
a dispatcher keeps nothing that belongs to a call.

Shapes: T tokens, D model, K top-k, E experts, e local experts, X tokens or rows, as the dispatcher
has them: T, the tokens of all ranks, or rows sorted by expert.
"""

from __future__ import annotations

import abc
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from moe_graphs.kernels import RowOrder
from moe_graphs.staged import record


@record
class DispatchPlan:
    """Result of ``preprocess``: what will be dispatched, and the order of rows.

    Attributes:
        tokens: ``[..., D]``: this rank's tokens as they were given (``local``, ``padded``), the
            tokens of all ranks (``all_gather``), or rows in the order of ``order``
            (``all_to_all``, ``symmetric``), in which places without a token are zero.
        weights_TK: routing weights, fp32. Here T is the tokens of all ranks for ``all_gather`` and
            ``symmetric``, and E the local experts.
        order: maps rows to (token, expert) pairs and back, with the int32 ends of the experts'
            rows.
        dropped: 0-dim int64 on the device, number of (token, expert) pairs that no expert will see.
        rows_needed: 0-dim int64 on the device, number of rows that the routing needs on this rank;
            None if the dispatcher has no ``rows_factor``.
        handle: values that the same dispatcher needs in later steps, or None.
    """

    tokens: Tensor
    weights_TK: Tensor
    order: RowOrder
    dropped: Tensor
    rows_needed: Tensor | None = None
    handle: Any = None


@record
class Dispatched:
    """Tokens for this rank's experts, and the order of the experts' rows.

    Attributes:
        tokens_XD: the tokens, in the dtype of the plan's; with ``is_sorted`` their rows, in the
            order of ``order``.
        order: maps the rows of this rank's experts to pairs of tokens and weights. The last end of
            rows is their number, or less if the dispatcher leaves a tail.
        weights_XK: routing weights of the pairs, fp32.
        is_sorted: whether the tokens are rows already.
        handle: values that the same dispatcher's ``combine`` needs to send sums back, or None.
    """

    tokens_XD: Tensor
    order: RowOrder
    weights_XK: Tensor
    is_sorted: bool = False
    handle: Any = None


@dataclass(frozen=True, kw_only=True)
class PlannedExchange:
    """Sizes of one layer's exchange in one microbatch, for a plan with a balanced routing.

    Attributes:
        tokens: tokens of a rank.
        ranks: number of ranks that share the experts.
        itemsize: bytes per element of the rows.
    """

    tokens: int
    ranks: int
    hidden_size: int
    top_k: int
    num_experts: int
    itemsize: int
    rows_factor: float | None = None

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.itemsize

    @property
    def pair_bytes(self) -> int:
        """Bytes of an expert number (int64) and its weight (fp32)."""
        return 8 + 4


@dataclass(frozen=True, kw_only=True)
class DispatchCosts:
    """Memory and bytes that a plan counts for a dispatcher.

    Attributes:
        stand_in: a dispatcher with the same shapes in one process, on the meta device.
        dispatch_bytes, combine_bytes: bytes that a rank receives in one layer's forward and
            backward of one microbatch.
        expert_rows: rows that a rank's experts have room for.
        shared_bytes: memory that a rank shares with its peers, once for all layers.
    """

    stand_in: Dispatcher
    dispatch_bytes: float
    combine_bytes: float
    expert_rows: int
    shared_bytes: int = 0


class Dispatcher(abc.ABC):
    """Abstract base; implementations are final frozen dataclasses that hold configuration only.

    The names in ``registry.DISPATCHERS`` and the facts here are all that lists, help, checks, plans
    and messages know of a dispatcher.

    Attributes:
        name: the name that ``make_dispatcher`` takes.
        between_ranks: whether it brings tokens to experts on other ranks, and so takes a ``group``.
        needs_peers: whether its ranks have to reach each other's memory.
        drops_tokens: whether tokens can be dropped in a step that is not run again.
        host_sync: whether ``dispatch`` reads sizes on the host, so that a capture must end there.
        leaves_tail: whether rows that belong to no expert may follow the experts' rows. These rows
            are zero, and their outputs are never read.
    """

    name: ClassVar[str]
    host_sync: ClassVar[bool]
    leaves_tail: ClassVar[bool] = False
    between_ranks: ClassVar[bool] = False
    needs_peers: ClassVar[bool] = False
    drops_tokens: ClassVar[bool] = False

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Names of the options that ``make_dispatcher`` takes for it."""
        return tuple(inspect.signature(cls).parameters)

    @classmethod
    def costs(cls, exchange: PlannedExchange) -> DispatchCosts:
        """Return what ``moe-graphs plan`` counts for it.

        Raises:
            ValueError: the class does not say.
        """
        raise ValueError(
            f"dispatcher: {cls.name!r} does not say what it costs: write {cls.__name__}.costs, or "
            f"plan with another dispatcher"
        )

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
        self, hidden: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        """Sort pairs by expert, in static shapes and without waiting for the device.

        Args:
            hidden: tokens ``[..., D]`` of this rank, floating point. The plan has this tensor or a
                new one, but no view of it: a graph cannot end with a view of its input.
            weights_TK: fp32 factors of the chosen experts' outputs.
            experts_TK: int64 numbers of the chosen experts, distinct within a token.
            num_experts: number of experts on all ranks.

        Raises:
            ValueError: the ranks have different numbers of tokens and this dispatcher cannot take
                them (``all_gather``, ``symmetric``).
        """

    @abc.abstractmethod
    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        """Bring the tokens to their experts.

        If ``host_sync`` is set, this method waits for the device, and a capture ends here.
        """

    @abc.abstractmethod
    def combine(self, sums_XD: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        """Bring the experts' sums back to their tokens.

        Args:
            sums_XD: for each token that ``dispatched.order`` knows the weighted sum of its rows.
            dispatched: what ``dispatch`` has returned.
            plan: what ``preprocess`` has returned.

        Returns:
            ``[T, D]`` in the dtype of ``sums_XD``: for each token of this rank the sum of its
            rows, weighted by ``weights_TK``. Dropped pairs add nothing.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """Return this dispatcher itself, because process groups cannot be copied."""
        return self
