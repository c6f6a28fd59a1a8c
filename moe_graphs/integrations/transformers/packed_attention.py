"""Attention of transformers with one product for queries, keys and values, and one kernel behind.

The kernel (``kernels.split_heads``) takes the product as it lies, norms of heads and positions
included: views of a product that each of those had to copy first would cost what the GEMM wins.

Shapes: B batch, S sequence, D model, H query heads, G kv heads, Q head dim, M = (H + 2G) * Q.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_graphs.integrations.transformers.changes import Changes, by_class
from moe_graphs.integrations.transformers.rms_norms import eps_of, is_changed, is_hooked, plain_norm
from moe_graphs.kernels import split_heads

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# All that a forward may mention to be taken for the one that is computed here. What depends on
# sizes of numbers (a clipping of queries) would not show in a try.
_NAMES = {
    "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb", "attention_dropout",
    "config", "contiguous", "eager_attention_forward", "get_interface", "getattr", "head_dim",
    "k_norm", "layer_idx", "o_proj", "q_norm", "reshape", "scaling", "shape", "sliding_window",
    "training", "transpose", "update", "use_qk_norm", "view", *_PROJECTIONS,
}  # fmt: skip


def pack_attention(model: nn.Module, done: Changes) -> None:
    """Gives attention modules whose class has the forward of most families one of ours.

    Each kind of module is tried: what the attention function is given, and all gradients. Call it
    after ``change_norms`` and ``change_rotary``: a module whose children are no plain ``Linear``
    and RMS norms (any more), or have hooks, runs the forward that it has now.
    """
    columns = _table_columns(model)
    for modules in by_class(filter(_is_candidate, model.modules())):
        name, theirs = type(modules[0]).__name__, getattr(modules[0].forward, "__func__", None)
        reason = columns if isinstance(columns, str) else _why_not(modules, theirs, columns)
        if reason is not None:
            done.left("qkv", name, len(modules), reason)
            continue
        done.changed_forwards("qkv", modules, _packed(theirs), "one product, one kernel for heads")


def _is_candidate(module: nn.Module) -> bool:
    is_attention = type(module).__name__.endswith("Attention")
    return is_attention and all(hasattr(module, name) for name in _PROJECTIONS)


def _table_columns(model: nn.Module) -> int | str:
    """How many columns of a head turn, or why that cannot be known.

    The kernel reads the first half of a row of cosines, and takes the second for the same.
    """
    found = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    columns = set()
    try:
        for module in found:
            (buffer, *_) = module.buffers()
            x = torch.zeros(1, 1, 1, device=buffer.device)
            for table_BSR in module(x, torch.arange(5, device=buffer.device)[None]):
                if not torch.equal(*table_BSR.chunk(2, dim=-1)):
                    return "the halves of its positions differ"
                columns.add(table_BSR.shape[-1])
    except Exception as error:
        return f"its positions could not be tried: {type(error).__name__}: {error}"
    return columns.pop() if len(columns) == 1 else f"positions of {len(columns)} sizes"


def _why_not(modules: list[Any], theirs: Any, columns: int) -> str | None:
    code = type(modules[0]).forward.__code__
    if theirs is None or theirs.__code__ is not code:
        return "has a forward of its own"
    if others := set(code.co_names) - _NAMES:
        return f"its forward has more to it: {', '.join(sorted(others))}"
    if any(module.head_dim != columns for module in modules):
        return f"{columns} columns of a head turn, not all"
    if any(getattr(m.forward, "__func__", None) is not theirs for m in modules):
        return "has forwards of its own"
    if any(_split(module) is None for module in modules):
        return "its projections or norms are others, or have hooks"
    try:
        return _compare(_redrawn(modules[0]), theirs)
    except Exception as error:
        return f"could not be tried: {type(error).__name__}: {error}"


def _split(attention: Any) -> tuple[Any, ...] | None:
    """What ``split_heads`` wants behind the tables, or None for a module that it does not fit."""
    projections = [getattr(attention, name) for name in _PROJECTIONS]
    norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    biased = {p.bias is not None for p in projections if type(p) is nn.Linear}
    plain = all(type(p) is nn.Linear and "forward" not in vars(p) for p in projections)
    if not plain or any(map(is_hooked, projections)) or len(biased) > 1:
        return None
    query, key, value = (p.out_features // attention.head_dim for p in projections)
    if key != value:
        return None
    if norms == [None, None]:
        return query, key
    if not all(n is not None and is_changed(n) is plain_norm and not is_hooked(n) for n in norms):
        return None
    weights, (eps, of_keys) = [n.weight for n in norms], map(eps_of, norms)
    sizes = [len(w) // attention.head_dim for w in weights]
    if eps != of_keys or sizes not in ([1, 1], [query, key]):
        return None
    return query, key, *weights, eps


def _packed(theirs: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    names, code = theirs.__globals__, theirs.__code__
    functions, eager = names["ALL_ATTENTION_FUNCTIONS"], names["eager_attention_forward"]
    # Mixtral reads it from the configuration, others have it themselves or do not pass it on.
    window_in_config = "sliding_window" in code.co_consts
    window_in_module = "sliding_window" in code.co_names

    @functools.wraps(theirs)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        split = _split(self)
        if split is None or position_embeddings[0].shape[-1] != self.head_dim:
            rest = attention_mask, past_key_values
            return theirs(self, hidden_states, position_embeddings, *rest, **kwargs)
        query, key, value = _heads(self, hidden_states, *position_embeddings, *split)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if window_in_module:
            kwargs["sliding_window"] = self.sliding_window
        elif window_in_config:
            kwargs["sliding_window"] = getattr(self.config, "sliding_window", None)
        attend = functions.get_interface(self.config._attn_implementation, eager)
        mixed_BSHQ, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(mixed_BSHQ.flatten(2)), weights

    return forward


def _heads(
    attention: Any, hidden_BSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *split: Any
) -> list[Tensor]:
    """Queries, keys and values ``[B, heads, S, Q]``."""
    projections = [getattr(attention, name) for name in _PROJECTIONS]
    bias_M = None
    if projections[0].bias is not None:
        bias_M = torch.cat([p.bias for p in projections])
    weight_MD = torch.cat([p.weight for p in projections])
    qkv_BSM = functional.linear(hidden_BSD, weight_MD, bias_M)
    (B, S), R = hidden_BSD.shape[:2], cos_BSR.shape[-1]
    if len(cos_BSR) > 1:  # positions of their own for each sequence
        qkv_BSM = qkv_BSM.view(1, B * S, -1)
    cos, sin = (x.reshape(-1, R)[:, : R // 2].contiguous() for x in (cos_BSR, sin_BSR))
    heads = split_heads(qkv_BSM, cos, sin, *split)
    return [x.view(B, S, *x.shape[2:]).transpose(1, 2) for x in heads]


def _redrawn(attention: nn.Module) -> Any:
    """A copy on the CPU in fp32 with other weights: of about one in rows, and around one."""
    generator = torch.Generator().manual_seed(0)
    drawn: dict[int, Any] = {}
    for parameter in attention.parameters():
        new = torch.randn(parameter.shape, generator=generator)
        new = new * new.shape[-1] ** -0.5 if new.dim() > 1 else 1 + new / 4
        drawn[id(parameter)] = nn.Parameter(new)
    made: Any = copy.deepcopy(attention, drawn).train()
    made.attention_dropout = 0.25  # is handed on, not done
    return made


def _compare(attention: Any, theirs: Any) -> str | None:
    """Each with a cache and an attention function that note what they are given."""
    runs = []
    for packed in (False, True):
        given: list[Any] = []
        names = theirs.__globals__ | {"ALL_ATTENTION_FUNCTIONS": _Noting(given)}
        noting = types.FunctionType(
            theirs.__code__, names, closure=theirs.__closure__, argdefs=theirs.__defaults__
        )
        cache = _Noting(given)
        outputs = _run(attention, _packed(noting) if packed else noting, cache)
        runs.append((given, outputs))
    (expected_given, expected), (given, found) = runs
    if given != expected_given:
        return f"hands on something else: {given} where it was {expected_given}"
    for name, value in found.items():
        scale = expected[name].abs().max().clamp(min=0.1)
        error = (value - expected[name]).abs().max() / scale
        if not error <= 1e-5:
            return f"computes something else: {name} differs by {error:.1g}"
    return None


class _Noting:
    """In the place of transformers' table of attention functions, and of a cache."""

    def __init__(self, given: list[Any]) -> None:
        self.given = given

    def get_interface(self, *_: Any) -> Callable[..., tuple[Tensor, None]]:
        return self._attend

    def update(self, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        self.given.append(rest)
        return key, value

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        self.given.append((query.shape, key.shape, value.shape, mask, kwargs))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2), None


def _run(attention: Any, forward: Callable[..., Any], cache: Any) -> dict[str, Tensor]:
    """The output, and gradients for the input and the parameters, by name."""
    generator = torch.Generator().manual_seed(1)
    size, named = attention.q_proj.in_features, dict(attention.named_parameters())
    found: dict[str, Tensor] = {}
    for sequences in (1, 3):  # that have positions in the table
        x = torch.randn(3, 7, size, generator=generator).requires_grad_()
        half = torch.randn(2, sequences, 7, attention.head_dim // 2, generator=generator)
        tables = torch.cat((half, half), dim=-1)
        output, _ = forward(attention, x, tuple(tables), "mask", cache, probe="given on")
        grad = torch.randn(output.shape, generator=generator)
        grads = torch.autograd.grad(output, (x, *named.values()), grad)
        values = (output, *grads)
        names = ("output", "its input", *named)
        found |= {f"{n} ({sequences})": v for n, v in zip(names, values, strict=True)}
    return found
