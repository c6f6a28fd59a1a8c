"""Stand-in for Transformer Engine 2.20 on the CPU: names, arguments, checks and state dicts.

It has ``fake_transformer_engine`` and the modules that our layers are built of.

``install`` makes it look like an installed library; nothing here is used otherwise.
"""

from __future__ import annotations

import pickle
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import fake_transformer_engine

ALIGNMENT = 16
QUANTIZATION = "transformer_engine.pytorch.quantization"
quantization = sys.modules.get(QUANTIZATION, fake_transformer_engine)
calls: list[str] = []  # what was entered, left and padded


class autocast(quantization.autocast):
    def __enter__(self):
        calls.append("enter")
        return super().__enter__()

    def __exit__(self, *exception):
        calls.append("exit")
        return super().__exit__(*exception)


class Base(nn.Module):
    fuse_wgrad_accumulation = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta, self.quantizers, self._fp8_workspaces = {"fp8_checkpoint": False}, [], {}
        self.fp8 = False

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fp8 = quantization.FP8GlobalStateManager.is_fp8_enabled()
        self.fp8_meta["fp8_checkpoint"] = self.fp8
        recipe = quantization.FP8GlobalStateManager.get_fp8_recipe()
        if self.fp8 and self.fp8_meta.get("recipe") != recipe:
            self.fp8_meta |= {"num_gemms": num_gemms, "recipe": recipe}
            for direction, count in (("scaling_fwd", 2), ("scaling_bwd", 1)):
                self.fp8_meta[direction] = quantization.State(count)

    def reset_fp8_meta_tensors(self) -> None:
        for direction in ("scaling_fwd", "scaling_bwd"):
            self.fp8_meta[direction].scale.fill_(1)
            self.fp8_meta[direction].amax_history.zero_()

    def multiply(self, inp: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        manager = quantization.FP8GlobalStateManager
        if not self.fp8 or not len(inp):
            return functional.linear(inp, weight)
        assert not any(size % ALIGNMENT for size in (*inp.shape, *weight.shape))
        skip = None
        if manager.quantization_state.fp8_graph_capturing:
            skip = manager.quantization_state.skip_fp8_weight_update_tensor
        else:
            manager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
        return quantization._Linear.apply(inp, weight, self, None, skip)

    def get_extra_state(self) -> torch.Tensor:
        if not self.fp8_meta["fp8_checkpoint"] or self.fp8_meta["recipe"].kind != "delayed":
            return torch.empty(0, dtype=torch.uint8)
        state = {"scale_fwd": self.fp8_meta["scaling_fwd"].scale}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state.numel():
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")

    def add_weight(self, name, shape, params_dtype, device, init_method) -> None:
        assert isinstance(device, str)
        weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        self.register_parameter(name, weight)
        if device != "meta":
            init_method(weight)


class Linear(Base):
    def __init__(self, in_features, out_features, *, bias, params_dtype, device, init_method):
        super().__init__()
        assert not bias
        self.in_features, self.out_features = in_features, out_features
        self.add_weight("weight", (out_features, in_features), params_dtype, device, init_method)

    def forward(self, inp, is_first_microbatch=None):
        self.init_fp8_metadata()
        return self.multiply(inp.flatten(0, -2), self.weight).unflatten(0, inp.shape[:-1])


class GroupedLinear(Base):
    """Linear layers of experts, which have one common scale."""

    def __init__(
        self, num_gemms, in_features, out_features, *, bias, params_dtype, device, init_method
    ):
        super().__init__()
        assert not bias
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        for index in range(num_gemms):
            shape = (out_features, in_features)
            self.add_weight(f"weight{index}", shape, params_dtype, device, init_method)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        assert all(type(split) is int for split in m_splits)
        assert sum(m_splits) == len(inp)
        self.init_fp8_metadata(self.num_gemms)
        weights = (getattr(self, f"weight{index}") for index in range(self.num_gemms))
        parts = zip(inp.split(m_splits), weights, strict=True)
        return torch.cat([self.multiply(part, weight) for part, weight in parts])


def padded(splits: list[int]) -> list[int]:
    return [-(-split // ALIGNMENT) * ALIGNMENT for split in splits]


class Fp8Padding(nn.Module):
    def __init__(self, num_gemms: int) -> None:
        super().__init__()

    def forward(self, inp, m_splits):
        calls.append("pad")
        parts = zip(inp.split(m_splits), padded(m_splits), strict=True)
        rows = [functional.pad(part, (0, 0, 0, size - len(part))) for part, size in parts]
        return torch.cat(rows), padded(m_splits)


class Fp8Unpadding(nn.Module):
    def __init__(self, num_gemms: int) -> None:
        super().__init__()

    def forward(self, inp, m_splits):
        parts = zip(inp.split(padded(m_splits)), m_splits, strict=True)
        return torch.cat([part[:size] for part, size in parts])


def install(monkeypatch):
    """Puts it where ``import transformer_engine.pytorch`` looks; returns that."""
    fake = fake_transformer_engine.install(monkeypatch)
    recipes = {"DelayedScaling": "delayed", "Float8CurrentScaling": "current",
               "Float8BlockScaling": "block"}  # fmt: skip
    made = {}
    for name in ("", ".common", ".common.recipe", ".pytorch"):
        made[name] = module = types.ModuleType(f"transformer_engine{name}")
        module.__path__, module.__spec__ = [], ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, kind in recipes.items():
        setattr(made[".common.recipe"], name, lambda kind=kind: fake.Recipe(kind))
    engine = made[".pytorch"]
    engine.__file__ = "/nowhere/site-packages/transformer_engine/pytorch/__init__.py"
    exec(compile(Path(__file__).read_text(), engine.__file__, "exec"), engine.__dict__)
    return engine
