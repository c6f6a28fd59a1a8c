"""Stand-in for ``transformer_engine.pytorch.quantization`` on machines without a GPU.

It has the global state that the engine knows, and a module that casts with delayed, current or no
scaling. Like the library's, its kernels write past the dispatcher, its backward can run only once,
and its Python updates scales. ``install`` makes it look like an installed library.
"""

import functools
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

HISTORY, LARGEST = 3, 7.0


@dataclass(slots=True)
class GlobalState:
    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: object = None
    fp8_distributed_group: object = None
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    global_amax_history_buffer: dict = field(default_factory=dict)
    global_scale_buffer: dict = field(default_factory=dict)
    skip_fp8_weight_update_tensor: object = None


_OF_AUTOCAST = ("fp8_enabled", "fp8_calibration", "fp8_recipe", "fp8_distributed_group",
                "is_first_fp8_module", "fp8_graph_capturing")  # fmt: skip


class FP8GlobalStateManager:
    quantization_state = GlobalState()

    @classmethod
    def is_fp8_enabled(cls):
        return cls.quantization_state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls):
        return cls.quantization_state.fp8_calibration

    @classmethod
    def get_fp8_recipe(cls):
        return cls.quantization_state.fp8_recipe

    @classmethod
    def get_fp8_group(cls):
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def is_first_fp8_module(cls):
        state = cls.quantization_state
        was, state.is_first_fp8_module = state.is_first_fp8_module, False
        return was

    @classmethod
    def get_autocast_state(cls):
        return tuple(getattr(cls.quantization_state, name) for name in _OF_AUTOCAST)

    @classmethod
    def set_autocast_state(cls, values):
        for name, value in zip(_OF_AUTOCAST, values, strict=True):
            setattr(cls.quantization_state, name, value)

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta):
        if meta["recipe"].kind != "delayed" or "registered" in meta:
            return
        meta["registered"] = True
        state = cls.quantization_state
        for key, name in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            state.global_scale_buffer.setdefault(f"{key}_recipe", []).append(meta[name].scale)
            histories = state.global_amax_history_buffer.setdefault(f"{key}_recipe", [])
            histories.append(meta[name].amax_history)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward=True):
        state, key = cls.quantization_state, "forward_recipe" if forward else "backward_recipe"
        scales = state.global_scale_buffer.get(key, [])
        histories = state.global_amax_history_buffer.get(key, [])
        for scale, history in zip(scales, histories, strict=True):
            update(scale, history)

    @classmethod
    def autocast_enter(cls, enabled, recipe):
        state = cls.quantization_state
        state.fp8_enabled, state.fp8_recipe, state.fp8_graph_capturing = enabled, recipe, False
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1

    @classmethod
    def autocast_exit(cls, enabled):
        state = cls.quantization_state
        state.autocast_depth -= 1
        if enabled and state.autocast_depth == 0 and torch.is_grad_enabled():
            cls.reduce_and_update_fp8_tensors(forward=True)


class autocast:
    def __init__(self, enabled=True, recipe=None):
        self._enabled, self._recipe = enabled, recipe

    def __enter__(self):
        self._before = FP8GlobalStateManager.get_autocast_state()
        FP8GlobalStateManager.autocast_enter(self._enabled, self._recipe)

    def __exit__(self, *exception):
        FP8GlobalStateManager.set_autocast_state(self._before)
        FP8GlobalStateManager.autocast_exit(self._enabled)


@dataclass
class Recipe:
    kind: str


class State:
    def __init__(self, count):
        self.scale, self.amax_history = torch.ones(count), torch.zeros(HISTORY, count)


class Quantizer:
    """Counts its calls: bookkeeping that a graph has nothing to do with."""

    calls = 0


def _cast_rows(x, scale, amax, number, delayed):
    largest = x.abs().max()
    if delayed:
        amax[0, number] = torch.maximum(amax[0, number], largest)
        factor = scale[number]
    else:
        factor = LARGEST / largest
    return (x * factor).round().clamp(-LARGEST, LARGEST) / factor


