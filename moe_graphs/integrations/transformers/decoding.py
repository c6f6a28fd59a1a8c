"""Generation with a cache, in which the forwards that ours replace run again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def is_decoding(hidden: Tensor) -> bool:
    """Whether a model generates with a cache: no gradient, and one token of each sequence."""
    return not torch.is_grad_enabled() and hidden.dim() >= 3 and hidden.shape[1] == 1


def theirs_in_decoding(maker: Callable[[type[Any]], Any]) -> Callable[[type[Any]], Any]:
    """Let the forward that ``maker`` makes give way to the one before it in generation.

    A token of each sequence waits for the host, which launches transformers' operators faster than
    our kernels. The first argument of both forwards, or ``hidden_states``, has the sequence in its
    second dimension.
    """

    @functools.wraps(maker)
    def made(kind: type[Any]) -> Any:
        ours, theirs = maker(kind), kind.forward

        @functools.wraps(ours)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.get("hidden_states")
            generates = hidden is not None and is_decoding(hidden)
            return (theirs if generates else ours)(self, *args, **kwargs)

        return forward

    return made
