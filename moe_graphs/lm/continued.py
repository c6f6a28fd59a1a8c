"""Training that goes on from a Hugging Face checkpoint, and the model that it saves for others."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from moe_graphs.checkpoints.loading import read_files
from moe_graphs.layers import LanguageModel
from moe_graphs.lm.options import TrainSettings
from moe_graphs.lm.run_presets import Preset

MODEL_DIRECTORY = "model"
_SEQUENCE_LENGTH = 1024
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def continued_preset(init: Path, *, steps: int = 200) -> Preset:
    """The model of a checkpoint, and gentle settings to train it further.

    Raises:
        ValueError: if our layers do not compute the model, or its files are not whole.
    """
    if not init.is_dir():
        raise ValueError(f"init: no directory {init}: give one with a Hugging Face checkpoint")
    try:
        model = read_files(init, None).config
    except ValueError as error:
        raise ValueError(f"init: {error}") from error
    training = TrainSettings(
        steps=steps,
        batch_size=8,
        sequence_length=min(_SEQUENCE_LENGTH, model.max_sequence_length),
        learning_rate=1e-5,
        warmup_steps=min(100, steps // 10),
    )
    return Preset(model, training, log_every=10, evaluate_every=100)


def checkpoint_identity(init: Path) -> str:
    """A text that differs for different checkpoints.

    It is made from the configuration and from a few thousand bytes from all over each file of
    weights, because reading all bytes would take minutes.
    """
    digest = hashlib.sha256((init / "config.json").read_bytes())
    for path in sorted(init.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for part in range(64):
                file.seek(part * size // 64)
                digest.update(file.read(256))
    return f"sha256 {digest.hexdigest()[:16]}, by samples"


def save_for_others(model: LanguageModel, tokenizer: Path, out: Path) -> Path:
    """Writes ``out/model`` for transformers: the weights, and the tokenizer's files."""
    path = out / MODEL_DIRECTORY
    model.save_pretrained(path)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, path / name)
    return path
