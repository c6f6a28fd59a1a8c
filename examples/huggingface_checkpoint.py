"""A small Qwen3-MoE with a tokenizer, for whoever has no checkpoint at hand; and text for both.

    python examples/huggingface_checkpoint.py runs/checkpoint

Nothing is downloaded: the text is Python's own standard library.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_graphs.lm.data import standard_library

END = "<|end|>"


def write_checkpoint(directory: Path) -> None:
    """Random weights, 2 layers of 8 experts, and 1,024 byte pairs."""
    texts = [document.decode() for document in standard_library().held_out[:40]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pairs = trainers.BpeTrainer(vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, pairs)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(directory)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=128,
        moe_intermediate_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)


def token_batches(directory: Path, count: int, batch: int = 4, length: int = 128) -> Tensor:
    """``[count, batch, length]`` ids of the checkpoint's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids: list[int] = []
    for document in standard_library().train:
        ids += [*tokenizer(document.decode()).input_ids, tokenizer.eos_token_id]
        if len(ids) >= count * batch * length:
            break
    return torch.tensor(ids[: count * batch * length]).view(count, batch, length)


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: a checkpoint with random weights")
