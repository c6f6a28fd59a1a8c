"""Interface of a library's model that is measured, and the training step around it.

Shapes: B sequences, S sequence length, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from contenders import WARMUP_STEPS, Contender, Run, adamw, synchronize


class Peer:
    """A model with its loss. Subclasses' ``capture`` makes graphs of their own, if they have any.

    Attributes:
        settings: how the library is used, as JSON values: they stand in the line.
        captures, captures_first: whether it makes graphs, and before the first step.
    """

    captures = captures_first = False

    def __init__(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        self.model, self.settings = model, dict(settings)

    def loss(self, model: Callable[..., Any], tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean cross entropy. ``model`` is the model, or what stands for it."""
        raise NotImplementedError

    def around_step(self) -> contextlib.AbstractContextManager[Any]:
        """Context that the step runs in, such as FP8."""
        return contextlib.nullcontext()

    def capture(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the peer's own graphs, if any; all gradients are None."""


class PeerRun(Run):
    """Forward, backward, update and zero_grad of a peer.

    Attributes:
        capture_seconds: of the peer's own graphs; ours report theirs.
        first_losses: of the steps before everything else.
        first_step_seconds: with everything that is compiled or tuned at the first call.
    """

    def __init__(
        self, peer: Peer, contender: Contender, batches: Tensor, rate: float = 1e-4
    ) -> None:
        self.peer = peer
        self.capture_seconds: float | None = None
        self.first_losses: list[float] = []
        self.first_step_seconds: float | None = None
        optimizer = adamw(peer.model, contender.our_adamw, rate)
        super().__init__(contender, peer.model, optimizer, batches)

    def forward_backward(self, batch: Tensor) -> Tensor:
        loss = self.peer.loss(self.forward, batch[:, :-1], batch[:, 1:])
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        with self.peer.around_step():
            return super().step()

    def warm_up(self) -> None:
        """Steps, then graphs, then two steps with them."""
        if self.peer.captures and self.peer.captures_first:
            self._capture()
        started = time.perf_counter()
        losses = [self.step().clone()]
        synchronize(self.device)
        self.first_step_seconds = time.perf_counter() - started
        losses += [self.step().clone() for _ in range(WARMUP_STEPS - 1)]
        synchronize(self.device)
        if self.peer.captures and not self.peer.captures_first:
            self._capture()
        losses += [self.step().clone() for _ in range(2)]
        self.first_losses = [float(loss) for loss in losses]
        synchronize(self.device)

    def _capture(self) -> None:
        started = time.perf_counter()
        self.peer.capture(self.optimizer)
        synchronize(self.device)
        self.capture_seconds = time.perf_counter() - started


def version_of(package: str) -> str:
    """Version of an imported package, which may be unpacked rather than installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


class Decoder(nn.Module):
    """Pre-norm decoder around layers that take and give ``[B, S, D]``."""

    def __init__(self, embedding: nn.Module, layers: list[nn.Module], norm: nn.Module,
                 head: nn.Module) -> None:  # fmt: skip
        super().__init__()
        self.embedding, self.layers = embedding, nn.ModuleList(layers)
        self.norm, self.head = norm, head

    def forward(self, tokens_BS: Tensor) -> Tensor:
        hidden_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD)
        return self.head(self.norm(hidden_BSD))


class DecoderLayer(nn.Module):
    def __init__(self, attention_norm: nn.Module, attention: nn.Module, moe_norm: nn.Module,
                 moe: nn.Module) -> None:  # fmt: skip
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.moe_norm, self.moe = moe_norm, moe

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        hidden_BSD = hidden_BSD + self.attention(self.attention_norm(hidden_BSD))
        return hidden_BSD + self.moe(self.moe_norm(hidden_BSD))
