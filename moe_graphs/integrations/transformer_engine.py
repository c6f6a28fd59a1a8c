"""Parts of our model on Transformer Engine's kernels, in bf16, fp32 or FP8.

``MoEConfig(experts="transformer_engine")`` and ``TransformerConfig(linear="transformer_engine")``
build them. They compute in FP8 where ``fp8_autocast`` (TE's own ``autocast``) stands around the
step: forward, backward and ``graphs.step()``. TE's products of fp32 tensors are in TF32.

Shapes: D model, F ffn, e experts of this rank, R rows, P rows of which each expert's are padded.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_graphs.engine import fp8
from moe_graphs.kernels import swiglu
from moe_graphs.layers.expert_backends import ExpertsBackend, left_as_it_is
from moe_graphs.registry import FP8_RECIPES

_DIRECTIONS = ("scaling_fwd", "scaling_bwd")
_REMEMBERED = ("scale", "amax_history")
_EXTRA_STATE = "_extra_state"
_FP8_MULTIPLE = 16  # of every side of a product, forward or backward


def import_transformer_engine() -> ModuleType:
    """``transformer_engine.pytorch``, imported when it is asked for.

    Raises:
        ImportError: it is not installed, or its libraries cannot be loaded here.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise ImportError(
            f'Transformer Engine cannot be imported here: pip install "moe_graphs[te]", on a '
            f"machine with CUDA ({type(error).__name__}: {error})"
        ) from error


