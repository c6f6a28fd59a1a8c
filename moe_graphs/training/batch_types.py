"""Batches of transformers' tokenizers and processors, as pytrees whose tensors torch sees."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils import _pytree as pytree

# Types of dictionaries with attributes. A module that is not imported has made no batch.
_CLASSES = (
    ("transformers.tokenization_utils_base", "BatchEncoding"),
    ("transformers.feature_extraction_utils", "BatchFeature"),
)


def know_batches() -> None:
    """Register the batches' classes as pytrees, so that torch sees their tensors.

    A batch that is built from a pytree has the same class. It lacks the tokenizer's
    ``encodings()``, which are on the host and differ from batch to batch.
    """
    for module, name in _CLASSES:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and kind not in pytree.SUPPORTED_NODES:
            _register(kind)


def _register(kind: type[Any]) -> None:
    def flatten(batch: Any) -> tuple[list[Any], list[str]]:
        return list(batch.data.values()), list(batch.data)

    def flatten_with_keys(batch: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:
        named: list[tuple[pytree.KeyEntry, Any]] = [
            (pytree.MappingKey(key), value) for key, value in batch.data.items()
        ]
        return named, list(batch.data)

    def unflatten(values: Any, keys: Any) -> Any:
        return kind(dict(zip(keys, values, strict=True)))

    pytree.register_pytree_node(
        kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{kind.__module__}.{kind.__name__}",
    )  # fmt: skip
