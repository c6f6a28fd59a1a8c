"""RMS norms of transformers on our kernels, with the residual sums before them in one pass."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.engine.guards.introspection import hooks_of
from moe_graphs.integrations.transformers.changes import Changes, by_class
from moe_graphs.integrations.transformers.decoding import theirs_in_decoding
from moe_graphs.kernels import add_rms_norm, rms_norm

# What a decoder layer's forward mentions, if it is the one that is computed here.
_CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


_WIDTH = 8


def change_norms(model: nn.Module, done: Changes) -> None:
    """Gives norms that compute just that (each class is tried) a forward of ours."""
    norms = (m for m in model.modules() if type(m).__name__.endswith("RMSNorm"))
    for modules in by_class(norms):
        makers = (each for each in _MAKERS if all(_computes(m, each) for m in modules))
        maker = next(makers, None)
        if maker is None or any(map(is_changed, modules)):
            why = "computes something else" if maker is None else "are on our kernels already"
            done.left("norms", type(modules[0]).__name__, len(modules), why)
            continue
        done.changed_classes("norms", modules, maker, "one kernel forward, one backward")


@torch.no_grad()
def _computes(norm: Any, maker: Callable[[type[Any]], Callable[..., Tensor]]) -> bool:
    weight = getattr(norm, "weight", None)
    if weight is None or weight.dim() != 1 or not eps_of(norm) or "forward" in vars(norm):
        return False
    generator = torch.Generator().manual_seed(0)
    tried = copy.deepcopy(norm).to("cpu", torch.float32)
    tried.weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
    x = torch.randn(3, *weight.shape, generator=generator)
    return torch.allclose(tried(x), maker(type(norm))(tried, x), rtol=1e-5, atol=1e-6)


def plain_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, eps_of(self))


def zero_centred_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Weights around zero, of Gemma and Qwen3-Next."""
    return rms_norm(hidden_states, self.weight, eps_of(self), zero_centred=True)


@theirs_in_decoding
def _plain(kind: type[Any]) -> Callable[..., Tensor]:
    return plain_norm


@theirs_in_decoding
def _zero_centred(kind: type[Any]) -> Callable[..., Tensor]:
    return zero_centred_norm


_NORMS, _MAKERS = (plain_norm, zero_centred_norm), (_plain, _zero_centred)


def eps_of(norm: Any) -> float:
    """0 if it has none."""
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0


def is_changed(norm: nn.Module) -> Callable[..., Tensor] | None:
    """The forward of ours that it has, if it has one."""
    forward: Any = inspect.unwrap(type(norm).forward)
    return forward if forward in _NORMS and "forward" not in vars(norm) else None


def is_hooked(module: nn.Module) -> bool:
    return any(hooks_of(module))


def fuse_residuals(model: nn.Module, done: Changes) -> None:
    """Gives decoder layers whose forward is that of most families one with ``add_rms_norm``.

    Each class is tried with stand-ins for what it holds. A layer whose norms are not ours (any
    more) or have hooks runs the forward that it had. The layers get a class of ours: graphs want
    the forward of a scope there, and transformers wraps it for gradient checkpointing.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    for modules in by_class(layers):
        kind: Any = type(modules[0])
        reason = _why_not(modules)
        if reason is not None:
            done.left("residual", kind.__name__, len(modules), reason)
            continue
        note = "residual sums in the norms' kernels"
        done.changed_classes("residual", modules, fused_forward, note)


def _why_not(layers: list[Any]) -> str | None:
    names = set(inspect.unwrap(type(layers[0]).forward).__code__.co_names)
    if names != _CHILDREN:
        return "its forward is another"
    if any("forward" in vars(layer) for layer in layers):
        return "has a forward of its own"
    if not all(is_changed(norm) for layer in layers for norm in _norms(layer)):
        return "its norms are not on our kernels"
    try:
        return _compare(layers[0])
    except Exception as error:
        return f"could not be tried: {type(error).__name__}: {error}"


def _norms(layer: Any) -> tuple[nn.Module, nn.Module]:
    return layer.input_layernorm, layer.post_attention_layernorm


@theirs_in_decoding
def fused_forward(kind: type[nn.Module]) -> Callable[..., Tensor]:
    parameters = inspect.signature(kind.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        apart = any(is_hooked(norm) or not is_changed(norm) for norm in _norms(self))
        if apart or args:
            return kind.forward(self, hidden_states, *args, **kwargs)
        residual, normed = _add_norm(self.input_layernorm, hidden_states, None)
        update, _ = self.self_attn(hidden_states=normed, **{**defaults, **kwargs})
        residual, normed = _add_norm(self.post_attention_layernorm, residual, update)
        return residual + self.mlp(normed)

    return forward


def _add_norm(norm: Any, residual: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
    zero_centred = is_changed(norm) is zero_centred_norm
    return add_rms_norm(residual, update, norm.weight, eps_of(norm), zero_centred=zero_centred)


def _compare(layer: Any) -> str | None:
    tried, given = _stood_in(layer)
    runs = [_run(tried, forward) for forward in (type(layer).forward, fused_forward(type(layer)))]
    expected, found = given
    if expected.keys() != found.keys() or any(expected[n] is not found[n] for n in expected):
        return f"hands on something else: {list(expected)}"
    close = (torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*runs, strict=True))
    return None if all(close) else "computes something else"


def _stood_in(layer: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The layer with small children, on the CPU; and what attention is given, call by call."""
    generator = torch.Generator().manual_seed(0)
    tried = copy.copy(layer)
    tried.gradient_checkpointing, tried._modules = False, {}
    attention = tried.self_attn = _Attention()
    tried.mlp = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh())
    for name in ("input_layernorm", "post_attention_layernorm"):
        norm = copy.copy(getattr(layer, name))
        norm._parameters = {"weight": nn.Parameter(torch.rand(_WIDTH, generator=generator) + 0.5)}
        setattr(tried, name, norm)
    return tried, attention.given


class _Attention(nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.given: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.given.append(kwargs)
        return self.linear(hidden_states).tanh(), None


def _run(layer: Any, forward: Callable[..., Tensor]) -> list[Tensor]:
    """The output, and gradients for the input and the parameters."""
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, 3, 5, _WIDTH, generator=generator)
    x.requires_grad_()
    given = dict.fromkeys(("attention_mask", "position_embeddings", "probe"), "given on")
    output = forward(layer, x, **given)
    return [output, *torch.autograd.grad(output, (x, *layer.parameters()), grad)]
