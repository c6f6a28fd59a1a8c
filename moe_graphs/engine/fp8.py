"""Transformer Engine's FP8: state in its modules that kernels write past torch's dispatcher.

Under its autocast modules cast with scales. With delayed scaling their kernels also note the
largest values (amaxes). Scales are updated once a step, outside of the modules: those of forwards
where the outermost autocast ends, those of backwards after the backward of the module that ran
first in it. A graph holds casts and amaxes like other kernels. The rest is Python, which a graph
does not run: this file does it at a scope's replay, and prevents it in a trial run.

The layout of ``transformer_engine.pytorch.quantization`` of version 2.20 is known. Under a version
that keeps its state in another way, calls run eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.errors import CaptureError

_NOT_ASKED = 0
"""``is_first_fp8_module`` while no module is to be first.

It is false, but it is another object than the ``False`` that a module leaves after asking.
"""


_MANAGED_BY = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
# Whether Transformer Engine was not imported yet. Every call asks, so no Python runs for it.
is_absent = functools.partial(sys.modules.keys().isdisjoint, frozenset(_MANAGED_BY))


def _manager() -> Any:
    """Manager of Transformer Engine's global state; None if it was not imported."""
    module = next(filter(None, map(sys.modules.get, _MANAGED_BY)), None)
    return getattr(module, "FP8GlobalStateManager", None)


def _state() -> Any:
    """The manager's state, if its layout is the known one."""
    return getattr(_manager(), "quantization_state", None)


def is_enabled() -> bool:
    manager = _manager()
    return manager is not None and bool(manager.is_fp8_enabled())


def reason_to_run_eagerly() -> str | None:
    if not is_enabled():
        return None
    state = _state()
    return "fp8" if state is None or state.fp8_calibration else None


def surroundings() -> Any:
    """State of the autocast that a graph bakes in; None outside of an autocast."""
    if not is_enabled():
        return None
    manager = _manager()
    recipe = manager.get_fp8_recipe()
    return repr(recipe), id(manager.get_fp8_group()), manager.is_fp8_calibration()


@dataclass(frozen=True)
class Entry:
    """State at the start of a whole step.

    Attributes:
        is_first: whether the step's first module is the first of the autocast.
        registered: how many tensors of scales are registered for updates.
    """

    is_first: bool
    registered: int

    @classmethod
    def of_now(cls) -> Entry | None:
        state = _state()
        if state is None:
            return None
        is_first = is_enabled() and bool(state.is_first_fp8_module)
        return cls(is_first, sum(map(len, state.global_scale_buffer.values())))


def autocast(enabled: bool, recipe: Any, group: Any) -> contextlib.AbstractContextManager[Any]:
    """Transformer Engine's autocast.

    Raises:
        ValueError: if it is wanted but not imported, or if its version is not known here.
    """
    if not enabled:
        return contextlib.nullcontext()
    module: Any = sys.modules.get("transformer_engine.pytorch")
    if _state() is None or not hasattr(module, "autocast"):
        raise ValueError("enabled=True needs transformer_engine.pytorch, imported, as of 2.20")
    return module.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)


# ---- the state


class Autocast:
    """State of the autocast when the object was made. The state belongs to the process."""

    def __init__(self) -> None:
        state = _state()
        if state is not None:
            self._kept = _manager().get_autocast_state(), state.autocast_depth

    def put_back(self) -> None:
        state = _state()
        if state is not None:
            kept, state.autocast_depth = self._kept
            _manager().set_autocast_state(kept)

    @contextlib.contextmanager
    def beside(self, inputs: Sequence[Any]) -> Iterator[Uses]:
        """Enters the autocast again for a trial run.

        Modules neither register what they keep nor become the first module. If ``inputs`` (leaves)
        have the flag on the device, the flag decides whether weights are cast again.
        """
        uses, now, state = Uses(), Autocast(), _state()
        if state is None:
            yield uses
            return
        self.put_back()
        state.is_first_fp8_module, state.fp8_graph_capturing = _NOT_ASKED, True
        flag, state.skip_fp8_weight_update_tensor = state.skip_fp8_weight_update_tensor, None
        if any(leaf is _IS_FIRST_MICROBATCH for leaf in inputs):
            state.skip_fp8_weight_update_tensor = _skipping()
        try:
            yield uses
            uses.fp8 = state.is_first_fp8_module is not _NOT_ASKED
        finally:
            state.skip_fp8_weight_update_tensor = flag
            now.put_back()


