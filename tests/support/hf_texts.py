"""A checkpoint as Hugging Face has it, a tokenizer and a text, all of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hf_families import tiny

END, BEGIN = "<|end|>", "<|begin|>"
VOCABULARY = 320


def texts(count: int = 60) -> list[str]:
    kinds = ("north", "south", "east", "west")
    return [
        f"Station {n} reports wind from the {kinds[n % 4]}, {n % 9} knots, naïve sea.\n"
        * (1 + n % 4)
        for n in range(count)
    ]


def write_tokenizer(directory: Path, *, begin: bool = False, vocabulary: int = VOCABULARY) -> Path:
    """Byte-level pairs, trained here. ``begin``: it puts a token before every text, as Llama's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
        )
    tokenizer.enable_truncation(8)  # as some are saved: a document must not be cut by it
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_checkpoint(directory: Path, family: str = "mixtral", **overrides) -> Path:
    """Weights, config.json and tokenizer, as ``from_pretrained`` takes them."""
    model = tiny(family, None, vocab_size=VOCABULARY, **overrides)
    model.save_pretrained(directory)
    return write_tokenizer(directory)


def write_texts(directory: Path, count: int = 60) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "source": "a test"}) for text in texts(count)]
    (directory / "reports.jsonl").write_text("\n".join(lines) + "\n")
    return directory
