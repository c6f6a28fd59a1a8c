"""Bodies of the blocks of random models, which map (rows, WIDTH) to (rows, WIDTH).

``BODIES`` has every kind by name. A body with ``turn(pick)`` has a knob that an event may turn
between steps: it sets something that its forward reads to a value that depends on ``pick`` alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 4
BODIES: dict[str, type[nn.Module]] = {}
CONTAINERS = ("residual", "twice", "sequence", "around")


def body(kind: type[nn.Module]) -> type[nn.Module]:
    """Class decorator: ``class AutocastInside`` becomes ``BODIES["autocast_inside"]``."""
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("_")
    BODIES[name] = kind
    return kind


class Linear(nn.Module):
    """Base of most bodies; it has ``self.linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


@body
class Plain(Linear):
    def forward(self, x):
        return self.linear(torch.tanh(x))


@body
class Normed(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return functional.silu(self.linear(self.norm(x)))


@body
class Dropped(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.dropout(self.linear(x)).sin()

    def turn(self, pick):
        self.dropout.p = (0.1, 0.6, 0.0)[pick % 3]


@body
class BatchNormed(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.linear(x))

    def turn(self, pick):
        self.norm.momentum = (0.3, None, 0.1)[pick % 3]


@body
class Attention(nn.Module):
    """Attention over the rows, with views and chunks; the kernel may depend on the context."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = True

    def forward(self, x):
        heads = self.qkv(x).view(len(x), 3, 2, WIDTH // 2).permute(1, 2, 0, 3)
        q, k, v = heads.unbind(0)
        y = functional.scaled_dot_product_attention(q[None], k[None], v[None], None, 0.0,
                                                    self.causal)  # fmt: skip
        return self.out(y[0].transpose(0, 1).reshape(len(x), WIDTH))

    def turn(self, pick):
        self.causal = bool(pick % 2)


@body
class TorchAttention(nn.Module):
    """Attention of a tensor to itself, with a fast path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1)

    def forward(self, x):
        return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


@body
class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, padding_idx=0)
        self.register_buffer("index", torch.tensor([3, 0, 1]))

    def forward(self, x):
        return x + self.table(self.index).mean(0)

    def turn(self, pick):
        self.index.fill_(pick % 5)


@body
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        return self.cell(x, torch.zeros_like(x))


@body
class LongShortTerm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x):
        return self.cells(x)[0]


@body
class TopTwo(Linear):
    """Routing with static shapes."""

    def forward(self, x):
        scores, chosen = self.linear(x).softmax(-1).topk(2, dim=-1)
        return x.scatter_add(1, chosen, scores)


@body
class ReadsHost(Linear):
    def forward(self, x):
        return self.linear(x) / (1.0 + x.detach().abs().sum().item())


@body
class SharedInside(Linear):
    """A weight that is used twice, and its bias as a factor."""

    def forward(self, x):
        return torch.tanh(self.linear(torch.tanh(self.linear(x)))) * self.linear.bias


@body
class Frozen(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)

    def forward(self, x):
        return self.linear(x)


@body
class Codebook(Linear):
    """A parameter without gradient that the forward itself updates."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.code.lerp_(y.detach().mean(0).float(), 0.1)
        return y * self.code.detach().clone()


@body
class BufferInPlace(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        y = self.linear(x)
        self.calls.add_(1)
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y * self.average.clone() / self.calls.clone()


@body
class BufferAssigned(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x):
        y = self.linear(x)
        self.average = self.average * 0.9 + y.detach().mean(0) * 0.1
        return y * self.average


@body
class InPlaceInside(Linear):
    def forward(self, x):
        y = self.linear(x).add_(1.0)
        y[:, 1:].mul_(0.5)
        return y.relu_()


@body
class InPlaceInput(Linear):
    def forward(self, x):
        return self.linear(x.mul_(0.5) if not x.requires_grad else x)


@body
class StopsGradient(Linear):
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            norm = y.norm()
        return y / norm + y.detach()


@body
class CheckpointInside(Linear):
    def forward(self, x):
        return checkpoint(lambda value: torch.tanh(self.linear(value)), x, use_reentrant=False)


@body
class Views(Linear):
    """A result that is a view with unusual strides."""

    def forward(self, x):
        y = self.linear(x).t().contiguous().t()
        return torch.cat([y[:, :2].sin(), y[:, 2:]], 1).expand(1, -1, -1)[0]


@body
class AutocastInside(Linear):
    """Autocast, whose cache casts the weight once for two uses."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(self.linear(x))
        return y.to(x.dtype)


@body
class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.linear(x)


@body
class SpectralNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.linear(x)


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x.clamp(min=0) + slope * x.clamp(max=0)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, gradient, gradient * ctx.slope), None


@body
class OwnFunction(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.slope = 0.1

    def forward(self, x):
        return _Saves.apply(self.linear(x), self.slope)

    def turn(self, pick):
        self.slope = (0.2, 0.5)[pick % 2]


@body
class Residual(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x):
        return x + self.part(x) * x


@body
class Twice(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(self.part(x))


@body
class Sequence(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(first, second)

    def forward(self, x):
        return self.parts(x)

    def turn(self, pick):
        if len(self.parts) == 2:
            self.parts.append(nn.Tanh())


@body
class Around(nn.Module):
    """One part that is called for both halves of the width, with views as arguments and results."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x):
        left, right = x.chunk(2, 1)
        return self.part(torch.cat([right, left], 1)) - left.repeat(1, 2)
