"""The mixture-of-experts layer, in the three stages at which it can be cut.

    moe_router      route: scores, top-k, losses, and the shared expert
    moe_preprocess  preprocess: sort the (token, expert) pairs by expert
    moe_experts     run_experts: dispatch, experts, combine, plus the shared expert's output

Each stage is a method of ``MoEStages`` and maps one record to the next. ``MoELayer`` adds the
modules with the weights and runs the stages by itself; ``TransformerLayer`` calls the same methods
between its own residual connections.

Shapes: T tokens, D model, E experts, K top-k, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_graphs.dispatch import Dispatched, Dispatcher, DispatchPlan, LocalDispatcher
from moe_graphs.dispatch.row_statistics import RowStatistics
from moe_graphs.layers.expert_backends import ExpertsBackend, build_experts
from moe_graphs.layers.expert_layouts import Experts, layout_of, router_weight
from moe_graphs.layers.expert_load import ExpertLoad
from moe_graphs.layers.mlp import SwiGLU
from moe_graphs.layers.model_config import MoEConfig
from moe_graphs.layers.router import Routing, TopKRouter
from moe_graphs.layers.topk_routers import check_shape
from moe_graphs.registry import DISPATCHERS
from moe_graphs.staged import Stage, Staged, record


@record
class MoEInput:
    """Input of the first stage.

    Attributes:
        hidden: ``[..., D]``, tokens with any leading dimensions.
    """

    hidden: Tensor


@record
class Routed:
    """Output of ``route``.

    Attributes:
        hidden: ``[..., D]``, the layer's input.
        routing: experts of each token, and their weights.
        shared_TD: the shared expert's output, None if the layer has no shared expert.
    """

    hidden: Tensor
    routing: Routing
    shared_TD: Tensor | None


@record
class Prepared:
    """Output of ``preprocess``.

    Attributes:
        plan: tokens, and the order of their rows.
        aux_loss: 0-dim fp32, as in ``Routing``.
        shared_TD: the shared expert's output, None if the layer has no shared expert.
        shape: shape of the layer's input.
    """

    plan: DispatchPlan
    aux_loss: Tensor
    shared_TD: Tensor | None
    shape: tuple[int, ...]


@record
class MoEOutput:
    """Output of an MoE layer.

    Attributes:
        hidden: the layer's output, in the shape of its input.
        aux_loss: 0-dim fp32; add it to the loss. Its gradient goes to the router.
        dropped_tokens: 0-dim int64 on the device: (token, expert) pairs that no expert computed.
    """

    hidden: Tensor
    aux_loss: Tensor
    dropped_tokens: Tensor


class MoEStages(Staged):
    """The three stages of an MoE layer, without the modules that hold the weights.

    Subclasses set ``config``, ``dispatcher`` and ``experts`` and implement ``choose``,
    ``run_shared`` and ``stages``.

    Attributes:
        experts: module that is called with the fields of ``Dispatched`` and returns each token's
            sum of its experts' outputs, times the routing weights.
        routing_pass: what a call does with chosen experts, as ``moe_graphs.routing`` sets it:
            "record" leaves them in ``experts_TK``, "replay" takes those that are there.
        experts_TK: int64, or None.
        expert_load: counters for ``moe_graphs.routing.watch``, or None.
    """

    config: MoEConfig
    dispatcher: Dispatcher
    experts: nn.Module
    routing_pass: str | None = None
    experts_TK: Tensor | None = None
    expert_load: ExpertLoad | None = None

    # ---- stage moe_router

    def route(self, hidden: Tensor) -> Routed:
        """Choose experts for ``[..., D]`` tokens, and run the shared expert."""
        hidden_TD = hidden.reshape(-1, hidden.shape[-1])
        if self.routing_pass is None:
            routing = self.choose(hidden_TD)
        else:
            routing = self._pass_choice(hidden_TD)
        if self.expert_load is not None and self.training:
            self._count_load(routing)
        return Routed(hidden, routing, self.run_shared(hidden_TD))

    def choose(self, hidden_TD: Tensor, given_TK: Tensor | None = None) -> Routing:
        """Choose experts for tokens, or take the given ones; shapes in ``Routing`` are static."""
        raise NotImplementedError

    def _count_load(self, routing: Routing) -> None:
        assert self.expert_load is not None
        self.expert_load.count(routing.experts_TK, routing.tokens_per_expert_E, routing.aux_loss)

    def _pass_choice(self, hidden_TD: Tensor) -> Routing:
        """Record or replay; the attribute is assigned both times, so it is an output of graphs.

        An attribute that is read and assigned is an input of graphs, too.
        """
        given_TK = None
        if self.routing_pass == "replay":
            given_TK = self.experts_TK
            check_shape(given_TK, (hidden_TD.shape[0], self.config.top_k))
        routing = self.choose(hidden_TD, given_TK)
        self.experts_TK = routing.experts_TK
        return routing

    def run_shared(self, hidden_TD: Tensor) -> Tensor | None:
        """Output ``[T, D]`` of the expert that sees every token; None if there is none."""
        raise NotImplementedError

    # ---- stage moe_preprocess

    def preprocess(self, routed: Routed) -> Prepared:
        """Sort the pairs by expert; tokens are in the dtype in which the experts compute."""
        hidden, routing = routed.hidden, routed.routing
        tokens = hidden
        if torch.is_autocast_enabled(tokens.device.type):
            tokens = tokens.to(torch.get_autocast_dtype(tokens.device.type))
        plan = self.dispatcher.preprocess(
            tokens, routing.weights_TK, routing.experts_TK, self.config.num_experts
        )
        return Prepared(plan, routing.aux_loss, routed.shared_TD, tuple(hidden.shape))

    # ---- stage moe_experts

    def run_experts(self, prepared: Prepared) -> MoEOutput:
        """Run dispatch, experts and combine, and add the shared expert's output.

        This is the only stage that may wait for the device, if its dispatcher or its experts do.
        """
        plan = prepared.plan
        dispatched = self.dispatcher.dispatch(plan)
        sums_XD = self.call_experts(dispatched)
        hidden_TD = self.dispatcher.combine(sums_XD, dispatched, plan)
        if prepared.shared_TD is not None:
            hidden_TD = hidden_TD + prepared.shared_TD
        return MoEOutput(hidden_TD.view(prepared.shape), prepared.aux_loss, plan.dropped)

    def call_experts(self, dispatched: Dispatched) -> Tensor:
        """Each token's sum of its experts' outputs, times the routing weights."""
        return self.experts(
            dispatched.tokens_XD, dispatched.order, dispatched.weights_XK, dispatched.is_sorted
        )

    @property
    def dynamic(self) -> str | None:
        """The reason why ``run_experts`` cannot be captured, or None."""
        if self.dispatcher.host_sync:
            others = DISPATCHERS.words(lambda each: not each.host_sync)
            return f"dispatcher {self.dispatcher.name!r}, which {others} do not"
        return getattr(self.experts, "host_sync", None)


class MoELayer(MoEStages):
    """Router, dispatch, experts, combine, and optionally an expert that sees every token.

    A call maps tokens ``[..., D]`` to a ``MoEOutput``. Every rank of the dispatcher's group has to
    make the call, because the dispatcher communicates.

    Args:
        config: experts, router and losses.
        hidden_size: D.
        dispatcher: brings tokens to their experts; default ``LocalDispatcher()``, all experts on
            this rank.
        linear: kernels of the shared expert, as in ``TransformerConfig``.
        device, dtype: device and dtype of the weights, as in torch's modules.

    Attributes:
        router: ``TopKRouter``; its weight is ``[E, D]``.
        experts: the experts that the dispatcher keeps on this rank.
        shared_expert, shared_gate: the expert that sees every token, and the gate ``[1, D]`` of
            its output; None if the config has none.
        row_statistics: counters of rows, None if the dispatcher has no ``rows_factor``.

    Raises:
        ValueError: the ranks of the dispatcher do not divide the experts, or these experts cannot
            take the rows of this dispatcher.
        ImportError: ``config.experts`` needs a library that is not installed.
    """

    experts: ExpertsBackend
    row_statistics: RowStatistics | None

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        dispatcher: Dispatcher | None = None,
        *,
        linear: str = "torch",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.dispatcher = LocalDispatcher() if dispatcher is None else dispatcher
        local = self.dispatcher.local_experts(config.num_experts)
        self.router = TopKRouter(config, hidden_size, **factory)
        self.experts = build_experts(config, hidden_size, local, **factory)
        _check_tail(self.dispatcher, self.experts, config.experts)
        self.row_statistics = self._new_row_statistics()
        self.shared_expert: SwiGLU | None = None
        self.shared_gate: nn.Linear | None = None
        if config.shared_ffn_hidden_size:
            width = config.shared_ffn_hidden_size
            self.shared_expert = SwiGLU(hidden_size, width, linear=linear, **factory)
        if config.shared_gate:
            self.shared_gate = nn.Linear(hidden_size, 1, bias=False, **factory)

    # ---- a call

    if TYPE_CHECKING:  # nn.Module's says Any

        def __call__(self, hidden: Tensor) -> MoEOutput: ...

    def forward(self, hidden: Tensor) -> MoEOutput:
        return self.run_stages(MoEInput(hidden))

    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage("moe_router", lambda entered: self.route(entered.hidden)),
            Stage("moe_preprocess", self.preprocess),
            Stage("moe_experts", self.run_experts, self.dynamic),
        )

    def choose(self, hidden_TD: Tensor, given_TK: Tensor | None = None) -> Routing:
        # A router of a user's own need not know of choices that are given.
        return self.router(hidden_TD) if given_TK is None else self.router(hidden_TD, given_TK)

    def run_shared(self, hidden_TD: Tensor) -> Tensor | None:
        if self.shared_expert is None:
            return None
        shared_TD = self.shared_expert(hidden_TD)
        if self.shared_gate is not None:
            shared_TD = self.shared_gate(hidden_TD).sigmoid() * shared_TD
        return shared_TD

    def preprocess(self, routed: Routed) -> Prepared:
        prepared = super().preprocess(routed)
        if self.row_statistics is not None:
            self.row_statistics.count(prepared.plan)
        return prepared

    # ---- weights and counters

    def init_weights(self, std: float = 0.02, out_std: float = 0.02) -> None:
        """Draw normal weights and zero the counters.

        Args:
            std: standard deviation of the weights.
            out_std: standard deviation of projections back into the residual stream.
        """
        self.router.init_weights(std)
        self.zero_counters()
        self.experts.init_weights(std, out_std)
        if self.shared_expert is not None:
            nn.init.normal_(self.shared_expert.w1.weight, std=std)
            nn.init.normal_(self.shared_expert.w2.weight, std=out_std)
        if self.shared_gate is not None:
            nn.init.normal_(self.shared_gate.weight, std=std)

    def zero_counters(self) -> None:
        """Zero the counters of rows."""
        if self.row_statistics is not None:
            self.row_statistics.zero()

    def occupancy(self) -> tuple[int, int] | None:
        """Read the counters of rows for a report; waits for the device.

        Returns:
            The most rows that a call needed, and the rows that the last call had room for; None
            if the dispatcher has no ``rows_factor``.
        """
        return None if self.row_statistics is None else self.row_statistics.read()

    def _new_row_statistics(self) -> RowStatistics | None:
        if getattr(self.dispatcher, "rows_factor", None) is None:
            return None
        return RowStatistics(self.router.weight.device)

    # ---- other experts, another dispatcher

    def use_experts(self, kind: str) -> None:
        """Replace the experts by another backend (``MoEConfig.experts``) with the same weights.

        The new experts have new parameters: call this method before an optimizer or graphs are
        made.

        Raises:
            ValueError: the other backend cannot take the rows of this layer's dispatcher.
            ImportError: the other backend needs a library that is not installed.
        """
        before, (size,) = self.experts, self.router.weight.shape[1:]
        config = replace(self.config, experts=kind)
        w1_eD2F, w2_eFD = before.stacked_weights()
        after = build_experts(
            config, size, before.local_experts, device=w1_eD2F.device, dtype=w1_eD2F.dtype
        )
        _check_tail(self.dispatcher, after, kind)
        self.config, self.experts = config, after
        self.experts.load_stacked_weights(w1_eD2F, w2_eFD)

    def use_dispatcher(self, dispatcher: Dispatcher, experts: ExpertsBackend) -> None:
        """Replace the dispatcher, and the experts by the experts that it keeps on this rank.

        Raises:
            ValueError: these experts cannot take the rows of this dispatcher.
        """
        _check_tail(dispatcher, experts, self.config.experts)
        self.dispatcher, self.experts = dispatcher, experts
        self.row_statistics = self._new_row_statistics()

    # ---- from a block of one's own, and back

    @classmethod
    def from_experts(
        cls,
        experts: Experts,
        router: nn.Module | Tensor,
        *,
        top_k: int,
        names: Sequence[str] | None = None,
        dispatcher: Dispatcher | None = None,
        **options: Any,
    ) -> MoELayer:
        """Build a ``MoELayer`` with copies of the weights of another MoE block.

        The layer is made on the device and in the dtypes of the given weights. Compare it with
        the block before training: ``layer(x).hidden`` beside ``block(x)``.

        Args:
            experts: a ``ModuleList`` of SwiGLU networks, a module with stacked weights
                (``gate_up_proj`` and ``down_proj``), or a dictionary of such weights; see
                ``layers.expert_layouts``.
            router: ``nn.Linear`` without bias, any module with such a ``weight``, or the weight
                itself, ``[E, D]``.
            top_k: experts per token.
            names: the attributes that hold gate, up and down (or gate-up and down) in an expert.
            dispatcher: as in ``MoELayer``.
            options: further fields of ``MoEConfig``, such as ``normalize_top_k=False`` or
                ``aux_loss_coef=0.01``.

        Raises:
            ValueError: the experts or the router compute something else; the message says what.
        """
        weight_ED = router_weight(router)
        num_experts, hidden_size = weight_ED.shape
        w1_ED2F, w2_EFD = layout_of(experts, num_experts, hidden_size, names).stacked()
        sizes = dict(num_experts=num_experts, top_k=top_k, ffn_hidden_size=w2_EFD.shape[1])
        config = MoEConfig(**(sizes | options))
        with torch.random.fork_rng(devices=[w1_ED2F.device] if w1_ED2F.is_cuda else []):
            layer = cls(config, hidden_size, dispatcher, device=w1_ED2F.device, dtype=w1_ED2F.dtype)
        layer.router.to(weight_ED.dtype)
        with torch.no_grad():
            layer.router.weight.copy_(weight_ED)
        local = layer.experts.local_experts
        layer.experts.load_stacked_weights(
            w1_ED2F[local.start : local.stop], w2_EFD[local.start : local.stop]
        )
        return layer

    def copy_to_experts(
        self,
        experts: Experts,
        router: nn.Module | Tensor | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Copy the present weights into a block like the one that ``from_experts`` has read.

        Raises:
            ValueError: this rank does not hold all experts, or ``experts`` does not fit.
        """
        if len(self.experts.local_experts) != self.config.num_experts:
            raise ValueError(
                f"copy_to_experts: this rank holds experts {self.experts.local_experts} of "
                f"{self.config.num_experts}"
            )
        num_experts, hidden_size = self.router.weight.shape
        layout = layout_of(experts, num_experts, hidden_size, names)
        layout.load(*self.experts.stacked_weights())
        if router is not None:
            with torch.no_grad():
                given = router if isinstance(router, Tensor) else router.weight
                given.copy_(self.router.weight)  # type: ignore[operator]


def _check_tail(dispatcher: Dispatcher, experts: ExpertsBackend, kind: str) -> None:
    if dispatcher.leaves_tail and not experts.takes_tail:
        raise ValueError(
            f"dispatcher {dispatcher.name!r} leaves rows that belong to no expert, which "
            f"experts={kind!r} cannot take: choose experts='moe_graphs', or dispatcher "
            f"{DISPATCHERS.words(lambda each: not each.leaves_tail)}"
        )


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """All MoE layers of ``model``, itself included, in the order of ``model.modules()``."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]
