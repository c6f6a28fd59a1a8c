"""Bytes as the tokens of a Hugging Face tokenizer, for models that were trained on bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))


def _characters() -> dict[int, str]:
    """The characters that stand for bytes in GPT-2's vocabulary and in all that follow it."""
    others = [byte for byte in range(256) if byte not in _PRINTED]
    return {byte: chr(byte) for byte in _PRINTED} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


def write_byte_tokenizer(directory: Path) -> None:
    """Writes ``tokenizer.json`` and its settings: the id of a token is the byte.

    Documents end with byte 0.
    """
    characters = _characters()
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    whole |= {"use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": {character: byte for byte, character in sorted(characters.items())},
        "merges": [],
    }
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": whole, "decoder": whole}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": characters[0]}
    _write(directory / "tokenizer.json", content | {"model": model})
    _write(directory / "tokenizer_config.json", settings)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
