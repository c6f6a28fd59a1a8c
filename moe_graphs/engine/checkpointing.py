"""torch's checkpoint within a block that is tried, captured or audited.

``torch.utils.checkpoint`` notes the state of the random number generators before a forward, and
sets them back to it before the recomputation. No capture on a GPU can do either. A forward that
draws no random numbers needs neither, so within a block nothing is noted. A forward that draws some
is refused by name in its trial run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import _disable_current_modes

from moe_graphs.errors import CaptureError

_FUNCTION, _GENERATOR = "CheckpointFunction", "_checkpoint_without_reentrant_generator"


def hooks_of_others() -> bool:
    """Whether hooks on saved tensors are in force that are not those of torch's checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) != torchs.__name__


class WithoutRandomStates(contextlib.AbstractContextManager[None]):
    """Context within which torch's checkpoint leaves the random number generators alone.

    Attributes:
        calls: how many calls of torch's checkpoint without ``use_reentrant`` there were inside.
    """

    calls = 0

    def __enter__(self) -> None:
        self._before = {name: getattr(torchs, name) for name in (_FUNCTION, _GENERATOR)}
        setattr(torchs, _FUNCTION, _Reentrant(self._before[_FUNCTION]))
        setattr(torchs, _GENERATOR, self._generator)

    def __exit__(self, *exception: object) -> None:
        for name, value in self._before.items():
            setattr(torchs, name, value)

    def _generator(
        self, run: Callable[..., Any], preserve_rng_state: bool = True, *args: Any, **kwargs: Any
    ) -> Generator[None]:
        """Stand-in for the generator of ``checkpoint(use_reentrant=False)``."""
        self.calls += 1
        with _drawing_nothing(preserve_rng_state):
            yield from self._before[_GENERATOR](run, False, *args, **kwargs)


class _Reentrant:
    """Stand-in for the autograd function of ``checkpoint(use_reentrant=True)``."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def apply(self, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        def checked(*given: Any) -> Any:
            with _drawing_nothing(preserve):
                return run(*given)

        return self._function.apply(checked, False, *args)


@contextlib.contextmanager
def _drawing_nothing(wanted: bool) -> Iterator[None]:
    """Context in which drawing random numbers is refused, unless it is part of a capture.

    Raises:
        CaptureError: at its end, if random numbers were drawn.
    """
    is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if not wanted or is_capturing:
        yield
        return
    before = _positions()
    yield
    if _positions() != before:
        raise CaptureError(
            "random numbers are drawn within torch.utils.checkpoint, and a replay would draw "
            "others for the recomputation: take GraphConfig(recompute=...) for whole scopes, or "
            "set the dropout there to 0"
        )


def _positions() -> list[Any]:
    on_gpus = [(each.initial_seed(), each.get_offset()) for each in torch.cuda.default_generators]
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return [torch.get_rng_state().numpy().tobytes(), *on_gpus]
