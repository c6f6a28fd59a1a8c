"""A stand-in for Transformer Engine on the CPU: names, arguments and state as in 2.20, numbers by
torch. Its FP8 rounds to a few bits, with scales that are delayed as TE's are."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

ALIGNMENT = 16
STATE = SimpleNamespace(recipe=None, live=[], calls=[])


@dataclass
class DelayedScaling:
    amax_history_len: int = 4


@dataclass
class Float8CurrentScaling:
    pass


@dataclass
class Float8BlockScaling:
    pass


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return STATE.recipe is not None

    @classmethod
    def get_fp8_recipe(cls):
        return STATE.recipe

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False


class autocast:
    def __init__(self, enabled=True, calibrating=False, recipe=None):
        self.recipe = recipe if enabled else None

    def __enter__(self):
        self.before, STATE.recipe = STATE.recipe, self.recipe
        STATE.calls.append("enter")

    def __exit__(self, *_):
        STATE.recipe = self.before
        STATE.calls.append("exit")
        if torch.is_grad_enabled():
            for scaling in STATE.live:
                scaling.update()


class Scaling:
    """One direction of one module: the newest largest values, and the scale of those before."""

    def __init__(self, count: int, length: int) -> None:
        self.scale, self.amax_history = torch.ones(count), torch.zeros(length, count)
        STATE.live.append(self)

    def update(self) -> None:
        amax = self.amax_history.amax(0)
        self.scale.copy_(torch.where(amax > 0, 8 / amax, self.scale))
        self.amax_history.copy_(self.amax_history.roll(1, 0))
        self.amax_history[0].zero_()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}
        self.fp8 = False

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fp8, recipe = STATE.recipe is not None, STATE.recipe
        self.fp8_meta["fp8_checkpoint"] = self.fp8
        if not self.fp8:
            return
        self.fp8_meta |= {"num_gemms": num_gemms, "recipe": recipe}
        for direction in ("scaling_fwd", "scaling_bwd"):
            if not isinstance(recipe, DelayedScaling):
                self.fp8_meta[direction] = object()
            elif not isinstance(self.fp8_meta.get(direction), Scaling):
                self.fp8_meta[direction] = Scaling(num_gemms * 2, recipe.amax_history_len)

    def reset_fp8_meta_tensors(self) -> None:
        for direction in ("scaling_fwd", "scaling_bwd"):
            self.fp8_meta[direction].scale.fill_(1)
            self.fp8_meta[direction].amax_history.zero_()

    def quantised(self, value: torch.Tensor, index: int) -> torch.Tensor:
        if not self.fp8:
            return value
        assert not value.numel() or value.shape[-1] % ALIGNMENT == 0, value.shape
        scaling, scale = self.fp8_meta["scaling_fwd"], 1.0
        if isinstance(scaling, Scaling) and value.numel():
            scale = scaling.scale[index].clone()
            history = scaling.amax_history[0, index]
            history.copy_(torch.maximum(history, value.detach().abs().amax()))
        steps = 64 * scale
        return value + ((value * steps).round() / steps - value).detach()

    def get_extra_state(self) -> torch.Tensor:
        if not (self.fp8_meta["fp8_checkpoint"] or self.fp8):
            return torch.empty(0, dtype=torch.uint8)
        if not isinstance(self.fp8_meta["recipe"], DelayedScaling):
            return torch.empty(0, dtype=torch.uint8)
        state = {"scale_fwd": self.fp8_meta["scaling_fwd"].scale}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state.numel():
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")

    def add_weight(self, name, shape, params_dtype, device, init_method) -> None:
        weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        self.register_parameter(name, weight)
        if device != "meta":
            init_method(weight)


class Linear(Base):
    def __init__(self, in_features, out_features, *, bias, params_dtype, device, init_method):
        super().__init__()
        assert not bias
        assert isinstance(device, str)
        self.in_features, self.out_features = in_features, out_features
        self.add_weight("weight", (out_features, in_features), params_dtype, device, init_method)

    def forward(self, inp):
        self.init_fp8_metadata()
        return functional.linear(self.quantised(inp, 0), self.quantised(self.weight, 1))


class GroupedLinear(Base):
    def __init__(
        self, num_gemms, in_features, out_features, *, bias, params_dtype, device, init_method
    ):
        super().__init__()
        assert not bias
        assert isinstance(device, str)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        for index in range(num_gemms):
            shape = (out_features, in_features)
            self.add_weight(f"weight{index}", shape, params_dtype, device, init_method)

    def forward(self, inp, m_splits):
        assert all(type(split) is int for split in m_splits)
        assert sum(m_splits) == len(inp)
        self.init_fp8_metadata(self.num_gemms)
        assert not self.fp8 or not any(split % ALIGNMENT for split in m_splits)
        parts = []
        for index, part in enumerate(inp.split(m_splits)):
            weight = self.quantised(getattr(self, f"weight{index}"), 2 * index + 1)
            parts.append(functional.linear(self.quantised(part, 2 * index), weight))
        return torch.cat(parts)


def padded(splits: list[int]) -> list[int]:
    return [-(-split // ALIGNMENT) * ALIGNMENT for split in splits]


class Fp8Padding(nn.Module):
    def __init__(self, num_gemms: int) -> None:
        super().__init__()

    def forward(self, inp, m_splits):
        parts = zip(inp.split(m_splits), padded(m_splits), strict=True)
        rows = [functional.pad(part, (0, 0, 0, size - len(part))) for part, size in parts]
        STATE.calls.append("pad")
        return torch.cat(rows), padded(m_splits)


class Fp8Unpadding(nn.Module):
    def __init__(self, num_gemms: int) -> None:
        super().__init__()

    def forward(self, inp, m_splits):
        parts = zip(inp.split(padded(m_splits)), m_splits, strict=True)
        return torch.cat([part[:size] for part, size in parts])


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Puts it where ``import transformer_engine.pytorch`` looks. Returns its state."""
    STATE.recipe, STATE.live, STATE.calls = None, [], []
    modules = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {
            each.__name__: each
            for each in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)
        },
        "transformer_engine.pytorch": {
            each.__name__: each
            for each in (Linear, GroupedLinear, Fp8Padding, Fp8Unpadding, autocast)
        },
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": FP8GlobalStateManager},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return STATE