class Uses:
    """Findings of a trial run about FP8.

    Attributes:
        fp8: whether a module that has a backward ran in FP8 within the block.
    """

    fp8 = False


class Fp8State:
    """The scales and amaxes of all modules, and the position in autocasts, as they are now."""

    def __init__(self) -> None:
        self._tensors, self._autocast = named_tensors(), Autocast()
        self._values = _copies(list(self._tensors.values()))

    def named_values(self) -> dict[str, Tensor]:
        return dict(zip(self._tensors, self._values, strict=True))

    @torch.no_grad()
    def put_back(self) -> None:
        """Puts scales and amaxes back, and resets those that modules have registered since."""
        if self._tensors:
            torch._foreach_copy_(list(self._tensors.values()), self._values)
        for name, tensor in named_tensors().items():
            if name not in self._tensors:
                tensor.fill_(1 if name.startswith(_SCALES) else 0)
        self._autocast.put_back()


_SCALES, _AMAXES = "the FP8 scales", "the FP8 amaxes"


def named_tensors() -> dict[str, Tensor]:
    """Scales and amaxes of all modules, by the names that messages use."""
    state = _state()
    if state is None:
        return {}
    buffers = {_SCALES: state.global_scale_buffer, _AMAXES: state.global_amax_history_buffer}
    return {
        f"{what} of module {number} ({key})": tensor
        for what, buffer in buffers.items()
        for key, listed in buffer.items()
        for number, tensor in enumerate(listed)
    }


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of the tensors, made by one kernel."""
    if not tensors:
        return []
    together = torch.cat([tensor.detach().flatten() for tensor in tensors])
    parts = together.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


# ---- the state of a module


def has_scales(module: nn.Module) -> bool:
    """Whether one of its modules has computed in FP8."""
    return any(True for _ in _with_fp8(module))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that kernels of its modules read and write at fixed addresses, by path.

    These are scales, amaxes, cached casts of weights, the flag that says whether weights are cast
    again, and the tensors that attention makes once for every shape.
    """
    found = {f"cu_seqlens for {key}": tensor for key, tensor in (_lengths() or {}).items()}
    if is_enabled():
        found[FLAG] = _skipping()
    for name, each in _with_fp8(module):
        for key in ("scaling_fwd", "scaling_bwd"):
            state = each.fp8_meta.get(key)
            for what in ("scale", "amax_history"):
                tensor = getattr(state, what, None)
                if isinstance(tensor, Tensor):
                    found[f"{name}.fp8_meta[{key!r}].{what}"] = tensor
        for key, cast in getattr(each, "_fp8_workspaces", {}).items():
            for what, tensor in vars(cast).items():
                if isinstance(tensor, Tensor):
                    found[f"{name}._fp8_workspaces[{key!r}].{what}"] = tensor
    return found


