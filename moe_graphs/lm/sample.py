"""Text that a model writes after a prompt, without a cache of keys and values.

B continuations, S sequence length, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moe_graphs.lm.data import Text
from moe_graphs.lm.trainer import Autocast, autocast_of
from moe_graphs.parallel.vocabulary import vocabulary_group, whole_vocabulary

TEMPERATURES = (0.0, 0.8)
_PROMPT_TOKENS, _NEW_TOKENS = 24, 48


@dataclass(frozen=True)
class Sample:
    """A continuation of a prompt.

    ``continuation`` ends where the model ended the document, or after a few dozen tokens.
    """

    temperature: float
    prompt: str
    continuation: str


def sample_text(
    model: nn.Module, text: Text, *, length: int, seed: int, autocast: Autocast | None = None
) -> tuple[Sample, ...]:
    """Continuations of the beginning of the first held-out document: greedy and random ones.

    Args:
        length: the most tokens of prompt and continuation together.
        seed: seed of a random number generator of its own.
        autocast: as in ``Trainer``.
    """
    documents = text.held_out_documents
    separator = documents.separator
    first = documents.ids_T[: int(documents.offsets[1]) - 1].tolist()
    prompt = first[: min(_PROMPT_TOKENS, len(first), length // 2)]
    tokens = min(_NEW_TOKENS, length - 1 - len(prompt))
    written = continue_tokens(
        model, [separator, *prompt], tokens, TEMPERATURES, seed=seed, autocast=autocast
    )
    samples = []
    for temperature, ids in zip(TEMPERATURES, written, strict=True):
        end = ids.index(separator) if separator in ids else len(ids)
        samples.append(Sample(temperature, text.decode(prompt), text.decode(ids[:end])))
    return tuple(samples)


def continue_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    new_tokens: int,
    temperatures: Sequence[float],
    *,
    seed: int,
    autocast: Autocast | None = None,
) -> list[list[int]]:
    """``new_tokens`` ids after the prompt, once for every temperature; 0 takes the likeliest.

    All calls have one shape, because the tokens to come are padding that a causal model does not
    see. So every kernel is compiled once.
    """
    device = next(model.parameters()).device
    autocast = autocast or functools.partial(autocast_of, device)
    generator = torch.Generator().manual_seed(seed % 2**63)
    tokens_BS = torch.zeros(len(temperatures), len(prompt) + new_tokens, dtype=torch.int64)
    tokens_BS[:, : len(prompt)] = torch.tensor(prompt)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for position in range(len(prompt), tokens_BS.shape[1]):
            with autocast():
                logits_BSV = model(tokens_BS.to(device)).logits_BSV
            last_BV = whole_vocabulary(logits_BSV[:, position - 1], vocabulary_group(model))
            last_BV = last_BV.float().cpu()
            for row, temperature in enumerate(temperatures):
                tokens_BS[row, position] = _choose(last_BV[row], temperature, generator)
    model.train(was_training)
    return tokens_BS[:, len(prompt) :].tolist()


def _choose(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = (logits_V / temperature).softmax(0)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
