"""Loading of a model whose experts are packed into few bits while the files are read.

It is a quantizer of transformers, found by its registry, so ``from_pretrained`` reads, joins and
places weights as ever. One weight of one layer is there in full at a time.

Source: transformers' quantizers (``HfQuantizer``, ``ConversionOps``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_graphs.integrations.transformers import packed_files
from moe_graphs.integrations.transformers.packing import WEIGHTS
from moe_graphs.integrations.transformers.quantized_experts import Packer, QuantizedExperts
from moe_graphs.kernels.packed_weights import format_named

_METHOD = "moe_graphs"


@register_quantization_config(_METHOD)
class ExpertsInFewBits(QuantizationConfigMixin):  # type: ignore[misc]
    """``quantization_config`` of ``from_pretrained`` that packs experts while they are loaded.

    Experts are frozen, as under ``quantize_experts``. ``model.hf_quantizer.packed`` is the record
    of what was packed. PEFT comes behind it, for experts within ``adaptable_experts``. Adapters can
    be saved, the model cannot: the directory that it came from is its checkpoint.

    gpt-oss's files have MXFP4 already, those that bitsandbytes has packed NF4, and DeepSeek-V3's
    FP8: ``config.quantization_config = ExpertsInFewBits("mxfp4").to_dict()``, and
    ``from_pretrained(..., config=config)`` takes their codes as they are. Weights of NF4 and FP8
    files that are no experts' are dequantised.

    Args:
        format: ``"nf4"``, ``"nf4_double"``, ``"mxfp4"`` or ``"fp8"``.

    Raises:
        ValueError: there is no such format. ``from_pretrained`` raises it for experts that
            ``quantize_experts`` refuses, for files without their weights, and if ``device_map``
            leaves weights on a disk.
    """

    def __init__(self, format: str = "nf4", quant_method: str = _METHOD) -> None:
        self.quant_method, self.format = quant_method, format_named(format).name


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    requires_calibration = False
    is_trainable = True

    def validate_environment(self, *given: Any, **options: Any) -> None:
        is_fp8 = self.pre_quantized and self.quantization_config.format == "fp8"
        if is_fp8 and not hasattr(HfQuantizer, "get_new_dtype"):
            raise ValueError(
                "ExpertsInFewBits: this transformers casts the codes of files in FP8 to the dtype "
                "of the model before they are read: take a newer one (5.24 does not), or load the "
                "model in bf16 and call quantize_experts"
            )
        places = options.get("device_map")
        if isinstance(places, dict) and "disk" in places.values():
            raise ValueError(
                "ExpertsInFewBits: device_map leaves weights on a disk; packed ones are in memory"
            )

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        for name, parameter in model.named_parameters():
            if name.endswith(WEIGHTS):
                parameter.requires_grad_(False)
        self._packer = Packer(model, self.quantization_config.format, "ExpertsInFewBits")
        if self.pre_quantized and self.quantization_config.format == "mxfp4":
            self._packer.pack_all()  # on the meta device
        for experts in self._packer.experts.values():
            # Otherwise transformers draws weights, because it does not find those of before.
            experts._is_hf_initialized = True
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        module, _, name = param_name.rpartition(".")
        return name in WEIGHTS and module in self._packer.experts

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def update_weight_conversions(self, weight_conversions: Any, *model: Any) -> Any:
        format = self.quantization_config.format
        if not self.pre_quantized:
            return weight_conversions
        if format == "mxfp4":
            names = [f"{name}_blocks" for name in WEIGHTS]
            return [*weight_conversions, *(WeightConverter([n], n, [_Join()]) for n in names)]
        return packed_files.converters(weight_conversions, format, self.place, self)

    def pack(self, full_name: str, weight: Tensor) -> None:
        module, _, name = full_name.rpartition(".")
        self._packer.pack(module, name, weight)

    def place(self, full_name: str, stored: tuple[Tensor, ...]) -> None:
        module, _, name = full_name.rpartition(".")
        self._packer.place(module, name, stored)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        if self._packer.left:
            raise ValueError(f"ExpertsInFewBits: the files have no {self._packer.left[0]}")
        return model

    @property
    def packed(self) -> QuantizedExperts:
        """The record of what was packed."""
        return self._packer.record()


class _Pack(ConversionOps):  # type: ignore[misc]
    """Packs a weight once transformers has read it, and leaves nothing to place."""

    def __init__(self, quantizer: _Quantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str,
        missing_keys: set[str],
        **options: Any,
    ) -> dict[str, Tensor]:
        (given,) = input_dict.values()
        self.quantizer.pack(full_layer_name, given[0] if isinstance(given, list) else given)
        missing_keys.discard(full_layer_name)
        return {}


class _Join(ConversionOps):  # type: ignore[misc]
    """Joins the blocks of a row: ``[E, out, G, 16]`` of gpt-oss's files is ``[E, out, 16 G]``."""

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, **options: Any
    ) -> dict[str, Tensor]:
        (given,) = input_dict.values()
        blocks = given[0] if isinstance(given, list) else given
        return {full_layer_name: blocks.flatten(2)}