@torch.library.custom_op("fake_te::cast", mutates_args=())
def cast(
    x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, number: int, delayed: bool
) -> torch.Tensor:
    return _cast_rows(x, scale, amax, number, delayed)


@torch.library.custom_op("fake_te::cast_into", mutates_args=())
def cast_into(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    delayed: bool,
    kept: torch.Tensor,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    if skip is None or not skip.item():
        kept.copy_(_cast_rows(x, scale, amax, 1, delayed))
    return torch.empty(0)


@torch.library.custom_op("fake_te::update", mutates_args=())
def update(scale: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    largest = history.max(0).values
    scale.copy_(torch.where(largest > 0, LARGEST / largest, scale))
    history.copy_(history.roll(-1, 0))
    history[0].zero_()
    return torch.empty(0)


class Float8Tensor(torch.Tensor):
    """A cast that is kept."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module, is_first_microbatch, skip):
        forward = module.fp8_meta["scaling_fwd"]
        delayed = module.fp8_meta["recipe"].kind == "delayed"
        given = forward.scale, forward.amax_history
        cast_x = cast(x, *given, 0, delayed)
        if is_first_microbatch is None:
            cast_weight = cast(weight, *given, 1, delayed)
        else:
            kept = module._fp8_workspaces.get("weight")
            if kept is None:
                made = cast(weight, *given, 1, delayed).as_subclass(Float8Tensor)
                made._data = made.as_subclass(torch.Tensor)
                module._fp8_workspaces["weight"] = kept = made
            elif is_first_microbatch or skip is not None:
                cast_into(weight, *given, delayed, kept._data, skip)
            cast_weight = kept._data
        for each in module.quantizers:
            each.calls += 1
        ctx.objects = cast_x, cast_weight.clone(), module.fp8_meta["scaling_bwd"], delayed
        ctx.is_first = FP8GlobalStateManager.is_first_fp8_module()
        return cast_x @ cast_weight.T

    @staticmethod
    def backward(ctx, gradient):
        cast_x, cast_weight, backward, delayed = ctx.objects
        ctx.objects = None
        cast_gradient = cast(gradient, backward.scale, backward.amax_history, 0, delayed)
        result = cast_gradient @ cast_weight, cast_gradient.T @ cast_x, None, None, None
        if ctx.is_first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return result


class Linear(nn.Module):
    fuse_wgrad_accumulation = False

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, rows) / rows**0.5)
        self.fp8_meta, self.quantizers, self._fp8_workspaces = {}, [Quantizer()], {}

    def forward(self, x, is_first_microbatch=None):
        manager = FP8GlobalStateManager
        if not manager.is_fp8_enabled():
            return nn.functional.linear(x, self.weight)
        if self.fp8_meta.get("recipe") != manager.get_fp8_recipe():
            recipe = manager.get_fp8_recipe()
            self.fp8_meta = {"recipe": recipe, "scaling_fwd": State(2), "scaling_bwd": State(1)}
        skip = None
        if manager.quantization_state.fp8_graph_capturing:
            skip = manager.quantization_state.skip_fp8_weight_update_tensor
        else:
            manager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
        if skip is not None:
            is_first_microbatch = False
        return _Linear.apply(x, self.weight, self, is_first_microbatch, skip)


def install(monkeypatch):
    """Puts it into ``sys.modules``; returns it, with a fresh state."""
    module = _installed()
    module.FP8GlobalStateManager.quantization_state = module.GlobalState()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@functools.cache  # operators that are defined twice are gone when the first ones are collected
def _installed():
    module = types.ModuleType("transformer_engine.pytorch.quantization")
    module.__file__ = "/nowhere/site-packages/transformer_engine/pytorch/quantization.py"
    exec(compile(Path(__file__).read_text(), module.__file__, "exec"), module.__dict__)
    return module
