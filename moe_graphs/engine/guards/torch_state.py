"""The state of torch that decides which kernels run, by name.

A graph has this state baked in. It is noted where a call is recorded, and compared at every replay.
torch has no name for some state (a context manager of the user's own); that is part of what the
Python reads, see ``guards.py``. Some contexts a replay cannot honour at all: see
``reason_to_run_eagerly``.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules import module as module_globals
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

from moe_graphs.engine import fp8
from moe_graphs.engine.tensors import Mismatch

# Getters of torch._C without arguments; a version of torch may lack some of them.
_FLAGS = (
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_sdp_priority_order",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_blas_preferred_backend",
    "_get_linalg_preferred_backend",
    "_get_mkldnn_enabled",
)
# The precision of fp32 products, by (backend, operation).
_PRECISIONS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))
_HOOKS_OF_ALL_MODULES = tuple(
    getattr(module_globals, f"_global_{kind}")
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
)


class TorchState:
    """The state in force when it was made."""

    def __init__(self, device_type: str, *, of_backward: bool = False) -> None:
        """Notes the state.

        With ``of_backward`` FP8 is left out, because the forward has settled the precision.
        """
        self.device_type = device_type
        self._getters = dict(_getters(device_type))
        if of_backward:
            del self._getters[_FP8]
        self._state = {name: get() for name, get in self._getters.items()}
        self._fp8 = fp8.Autocast()
        self._begin()

    def _begin(self) -> None:
        """Prepares the quick comparison, which runs no Python.

        If no mode over torch's functions is in force, the comparison only asks whether that is
        still so. The same holds for Transformer Engine, if nobody has imported it.
        """
        getters = dict(self._getters)
        if not torch._C._len_torch_function_stack():
            getters["default device"] = torch._C._len_torch_function_stack
        if _FP8 in getters and fp8.is_absent():
            getters[_FP8] = fp8.is_absent
        self._calls = list(getters.values())
        self._values = list(map(operator.call, self._calls))

    def mismatch(self) -> Mismatch | None:
        """The first difference from the present state, or None. Takes some five microseconds."""
        if list(map(operator.call, self._calls)) == self._values:
            return None
        for name, before in self._state.items():
            after = self._getters[name]()
            if after != before:
                reason = "autocast" if name.startswith("autocast") else "context"
                message = f"{name} was {before!r} where it was captured and is {after!r} now"
                return Mismatch(reason, f"{message}: keep it the same around every call")
        self._begin()  # Transformer Engine was imported since
        return None

    @property
    def has_autocast_cache(self) -> bool:
        """Whether casts of weights are cached beyond the call."""
        is_on = self._state["autocast"] or self._state["autocast (cpu)"]
        return is_on and self._state["autocast cache"]

    @contextlib.contextmanager
    def autocast(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Context with torch's autocast and Transformer Engine's, as noted, for a trial run.

        ``inputs`` are the leaves of the run's inputs.
        """
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._fp8.beside(inputs))
            is_cached = self._state["autocast cache"]
            for kind, where in {self.device_type: "", "cpu": " (cpu)"}.items():
                is_on, dtype = (
                    self._state[f"autocast{where}"],
                    self._state[f"autocast dtype{where}"],
                )
                entered.enter_context(
                    torch.autocast(kind, dtype, enabled=is_on, cache_enabled=is_cached)
                )
            yield


def reason_to_run_eagerly() -> str | None:
    """The reason why no replay can serve this call, whatever was captured, or None."""
    if not torch.is_grad_enabled():
        return "no_grad"
    if torch._C._current_graph_task_id() != -1:
        return "recompute"  # activation checkpointing runs a forward inside a backward
    return reason_of_modes()


def reason_of_modes() -> str | None:
    """The reason of the same kind, grad mode aside, or None.

    Modes and transforms are reasons if they would not see what a graph does.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved_tensors_hooks"
    if torch._C._len_torch_dispatch_stack():
        return "dispatch_mode"  # FlopCounterMode, fake tensors
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "transform"  # torch.func: vmap, grad, jvp
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward_mode_ad"
    if torch.is_anomaly_enabled():
        return "anomaly_mode"
    if parametrize._cache_enabled:
        return "parametrization_cache"
    if any(_HOOKS_OF_ALL_MODULES):
        return "global_module_hooks"
    if torch._C._len_torch_function_stack() and _default_device() is _UNKNOWN:
        return "function_mode"
    return None if fp8.is_absent() else fp8.reason_to_run_eagerly()


_UNKNOWN = object()
_FP8 = "Transformer Engine's FP8 recipe"


def _default_device() -> Any:
    """The device of ``torch.set_default_device`` or ``with torch.device(...)``.

    None without one, and ``_UNKNOWN`` under any other mode over torch's functions.
    """
    count = torch._C._len_torch_function_stack()
    if not count:
        return None
    modes = [torch._C._get_function_stack_at(index) for index in range(count)]
    if all(isinstance(mode, DeviceContext) for mode in modes):
        return modes[-1].device
    return _UNKNOWN


@functools.cache
def _getters(device_type: str) -> dict[str, Callable[[], Any]]:
    """Functions that read the state, by the name of the state."""
    return {
        "autocast": functools.partial(torch.is_autocast_enabled, device_type),
        "autocast (cpu)": functools.partial(torch.is_autocast_enabled, "cpu"),
        "autocast dtype": functools.partial(torch.get_autocast_dtype, device_type),
        "autocast dtype (cpu)": functools.partial(torch.get_autocast_dtype, "cpu"),
        "autocast cache": torch.is_autocast_cache_enabled,
        "inference mode": torch.is_inference_mode_enabled,
        "default dtype": torch.get_default_dtype,
        "default device": _default_device,
        _FP8: fp8.surroundings,
        **{n.removeprefix("_get_"): getattr(torch._C, n) for n in _FLAGS if hasattr(torch._C, n)},
        **{
            f"fp32 precision of {' '.join(which)}": functools.partial(
                torch._C._get_fp32_precision_getter, *which
            )
            for which in _PRECISIONS
            if hasattr(torch._C, "_get_fp32_precision_getter")
        },
    }
