"""What a whole-step graph is captured from: the step function, and what it works on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moe_graphs.engine import fp8
from moe_graphs.engine.backends.backend import Backend
from moe_graphs.engine.guards import Guards, reads_before_running
from moe_graphs.engine.hooks import tensor_hooks_of
from moe_graphs.engine.reads import Reads
from moe_graphs.engine.whole_step.fsdp import Sharding
from moe_graphs.engine.whole_step.grad_fields import gradients_of, keep_apart


@dataclass(frozen=True)
class StepDefinition:
    """``state``: objects besides model and optimizer that the step changes or reads."""

    step: Callable[[Any], Any]
    model: nn.Module
    optimizer: Optimizer | None
    state: tuple[Any, ...]
    backend: Backend

    def run(self, batch: Any) -> Any:
        """The step; afterwards no parameter is gathered that FSDP2 has sharded, and gradients that
        it has made share no memory with one another."""
        parameters = list(self.parameters().values())
        before = gradients_of(parameters)
        result = self.step(batch)
        self.sharding.rest()
        keep_apart(parameters, before)
        return result

    @functools.cached_property
    def sharding(self) -> Sharding:
        return Sharding(self.model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that have a gradient, or may get one. A frozen one may have one left."""
        return {
            name: p
            for name, p in self.model.named_parameters()
            if p.requires_grad or p.grad is not None
        }

    def optimizers(self) -> list[Optimizer]:
        """Also those within ``state`` (the optimizer of a ``DeviceStep``)."""
        candidates = [self.optimizer, *self.state]
        candidates += [v for s in self.state if hasattr(s, "__dict__") for v in vars(s).values()]
        return list({id(c): c for c in candidates if isinstance(c, Optimizer)}.values())

    def reads_before(self) -> Reads:
        """The Python that the step may run, as far as can be told without running it."""
        hooks = tensor_hooks_of(self.model.parameters())
        return reads_before_running([self.step, *hooks], self.model.modules(), self.guards)

    def guards(
        self,
        reads: Reads,
        addresses: frozenset[int] | set[int] = frozenset(),
        *,
        constants: dict[str, Any] | None = None,
        optimizer: bool = True,
        schedulers: bool = True,
    ) -> Guards:
        """Schedulers change between steps, and must not within them."""
        everything = {
            f"state[{i}]": each
            for i, each in enumerate(self.state)
            if schedulers or not isinstance(each, LRScheduler)
        }
        if optimizer and self.optimizer is not None:
            everything["optimizer"] = self.optimizer
        return Guards(
            {"": self.model, "step": self.step, **(constants or {})},
            reads,
            addresses,
            everything=everything,
            tensors=fp8.tensors_of(self.model),
            tensor_names={id(p): name for name, p in self.model.named_parameters()},
            sharded=True,
        )
