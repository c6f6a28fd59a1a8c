"""torch's checkpoint within a block that is tried, captured or audited.

``torch.utils.checkpoint`` notes the state of the random number generators before a forward, and
sets them back to it before the recomputation. No capture on a GPU can do either. A forward that
draws no random numbers needs neither. Within whole steps a recomputation draws the numbers of its
forward: the trial run finds where each forward begins to draw, and the backend's ``RecordedDraws``
go back there. In graphs of scopes, whose forward and backward are two graphs, a forward that draws
random numbers is refused by name in its trial run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import _disable_current_modes

from moe_graphs.errors import CaptureError

if TYPE_CHECKING:
    from moe_graphs.engine.backends.backend import RecordedDraws

_FUNCTION, _GENERATOR = "CheckpointFunction", "_checkpoint_without_reentrant_generator"


def hooks_of_others() -> bool:
    """Whether hooks on saved tensors are in force that are not those of torch's checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) != torchs.__name__


Again = Callable[[], contextlib.AbstractContextManager[None]]


class Checkpoints(contextlib.AbstractContextManager[None]):
    """Context within which torch's checkpoint leaves random states to this object.

    Args:
        step_on: the device of the whole step that runs eagerly or is captured inside. None for
            every other block, in which drawing random numbers under checkpoint is refused.
        recorded: draws again what a forward has drawn, if the block is being captured.

    Attributes:
        calls: how many calls of torch's checkpoint without ``use_reentrant`` there were inside.
        begins: for each forward under checkpoint, how far the generator was behind the begin of the
            block, or None if it drew nothing. Eager blocks only.
    """

    calls = 0

    def __init__(
        self, step_on: torch.device | None = None, recorded: RecordedDraws | None = None
    ) -> None:
        self._device, self._recorded = step_on, recorded
        self.begins: list[int | None] = []

    def __enter__(self) -> None:
        self._start = _offset(self._device)
        self._before = {name: getattr(torchs, name) for name in (_FUNCTION, _GENERATOR)}
        setattr(torchs, _FUNCTION, _Reentrant(self._before[_FUNCTION], self._forward))
        setattr(torchs, _GENERATOR, self._generator)

    def __exit__(self, *exception: object) -> None:
        for name, value in self._before.items():
            setattr(torchs, name, value)

    def _generator(
        self, run: Callable[..., Any], preserve_rng_state: bool = True, *args: Any, **kwargs: Any
    ) -> Generator[None]:
        """Stand-in for the generator of ``checkpoint(use_reentrant=False)``."""
        self.calls += 1
        if not preserve_rng_state:
            yield from self._before[_GENERATOR](run, False, *args, **kwargs)
            return
        with self._forward() as again:

            def run_again(*given: Any, **named: Any) -> Any:
                with again():
                    return run(*given, **named)

            yield from self._before[_GENERATOR](run_again, False, *args, **kwargs)

    @contextlib.contextmanager
    def _forward(self) -> Iterator[Again]:
        """Context of a forward; the value is the context of its recomputation.

        Raises:
            CaptureError: at its end, if random numbers were drawn that cannot be drawn again.
        """
        number = len(self.begins)
        self.begins.append(None)
        if self._recorded is not None:
            self._recorded.note(number)
            yield functools.partial(self._recorded.again, number)
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            yield contextlib.nullcontext
            return
        before, begin = _positions(), _offset(self._device)
        yield functools.partial(_drawing_from, before, self._device)
        moved = {name for name, position in _positions().items() if position != before[name]}
        if moved - ({self._device} if self._device is not None else set()):
            raise CaptureError(
                "random numbers are drawn within torch.utils.checkpoint, and a replay would draw "
                "others for the recomputation: take GraphConfig(recompute=...) for whole scopes, "
                "or whole steps (moe_graphs.FullIteration), or set the dropout there to 0"
            )
        if moved:
            self.begins[number] = begin - self._start


class _Reentrant:
    """Stand-in for the autograd function of ``checkpoint(use_reentrant=True)``."""

    def __init__(
        self, function: Any, forward: Callable[[], contextlib.AbstractContextManager[Again]]
    ) -> None:
        self._function, self._forward = function, forward

    def apply(self, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not preserve:
            return self._function.apply(run, False, *args)
        found: list[Again] = []  # once the forward has run

        def run_again(*given: Any) -> Any:
            if found:
                with found[0]():
                    return run(*given)
            with self._forward() as again:
                result = run(*given)
            found.append(again)
            return result

        return self._function.apply(run_again, False, *args)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _offset(device: torch.device | None) -> int:
    """The number of draws that a GPU's generator counts. The CPU's has no such number: 0."""
    if device is None or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return 0
    return _default_generator(device).get_offset()


@contextlib.contextmanager
def _drawing_from(positions: dict[Any, Any], device: torch.device | None) -> Iterator[None]:
    """Context that draws from a position of the device's generator, as torch's checkpoint does."""
    if device is None:
        yield
        return
    before = _positions()[device]
    _return_to(device, positions[device])
    try:
        yield
    finally:
        _return_to(device, before)


def _return_to(device: torch.device, position: Any) -> None:
    generator = _default_generator(device)
    if device.type == "cuda":
        seed, offset = position
        generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            generator.set_state(torch.frombuffer(bytearray(position), dtype=torch.uint8))


def _positions() -> dict[torch.device, Any]:
    """The positions of the default generators, by device."""
    found: dict[torch.device, Any] = {
        each.device: (each.initial_seed(), each.get_offset())
        for each in torch.cuda.default_generators
    }
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        found[torch.device("cpu")] = torch.get_rng_state().numpy().tobytes()
    return found
