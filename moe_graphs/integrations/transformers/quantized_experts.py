"""Frozen experts of a transformers model in few bits, for LoRA beside them or elsewhere.

Source of the formats: bitsandbytes (NF4), transformers (``Mxfp4GptOssExperts``, ``FP8Experts``).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_graphs.engine.guards.introspection import is_intercepted
from moe_graphs.integrations.peft import innermost
from moe_graphs.integrations.transformers.adapted_experts import multiplying_rows, outermost
from moe_graphs.integrations.transformers.changes import (
    Changes,
    change_class,
    derived,
    makers_of,
)
from moe_graphs.integrations.transformers.experts_interface import experts_forward, why_no_lora
from moe_graphs.integrations.transformers.packing import (
    WEIGHTS,
    Packing,
    packing_of,
    placeholders,
)
from moe_graphs.integrations.transformers.swapped_block import SwappedExperts
from moe_graphs.kernels.packed_weights import FORMATS, PackedFormat, Scratch, Stored, format_named
from moe_graphs.report_tables import format_bytes

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class QuantizedExperts:
    """A record of what ``quantize_experts`` did; ``print`` it.

    Attributes:
        format: the name of the format.
        layers: the number of experts modules.
        bytes_before, bytes_after: those of their weights.
        scratch_bytes: memory that all layers share, made in the first forward on a device.
    """

    format: str
    layers: int
    bytes_before: int
    bytes_after: int
    scratch_bytes: int

    def __str__(self) -> str:
        sizes = self.bytes_before, self.bytes_after, self.scratch_bytes
        before, after, scratch = map(format_bytes, sizes)
        return (
            f"experts of {self.layers} layers in {self.format}: {before} before, {after} now; all "
            f"layers dequantise into one scratch of {scratch}"
        )


def quantize_experts(
    model: nn.Module, format: str = "nf4", *, device: torch.device | str | None = None
) -> QuantizedExperts:
    """Packs the frozen experts of a transformers model into few bits, in place.

    Parameters ``gate_up_proj`` and ``down_proj`` of each experts module make way for packed ones,
    and their memory is free once nobody else holds them. Forward and backward dequantise the
    weights of a part of a layer's experts at a time into one scratch that all layers share; no
    gradient of them is computed. The
    state dictionary has the packed ones: ``load_state_dict`` of a model that was quantised in the
    same way takes it, also with ``assign=True`` if it was quantised on the meta device.

    Call it behind PEFT, whose ``target_parameters`` name the parameters, and before
    ``accelerate_model``. PEFT cannot merge into packed weights.

    Args:
        model: a ``PreTrainedModel``, or PEFT's around it.
        format: ``"nf4"``, ``"nf4_double"``, ``"mxfp4"`` or ``"fp8"``.
        device: where packed weights go, layer by layer, so that a model on the CPU needs no room
            for its experts in bf16 on a GPU. ``model.to(device)`` moves the rest. By default they
            stay where they are.

    Raises:
        ValueError: there is no such format, there are no experts, they require gradients, are
            packed or accelerated already, have sizes that do not divide by the format's block, or
            compute what our kernels do not. Nothing is changed then.
    """
    packer = Packer(model, format, "quantize_experts")
    packer.pack_all(device)
    for wrapper in outermost(model):
        _give_forward(wrapper, multiplying_rows)
    return packer.record()


@contextlib.contextmanager
def adaptable_experts(model: nn.Module) -> Iterator[None]:
    """Context in which PEFT finds packed weights by their names and shapes, to make adapters.

    So a model that was packed while its files were read gets adapters on its experts as well::

        with adaptable_experts(model):
            model = get_peft_model(model, LoraConfig(target_parameters=[...]))

    It is for ``PeftModel.from_pretrained`` and ``load_adapter``, too. Parameters without memory
    stand there meanwhile; initialisations of LoRA that read weights are not for packed ones.

    Args:
        model: what PEFT is applied to, or PEFT's around it.

    Raises:
        ValueError: the model has no packed experts.
    """
    packed = [module for module in model.modules() if packing_of(module) is not None]
    if not packed:
        raise ValueError(f"adaptable_experts: {type(model).__name__} has no packed experts")
    before = [(module, dict(module._parameters)) for module in packed]
    for module in packed:
        found = placeholders(module, next(iter(module.parameters())).device)
        for name in found:  # in the order of a whole module, by which PEFT nests its wrappers
            module._parameters.pop(name, None)
        module._parameters.update(found)
    try:
        yield
    finally:
        for module, parameters in before:
            module._parameters.clear()
            module._parameters.update(parameters)
    for wrapper in outermost(model):
        if multiplying_rows not in makers_of(type(wrapper)):
            _give_forward(wrapper, multiplying_rows)


class Packer:
    """Packs the weights of a model's experts one by one; all layers share one scratch.

    Args:
        caller: the name of the public function, for errors.

    Raises:
        ValueError: as ``quantize_experts``. Nothing is changed then.
    """

    def __init__(self, model: nn.Module, format: str, caller: str) -> None:
        self.kind, self.experts = format_named(format), _experts_of(model, caller)
        for name, module in self.experts.items():
            reason = _why_not(module, self.kind)
            if reason is not None:
                raise ValueError(f"{caller}: {name} ({type(module).__name__}): {reason}")
        self._scratch, self._before, self._after = Scratch(), 0, 0
        self._left = {name: [*WEIGHTS] for name in self.experts}

    @property
    def left(self) -> list[str]:
        """Full names of the weights that are not packed yet."""
        return [f"{module}.{name}" for module, names in self._left.items() for name in names]

    def pack_all(self, device: torch.device | str | None = None) -> None:
        """Packs all weights as they are, on ``device`` if one is given."""
        for module, experts in self.experts.items():
            for name in WEIGHTS:
                weight = getattr(experts, name).detach()
                self.pack(module, name, weight if device is None else weight.to(device))

    def pack(self, module: str, name: str, weight: Tensor) -> None:
        """Packs ``weight``, where it is, in place of the parameter of that name.

        The module computes with packed weights once it has no other.
        """
        self.place(
            module, name, self.kind.quantize(_stored(self.experts[module], weight, self.kind))
        )

    def place(self, module: str, name: str, stored: Stored) -> None:
        """Puts what is packed already in place of the parameter of that name."""
        experts = self.experts[module]
        before = experts._parameters.pop(name)
        dtype = before.dtype
        self._before += before.nbytes
        self.kind.check(stored)
        self._scratch.announce(self.kind.shape_of(stored[0]), dtype)
        for end, each in zip(self.kind.suffixes, stored, strict=True):
            # Parameters that are frozen, and no buffers: DDP would send these at every forward.
            experts.register_parameter(name + end, nn.Parameter(each, requires_grad=False))
            self._after += each.nbytes
        self._left[module].remove(name)
        if not self._left[module]:
            transposed = self.kind.along_inputs or not experts.is_transposed
            experts.packing = Packing(self.kind.name, dtype, transposed, self._scratch)
            _give_forward(experts, packed_forward)

    def record(self) -> QuantizedExperts:
        """The record of what was packed."""
        count, scratch = len(self.experts), self._scratch.nbytes
        return QuantizedExperts(self.kind.name, count, self._before, self._after, scratch)


def _experts_of(model: nn.Module, caller: str) -> dict[str, Any]:
    found = {n: m for n, m in model.named_modules() if hasattr(type(m), "_apply_gate")}
    if any(isinstance(module, SwappedExperts) for module in model.modules()):
        raise ValueError(
            f"{caller}: the model is accelerated already: call it before accelerate_model"
        )
    if not found:
        raise ValueError(
            f"{caller}: {type(model).__name__} has no experts of transformers' interface"
        )
    return found


def _why_not(experts: Any, kind: PackedFormat) -> str | None:
    """The reason why the weights of a module cannot be packed, or None."""
    if packing_of(experts) is not None:
        return "its weights are in few bits already"
    if {*WEIGHTS} - {name for name, _ in experts.named_parameters(recurse=False)}:
        return f"it has no parameters {' and '.join(WEIGHTS)}"
    for name in WEIGHTS:
        weight = getattr(experts, name)
        if type(weight) is not nn.Parameter or weight.dtype not in _FLOATS:
            return f"{name} is a {type(weight).__name__} of {weight.dtype}"
        if weight.requires_grad:
            return (
                f"{name} requires gradients, and packed weights are frozen: apply PEFT before, or "
                f"model.requires_grad_(False)"
            )
        try:
            kind.packed_shapes(_stored(experts, weight, kind).shape)
        except ValueError as error:
            return f"{name}: {error}"
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    if is_intercepted(experts):
        return "ours would not run the hooks or the forward set on it"
    return why_no_lora(experts)


def _stored(experts: Any, weight: Tensor, kind: PackedFormat) -> Tensor:
    """The weight in the layout that the format packs."""
    is_turned = kind.along_inputs and experts.is_transposed
    return weight.detach().transpose(1, 2) if is_turned else weight.detach()


def _give_forward(module: Any, maker: Callable[[type[Any]], Any]) -> None:
    kind: Any = type(module)
    change_class([module], derived(kind, maker))


def packed_forward(kind: type[Any]) -> dict[str, Callable[..., Any]]:
    """The forward of packed experts of a class, whatever implementation its model has chosen.

    Whoever looks for a weight learns where it is.
    """

    @functools.wraps(kind.forward)
    def forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    def attribute(self: Any, name: str) -> Any:
        try:
            return kind.__getattr__(self, name)
        except AttributeError:
            if name not in WEIGHTS:
                raise
            raise AttributeError(
                f"{name} of {kind.__name__} is in few bits, and PEFT cannot merge into it: save "
                f"the adapters, load them beside experts in bf16, and merge there"
            ) from None

    return {"forward": forward, "__getattr__": attribute}


def check_adapters_of_packed(model: Any) -> None:
    """Checks that PEFT has found the parameters of packed experts that it was to adapt.

    Raises:
        ValueError: it was applied behind ``quantize_experts``, and has adapted none of them.
    """
    configs = getattr(model, "peft_config", None) or {}
    targets = {each for one in configs.values() for each in one.target_parameters or ()}
    named = sorted(each for each in targets if each.endswith(WEIGHTS))
    adapted = {id(innermost(wrapper)) for wrapper in outermost(model)}
    packed = [m for m in model.modules() if packing_of(m) is not None]
    if named and any(id(each) not in adapted for each in packed):
        raise ValueError(
            f"PEFT was to adapt {', '.join(named)}, and has found no such parameters, because the "
            f"experts were in few bits already: apply PEFT before quantize_experts, or within "
            f"adaptable_experts(model)"
        )


# ---- experts that transformers has quantised


def adopt_quantized(model: Any, done: Changes) -> None:
    """Lets our products read the weights of transformers' quantised experts. ``done`` notes it."""
    kinds = Counter(type(m).__name__ for m in model.modules() if _is_swizzled_mxfp4(m))
    for what, count in kinds.items():
        note = (
            "its weights lie as triton_kernels swizzles them: load with "
            "config.quantization_config = ExpertsInFewBits('mxfp4').to_dict()"
        )
        done.left("experts", what, count, note)
    found = [module for module in model.modules() if _is_fp8(module)]
    reasons = list(map(_why_own_fp8, found))
    served = [module for module, why in zip(found, reasons, strict=True) if why is None]
    for why, count in Counter(filter(None, reasons)).items():
        done.left("experts", "FP8Experts", count, why)
    if not served:
        return
    scratch, dtype = Scratch(), model.get_input_embeddings().weight.dtype
    before = [(module, type(module)) for module in served]
    for module in served:
        for name in WEIGHTS:
            scratch.announce(getattr(module, name).shape, dtype)
        module.packing = Packing("fp8", dtype, True, scratch)
        _give_forward(module, packed_forward)
    note = f"grouped GEMMs of weights dequantised to {dtype}; rows are not rounded to FP8"
    done.changed("experts", "FP8Experts", len(served), note, functools.partial(_give_up, before))


def _give_up(before: list[tuple[Any, type[nn.Module]]]) -> None:
    for module, kind in before:
        del module.packing
        module.__class__ = kind


def _is_swizzled_mxfp4(module: nn.Module) -> bool:
    return type(module).__name__ == "Mxfp4GptOssExperts"


def _is_fp8(module: nn.Module) -> bool:
    is_fp8 = type(module).__name__ == "FP8Experts"
    return is_fp8 and type(module).__module__.startswith("transformers.")


def _why_own_fp8(experts: Any) -> str | None:
    """The reason why transformers' own forward stays, or None."""
    if not getattr(experts, "has_gate", False):
        return "they have no gate"
    for name in WEIGHTS:
        weight, scales = getattr(experts, name), getattr(experts, f"{name}_scale_inv", None)
        if not isinstance(scales, Tensor):
            return f"{name} has no scale_inv"
        try:
            FORMATS["fp8"].check((weight, scales))
        except ValueError as error:
            return str(error)
        if weight.requires_grad or scales.requires_grad:
            return "they require gradients: freeze them"
    return why_no_lora(experts)
