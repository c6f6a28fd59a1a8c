"""Classes and functions as a user writes them: a dispatcher, an optimizer, a degree, a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_graphs.dispatch import Dispatched, Dispatcher, DispatchPlan, LocalDispatcher
from moe_graphs.layers import Attention, GroupedExperts, TransformerConfig
from moe_graphs.layout import ParallelConfig
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.run_presets import Preset
from moe_graphs.parallel.degrees import Degree

_LOCAL = LocalDispatcher()


class OwnExperts(GroupedExperts):
    """Experts that count their forwards."""

    forwards = 0

    def forward(self, *args: Any) -> Tensor:
        OwnExperts.forwards += 1
        return super().forward(*args)


class OwnAttention(Attention):
    """Attention whose result has a gate."""

    def __init__(self, config: TransformerConfig, *given: Any, **factory: Any) -> None:
        super().__init__(config, *given, **factory)
        self.gate = OwnLinear(config.hidden_size, config.hidden_size, **factory)

    def forward(self, hidden_BSD: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
        return self.gate(hidden_BSD).sigmoid() * super().forward(hidden_BSD, document_ids_BS)

    def init_weights(self, std: float, out_std: float) -> None:
        super().init_weights(std, out_std)
        nn.init.normal_(self.gate.weight, std=std)

    def matrices(self) -> dict[nn.Parameter, tuple[int, ...]]:
        return {**super().matrices(), self.gate.weight: ()}


class OwnLinear(nn.Linear):
    """A projection without bias."""

    def __init__(self, in_features: int, out_features: int, **factory: Any) -> None:
        super().__init__(in_features, out_features, bias=False, **factory)


@dataclass(frozen=True)
class OwnDispatcher(Dispatcher):
    """Dispatcher that keeps all tokens here, and says that it drops some."""

    name: ClassVar[str] = "own"
    host_sync: ClassVar[bool] = False
    drops_tokens: ClassVar[bool] = True

    def local_experts(self, num_experts: int) -> range:
        return _LOCAL.local_experts(num_experts)

    def preprocess(
        self, hidden: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int
    ) -> DispatchPlan:
        return _LOCAL.preprocess(hidden, weights_TK, experts_TK, num_experts)

    def dispatch(self, plan: DispatchPlan) -> Dispatched:
        return _LOCAL.dispatch(plan)

    def combine(self, sums_XD: Tensor, dispatched: Dispatched, plan: DispatchPlan) -> Tensor:
        return _LOCAL.combine(sums_XD, dispatched, plan)


@dataclass(frozen=True)
class OwnExchange(OwnDispatcher):
    """Dispatcher that says that it goes between ranks, but not what it costs."""

    group: Any = None
    name: ClassVar[str] = "own_exchange"
    between_ranks: ClassVar[bool] = True


class OwnLion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675), in tensors alone."""

    capturable = True
    starts_from_zeros = True

    def __init__(self, params: Any, lr: Any, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=0.0))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum, grad = state["momentum"], parameter.grad
                update = torch.lerp(grad, momentum, beta1).sign()
                update.add_(parameter, alpha=group["weight_decay"])
                parameter.sub_(update * group["lr"])
                momentum.lerp_(grad, 1 - beta2)


class SilentLion(OwnLion):
    """Lion that does not say that a graph can hold its step."""


class NoOptimizer:
    """A class that is no optimizer."""


class Twins(Degree):
    """Ranks that compute the same; it counts the models that it divides."""

    divided = 0

    @classmethod
    def check(
        cls, layout: ParallelConfig, model: TransformerConfig, sequence_length: int | None = None
    ) -> None:
        if model.latent is not None:
            raise ValueError("twins: no latent attention")

    @classmethod
    def share(cls, model: Any, ranks: Any) -> None:
        assert ranks.size() == 2
        cls.divided += 1


@dataclass(frozen=True)
class OwnLayout(ParallelConfig):
    twins: int = 1


def own_model() -> TransformerConfig:
    return TransformerConfig(
        hidden_size=16, num_layers=1, num_heads=2, ffn_hidden_size=32, vocab_size=64,
        max_sequence_length=64,
    )  # fmt: skip


def gated_preset() -> Preset:
    model = replace(own_model(), vocab_size=256, attention="own_parts:OwnAttention")
    training = TrainSettings(steps=8, batch_size=2, sequence_length=32, learning_rate=1e-2)
    return Preset(model, training, log_every=4, evaluate_every=8)


def own_layer() -> OwnLinear:
    """A function that returns no model."""
    return OwnLinear(4, 4)
