"""Routers of other libraries, which choose experts by ``torch.topk`` over the experts' scores.

Every router of transformers 5 but PhiMoE's does, whatever it computes before and after: the choice
is the call of ``topk`` with a score for each expert. To replay a choice is to give that call's
result another set of experts, with their scores.

Shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_graphs.kernels.choose_experts.reference import take_given

_FUNCTIONS = (torch.topk, Tensor.topk)


class TopKChoice(TorchFunctionMode):
    """Context around a router's forward: notes the experts that it chooses, or gives it others.

    Args:
        num_experts: E.
        given_TK: int64, experts for the router; None: its own.

    Raises:
        ValueError: in the router, if ``given_TK`` has another shape than its own choice.
    """

    def __init__(self, num_experts: int, given_TK: Tensor | None = None) -> None:
        super().__init__()
        self._num_experts, self._given_TK = num_experts, given_TK
        self._found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FUNCTIONS or not self._is_choice(args[0]):
            return func(*args, **kwargs)
        found = func(*args, **kwargs) if self._given_TK is None else self._replayed(*args, **kwargs)
        self._found.append(found.indices)
        return found

    def _is_choice(self, scores: Tensor) -> bool:
        return scores.dim() == 2 and scores.shape[-1] == self._num_experts

    def _replayed(self, scores_TE: Tensor, k: int, *_: Any, **__: Any) -> Any:
        assert self._given_TK is not None
        check_shape(self._given_TK, (scores_TE.shape[0], k))
        return torch.return_types.topk(take_given(scores_TE, self._given_TK))

    @property
    def experts_TK(self) -> Tensor:
        """The experts that the router has used.

        Raises:
            ValueError: there is not one choice, but several or none.
        """
        if len(self._found) != 1:
            raise ValueError(
                f"routing: a router called topk over {self._num_experts} scores "
                f"{len(self._found)} times, and once is a choice of experts"
            )
        return self._found[0]


def check_shape(given_TK: Tensor | None, shape: tuple[int, int]) -> None:
    """Check choices that a layer is given.

    Raises:
        ValueError: there are none, or their shape is another one than ``shape``.
    """
    if given_TK is None or given_TK.shape != shape:
        found = "no choices" if given_TK is None else f"choices {list(given_TK.shape)}"
        raise ValueError(
            f"routing.replay: a layer got {found} and runs {list(shape)} (tokens, experts of each)"
        )


def router_of(block: Any) -> nn.Module | None:
    """The router of a block with ``experts``: the module whose forward calls ``topk``.

    None if it needs no choice, because it looks experts up by the numbers of tokens.

    Raises:
        ValueError: there is no such module, or several.
    """
    inside = set(block.experts.modules())
    parts = [module for module in block.modules() if module not in inside]
    if any(type(module).__name__.endswith("HashRouter") for module in parts):
        return None
    found = [module for module in parts if "topk" in type(module).forward.__code__.co_names]
    if len(found) != 1:
        raise ValueError(
            f"routing: a {type(block).__name__} has {len(found)} routers that choose experts by "
            f"torch.topk in their forward, and one is needed"
        )
    return found[0]


def pass_through(router: nn.Module, num_experts: int) -> Any:
    """A forward for a router that records, replays and counts, as its attributes say.

    It is that which the router has already, if that is one of these.
    """
    patched = vars(router).get("forward")
    if isinstance(patched, functools.partial) and patched.func is _forward:
        return patched
    return functools.partial(_forward, router, patched, num_experts)


def _forward(router: Any, patched: Any, num_experts: int, /, *args: Any, **kwargs: Any) -> Any:
    routing_pass = getattr(router, "routing_pass", None)
    given_TK = router.experts_TK if routing_pass == "replay" else None
    forward = functools.partial(type(router).forward, router) if patched is None else patched
    choice = TopKChoice(num_experts, given_TK)
    with choice:
        outputs = forward(*args, **kwargs)
    if routing_pass is not None:
        router.experts_TK = choice.experts_TK
    load = getattr(router, "expert_load", None)
    if load is not None and router.training:
        load.count(choice.experts_TK, None, None)
    return outputs