class TEExperts(ExpertsBackend):
    """The SwiGLU experts of one rank as two ``GroupedLinear``: a weight ``[out, in]`` per expert.

    TE wants the experts' numbers of rows on the host, so each forward reads them from the device,
    once. In FP8 each expert's rows are padded with zeros to what the recipe needs.

    Attributes:
        w1: weights ``[2F, D]``, gate above up.
        w2: weights ``[D, F]``.
    """

    host_sync = "the experts of Transformer Engine take their numbers of rows from the host"

    def make_weights(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        num_local_experts = len(self.local_experts)
        engine = import_transformer_engine()
        options = {**_options(device, dtype), "init_method": left_as_it_is}
        self.w1 = engine.GroupedLinear(
            num_local_experts, hidden_size, 2 * ffn_hidden_size, **options
        )
        self.w2 = engine.GroupedLinear(num_local_experts, ffn_hidden_size, hidden_size, **options)
        self.padding = engine.Fp8Padding(num_local_experts)
        self.unpadding = engine.Fp8Unpadding(num_local_experts)
        for module in (self.w1, self.w2):
            _without_empty_state(module)

    def run_rows(self, rows_RD: Tensor, offsets_e: Tensor) -> Tensor:
        if not len(rows_RD):
            return self._no_rows(rows_RD)
        ends = offsets_e.tolist()
        counts = [end - start for start, end in zip((0, *ends), ends, strict=False)]
        if not fp8.is_enabled():
            return self.w2(swiglu(self.w1(rows_RD, counts)), counts)
        rows_PD, padded = self.padding(rows_RD, counts)
        return self.unpadding(self.w2(swiglu(self.w1(rows_PD, padded)), padded), counts)

    def stacked_weights(self) -> tuple[Tensor, Tensor]:
        w1_eD2F, w2_eFD = (
            torch.stack([weight.detach().T for weight in _weights(module)])
            for module in (self.w1, self.w2)
        )
        return w1_eD2F, w2_eFD

    @torch.no_grad()
    def load_stacked_weights(self, w1_eD2F: Tensor, w2_eFD: Tensor) -> None:
        for module, stacked_eXY in ((self.w1, w1_eD2F), (self.w2, w2_eFD)):
            for weight, ours_XY in zip(_weights(module), stacked_eXY, strict=True):
                weight.copy_(ours_XY.T)

    def _no_rows(self, rows_0D: Tensor) -> Tensor:
        """Nothing to multiply, but every weight has a gradient: zeros."""
        gate_up_0F = torch.cat([functional.linear(rows_0D, w) for w in _weights(self.w1)])
        return torch.cat([functional.linear(swiglu(gate_up_0F), w) for w in _weights(self.w2)])


def te_linear(
    in_features: int,
    out_features: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """TE's ``Linear`` in the place of torch's without bias.

    It has the same parameter, with the same values from the same seed.

    Its state_dict is torch's, too, as long as TE has nothing to save there: only delayed scaling
    has. Loading one without that state leaves what the module has, as TE does.
    """
    engine = import_transformer_engine()
    options = {**_options(device, dtype), "init_method": _as_torch_draws}
    return _without_empty_state(engine.Linear(in_features, out_features, **options))


def fp8_recipe(name: str) -> Any:
    """TE's recipe with its defaults, by its name in ``FP8_RECIPES`` or its place.

    Raises:
        ValueError: there is no such recipe; the message says which there are.
        ImportError: Transformer Engine is not installed.
    """
    FP8_RECIPES.check(name)
    import_transformer_engine()
    return FP8_RECIPES[name]()


def fp8_autocast(recipe: Any) -> contextlib.AbstractContextManager[Any]:
    """TE's context in which its modules compute in FP8.

    Every step wants a new one around all of it. Make the recipe once: TE tells recipes apart.
    """
    engine = import_transformer_engine()
    if hasattr(engine, "autocast"):
        return engine.autocast(enabled=True, recipe=recipe)
    return engine.fp8_autocast(enabled=True, fp8_recipe=recipe)  # an older one


def check_fp8_sizes(model: nn.Module, rows: int) -> None:
    """Raises ``ValueError`` where FP8 products are not possible.

    Args:
        rows: tokens of one call of the model.
    """
    for name, module in _te_modules(model):
        shape = [module.out_features, module.in_features]
        if any(size % _FP8_MULTIPLE for size in shape):
            raise ValueError(
                f"fp8: the weights of {name} are {shape}: FP8 needs multiples of {_FP8_MULTIPLE}"
            )
        is_padded = hasattr(module, "num_gemms")  # of experts
        if rows % _FP8_MULTIPLE and not is_padded:
            raise ValueError(
                f"fp8: {rows} tokens in a microbatch: FP8 needs a multiple of {_FP8_MULTIPLE}: "
                f"change the batch size or the sequence length"
            )


@torch.no_grad()
def back_to_fp8(
    model: nn.Module, autocast: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    """Makes modules that ran outside of the autocast since, as in an evaluation, what they were.

    TE notes that in attributes, and graphs would find other ones.
    """
    with autocast():
        for _, module in _te_modules(model):
            if "num_gemms" in module.fp8_meta:  # it has been in FP8
                module.init_fp8_metadata(num_gemms=module.fp8_meta["num_gemms"])


def fp8_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The memory of delayed scaling, by module: scales and histories of the largest values.

    On the CPU, as plain tensors: TE's own ``_extra_state`` is a pickle, which it does not load
    unless an environment variable allows it, and is empty after an evaluation in bf16. Other
    recipes remember nothing.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, module in _te_modules(model):
        meta = module.fp8_meta
        if _is_delayed(meta):
            tensors = {
                f"{direction}.{each}": getattr(meta[direction], each).detach().to("cpu", copy=True)
                for direction in _DIRECTIONS
                for each in _REMEMBERED
            }
            found[name] = {"num_gemms": meta["num_gemms"], **tensors}
    return found


@torch.no_grad()  # so that leaving the context updates no scale
def load_fp8_state(
    model: nn.Module,
    state: Mapping[str, Mapping[str, Any]],
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    """Puts back what ``fp8_state`` returned; what it did not know of begins anew.

    Args:
        autocast: makes the context that the steps run in. Under a recipe that remembers nothing,
            nothing is put back.
    """
    with autocast():
        for name, module in _te_modules(model):
            meta = module.fp8_meta
            if name in state:
                module.init_fp8_metadata(num_gemms=state[name]["num_gemms"])
            if not _is_delayed(meta):
                continue
            if name not in state:
                module.reset_fp8_meta_tensors()
                continue
            for direction in _DIRECTIONS:
                for each in _REMEMBERED:
                    getattr(meta[direction], each).copy_(state[name][f"{direction}.{each}"])


def _te_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, each) for name, each in model.named_modules() if hasattr(each, "fp8_meta"))


def _is_delayed(meta: Mapping[str, Any]) -> bool:
    return hasattr(meta.get(_DIRECTIONS[0]), "amax_history")


def _weights(grouped: Any) -> list[Tensor]:
    return [getattr(grouped, f"weight{index}") for index in range(grouped.num_gemms)]


def _options(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    # A string: TE compares it with "meta".
    where = str(torch.get_default_device() if device is None else device)
    return {"bias": False, "params_dtype": dtype, "device": where}


def _as_torch_draws(weight: Tensor) -> None:
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def _without_empty_state(module: nn.Module) -> nn.Module:
    """TE's module without an entry in the state_dict that says nothing.

    Torch's modules can then load it, and it can load theirs.
    """
    module.register_state_dict_post_hook(_drop_empty_state)
    module.register_load_state_dict_pre_hook(_add_empty_state)
    return module


def _drop_empty_state(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    value = state.get(prefix + _EXTRA_STATE)
    if value is not None and not value.numel():
        del state[prefix + _EXTRA_STATE]


def _add_empty_state(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    state.setdefault(prefix + _EXTRA_STATE, torch.empty(0, dtype=torch.uint8))