class Scales:
    """Scales that a captured forward has cast with.

    An autocast that ends before the backward changes the scales, but a forward that is computed
    anew needs the old ones. This object is a context around such a forward. Inside it nothing is
    noted for the next scales.
    """

    def __init__(self, scales: list[Tensor], amaxes: list[Tensor]) -> None:
        self._scales, self._amaxes = scales, amaxes
        self._kept = list(map(torch.empty_like, scales))

    @classmethod
    def of(cls, module: nn.Module) -> Scales:
        tensors = tensors_of(module).items()
        return cls(*([t for name, t in tensors if name.endswith(end)] for end in _OF_FORWARDS))

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the present scales. Inside a capture, every replay does so."""
        if self._scales:
            torch._foreach_copy_(self._kept, self._scales)

    @torch.no_grad()
    def __enter__(self) -> None:
        self._now = _copies([*self._scales, *self._amaxes])
        if self._scales:
            torch._foreach_copy_(self._scales, self._kept)

    @torch.no_grad()
    def __exit__(self, *exception: object) -> None:
        if self._now:
            torch._foreach_copy_([*self._scales, *self._amaxes], self._now)
        self._now = []


_OF_FORWARDS = ("['scaling_fwd'].scale", "['scaling_fwd'].amax_history")


def register(module: nn.Module) -> None:
    """Registers FP8 state as the first real forward does, so that nothing registers it later."""
    for _, each in _with_fp8(module):
        if "recipe" in each.fp8_meta:
            _manager().add_fp8_tensors_to_global_buffer(each.fp8_meta)


def _with_fp8(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if _state() is not None:
        for name, each in module.named_modules():
            if isinstance(each.__dict__.get("fp8_meta"), dict):
                yield name, each


def is_bookkeeping(value: Any) -> bool:
    """Whether a value is an object of Transformer Engine that its modules change as they like.

    The parts of it that a graph has baked in are compared as ``surroundings`` and ``tensors_of``.
    """
    module = type(value).__module__  # for some classes this is no string
    of_its_own = isinstance(module, str) and module.startswith("transformer_engine.")
    return of_its_own or (value is _lengths() and isinstance(value, dict))


def _lengths() -> Any:
    """The dictionary of attention's sequence lengths; None before attention was imported."""
    name = "transformer_engine.pytorch.attention.dot_product_attention.utils"
    return getattr(sys.modules.get(name), "_cu_seqlens_cache", None)


def unsupported(module: nn.Module) -> str | None:
    """The reason why no graph can have some module inside ``module``, or None."""
    for name, each in module.named_modules() if _state() is not None else ():
        reason = _unsupported(each)
        if reason is not None:
            return f"{name or 'it'!r} {reason}"
    return None


def _unsupported(module: Any) -> str | None:
    store = getattr(module, "wgrad_store", None)
    if getattr(module, "fuse_wgrad_accumulation", False):
        return (
            "adds to main_grad past torch's dispatcher: build it with fuse_wgrad_accumulation=False"
        )
    if store is not None and store.delay_wgrad_compute():
        return (
            "keeps its weights' gradients for backward_dw() in Python: build it with "
            "delay_wgrad_compute=False"
        )
    if getattr(module, "primary_weights_in_fp8", False):
        return (
            "has FP8 weights, which optimizers change past their autograd: build it outside of "
            "quantized_model_init"
        )
    if is_enabled() and type(module).__module__.startswith("transformer_engine.pytorch.ops."):
        return "is one of te.ops, which keep the state of FP8 elsewhere: take a module instead"
    return None


# ---- replays


def with_flag_on_device(inputs: Any) -> Any:
    """The inputs of a scope, with ``is_first_microbatch`` moved to the device.

    The argument says whether modules cast their weights again. One graph serves both values: it
    reads the flag on the device, and an object that stands for both takes the argument's place.
    """
    is_pair = type(inputs) is tuple and len(inputs) == 2 and type(inputs[1]) is dict
    is_first = inputs[1].get(FLAG) if is_pair else None
    if type(is_first) is not bool or not is_enabled() or _state() is None:
        return inputs
    _skipping().fill_(not is_first)
    return inputs[0], {**inputs[1], FLAG: _IS_FIRST_MICROBATCH}


FLAG = "is_first_microbatch"


class _IsFirstMicrobatch:
    def __bool__(self) -> bool:
        raise CaptureError(
            "it asks in Python for is_first_microbatch, which only Transformer Engine's modules "
            "know on the device: give the argument another name"
        )

    def __repr__(self) -> str:
        return FLAG


_IS_FIRST_MICROBATCH = _IsFirstMicrobatch()


@functools.cache
def _skipping() -> Tensor:
    """The flag on the device: whether modules keep their old casts of weights."""
    return torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")


def claim_first() -> bool:
    """Claims the first place in the autocast, as modules do; True if it was free."""
    return bool(_manager().is_first_fp8_module())


def update_scales_of_backwards() -> None:
    """Updates the scales after the backward of the autocast's first module."""
    _manager().reduce_and_update_fp8_tensors(forward=False)
